"""Logits that nothing has needed yet: with the class given, a method that runs the model itself does without them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.predicted import ExplanationError
from vitreous.tape.runner import ModelRunner
from vitreous.torch_state import leaves_torch_as_it_was


class DeferredLogits:
    """The model's output for images, computed when it is first read."""

    def __init__(self, network: nn.Module, runner: ModelRunner) -> None:
        self._network, self._runner = network, runner
        self._seen = list(_state(network, runner.images))

    @leaves_torch_as_it_was
    def compute(self) -> Tensor:
        """Run the model, in evaluation mode, also where it has been switched to training since.

        Raises:
            ExplanationError: model or images were changed since they were explained.
        """
        if list(_state(self._network, self._runner.images)) != self._seen:
            raise ExplanationError(
                "the model or the images were changed after they were explained, before the logits were read: with a "
                "target given these methods need no logits; read explanation.logits before you change the model"
            )
        return run_in_evaluation(
            self._network, lambda network: self._runner.with_model(network).logits(self._runner.images)
        )


def can_be_deferred(network: nn.Module, images: Tensor) -> bool:
    """Whether it would show that a model or its images were changed in between."""
    return not any(tensor.is_inference() for tensor in (*network.parameters(), *network.buffers(), images))


def _state(network: nn.Module, images: Tensor) -> Iterator[tuple[int, int, torch.dtype]]:
    """What changes with the numbers of a model or of images."""
    for tensor in (*network.parameters(), *network.buffers(), images):
        yield tensor.data_ptr(), tensor._version, tensor.dtype  # noqa: SLF001 - torch documents it for this purpose
