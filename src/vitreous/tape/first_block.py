"""What a model hands to its first block; the blocks themselves are not run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.architecture import Architecture
from vitreous.inputs.model_input import Inputs, ask, outside_inference
from vitreous.tape.interception import Interception, result_at
from vitreous.torch_state import outside_inference_mode


class SeenEnough(BaseException):  # no error, and nothing in a model may catch it
    """A listener has seen what it was to see: the rest need not run."""


class _FirstBlock:
    """Sees what the first block is given, and ends the run."""

    def __init__(self, architecture: Architecture) -> None:
        self._point = architecture.blocks[0].input
        self.steps, self.own_steps = frozenset({self._point.step}), frozenset[int]()
        self.stream: Tensor | None = None

    def before(self, number: int) -> None:
        """Nothing to do."""
        del number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """x_0 has been made."""
        del number, args, kwargs
        self.stream = self._point.axes.tokens(result_at(output, self._point.output))
        raise SeenEnough


def first_block_input(
    architecture: Architecture, model: nn.Module, inputs: Inputs, *, graph: bool = False
) -> Tensor | None:
    """The stream in front of the first block, (batch, tokens, channels); ``None`` where the model fails before it.

    With a ``graph`` it can be differentiated, where the model does not prevent that.
    """
    first, given = _FirstBlock(architecture), inputs if graph else outside_inference(inputs)
    listening = Interception(architecture, first, {})
    listening.start(given)
    with (
        suppress(SeenEnough, Exception),
        outside_inference_mode(),
        torch.set_grad_enabled(graph),
        listening,
    ):
        ask(model, given)
    return first.stream
