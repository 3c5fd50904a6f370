"""How a model is run for an explanation, and what that gives: shared by recorded and unrecorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import leaves_torch_as_it_was
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.explanation.prediction import ExplanationError
from vitreous.inputs.outputs import OutputActivation
from vitreous.inputs.target import Target
from vitreous.inputs.targets import Targets
from vitreous.tape import Layout
from vitreous.tape.output import CLASS_SCORES, OutputReader
from vitreous.tape.runner import ModelRunner


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


def _state(network: nn.Module, images: Tensor) -> Iterator[tuple[int, int, torch.dtype]]:
    """What changes with the numbers of a model or of images."""
    for tensor in (*network.parameters(), *network.buffers(), images):
        yield tensor.data_ptr(), tensor._version, tensor.dtype  # noqa: SLF001 - torch documents it for this purpose


class RawResult(NamedTuple):
    """The scores of all methods for one batch.

    Attributes:
        logits: the model's output, (batch, classes).
        targets: the classes that were explained; from ``classes`` on, ``objects`` by their places.
        layout: patch grid and prefix tokens.
        scores: by spelling, (batch, k, patches), or (batch, patches) for one class per image.
        family: the model's class.
        scale: what the outputs are; ``None`` for logits of which nothing more is known.
        deferred: computes the logits where no method has needed them; ``logits`` then only has their shape.
        objects: the targets that were explained and are not classes.
        values: the number that was explained of each, (batch, k), where target objects were given.
    """

    logits: Tensor
    targets: Targets
    layout: Layout
    scores: dict[str, Tensor]
    family: str
    scale: OutputActivation | None
    deferred: DeferredLogits | None = None
    objects: tuple[Target, ...] = ()
    values: Tensor | None = None

    @property
    def target(self) -> Tensor:
        """The classes in the shape in which the caller gave them: (batch, k) or (batch,)."""
        return self.targets.classes if self.targets.several else self.targets.classes[:, 0]

    @property
    def target_values(self) -> Tensor | None:
        """The numbers that were explained, in the same shape, where target objects were given."""
        return self.values if self.values is None or self.targets.several else self.values[:, 0]


@dataclass(frozen=True)
class RunSettings:
    """How a model is run.

    Attributes:
        black: what the model gets for a black pixel, where that is known.
        bare: the model in another form (compiled), for evaluations of which nothing is recorded.
        outputs: what the model's outputs are, where that is known.
        stage: which stage of the residual stream is read, where there are several.
        reader: what is read of the model's output.
    """

    black: Tensor | None = None
    bare: Callable[..., Any] | None = None
    outputs: OutputActivation | None = None
    stage: int | None = None
    reader: OutputReader = CLASS_SCORES
