"""Whether blocks leave the patches in their places: what changes after a block when some change before it.

A block adds to the stream, so what is added to a patch before a block is found in the same place after it, more
than in any other. A model that turns, shifts or shuffles its patches between blocks and does not turn them back gives
the same class scores, but its maps would show other places.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import at_least_float32, outside_inference_mode
from vitreous.architecture import Architecture, Point
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_input import Inputs, ask, outside_inference
from vitreous.tape.recording.interception import Interception, result_at, with_result

_MOST = 8  # patches are changed before a block
_SHARE = 1 / 8  # of all patches, at least one
_ALIKE = 0.6  # cosine between what was added and what is found elsewhere; what blocks mix in is far less like it


class StopRun(BaseException):  # no error, and nothing in a model may catch it
    """Ends a run that has shown what was needed."""


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
        raise StopRun


def first_block_input(
    architecture: Architecture, model: nn.Module, inputs: Inputs, *, graph: bool = False
) -> Tensor | None:
    """The stream before the first block, (batch, tokens, channels); ``None`` where the model fails before it.

    With a ``graph`` it can be differentiated, where the model does not prevent that.
    """
    first, given = _FirstBlock(architecture), inputs if graph else outside_inference(inputs)
    interception = Interception(architecture, first)
    interception.start(given)
    with (
        suppress(StopRun, Exception),
        outside_inference_mode(),
        torch.set_grad_enabled(graph),
        interception,
    ):
        ask(model, given)
    return first.stream


class _Moved(BaseException):  # no error, and nothing in a model may catch it
    """Patches were found in other places after a block."""

    def __init__(self, layer: int, missed: int, changed: int) -> None:
        super().__init__()
        self.layer, self.missed, self.changed = layer, missed, changed


class _Changing:
    """Makes the second of two equal pictures differ from the first in a few patches before every block."""

    def __init__(self, architecture: Architecture, patches: int) -> None:
        self._patches = patches
        points = [*(block.input for block in architecture.blocks), architecture.blocks[-1].output]
        self._points: dict[int, list[tuple[int, Point]]] = {}
        for layer, point in enumerate(points):
            self._points.setdefault(point.step, []).append((layer, point))
        self.steps, self.own_steps = frozenset(self._points), frozenset[int]()
        self._generator = torch.Generator().manual_seed(0)
        self._changed: Tensor | None = None  # the patches that were changed before the last block
        self._added = torch.empty(0)  # what was added to them, (patch, channel)

    def before(self, number: int) -> None:
        """Nothing to do."""
        del number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Look where the stream differs, and make it differ elsewhere."""
        del args, kwargs
        for layer, point in self._points[number]:
            stream = result_at(output, point.output)
            tokens = point.axes.tokens(stream)
            self._check(layer, tokens)
            output = with_result(output, point.output, point.axes.stream(self._differing(tokens), stream.shape))
        return output

    def _check(self, layer: int, tokens: Tensor) -> None:
        if self._changed is None:
            return
        first, second = at_least_float32(tokens[:, -self._patches :])
        change = second - first
        if not bool(change.isfinite().all()) or change.shape[-1] != self._added.shape[-1]:
            return
        changed = torch.arange(len(self._changed))
        found = change @ self._added.to(change).T  # (patch, changed patch)
        most, place = found.max(dim=0)
        likeness = most / (change[place].norm(dim=-1) * self._added.to(change).norm(dim=-1))
        elsewhere = (likeness > _ALIKE) & (found[self._changed, changed] < most / 2)
        missed = int((elsewhere | ~change[self._changed].any(dim=-1)).sum())
        if bool(change.any()) and 2 * missed > len(self._changed):
            raise _Moved(layer, missed, len(self._changed))

    def _differing(self, tokens: Tensor) -> Tensor:
        count = max(1, min(_MOST, int(self._patches * _SHARE)))
        self._changed = torch.randperm(self._patches, generator=self._generator)[:count]
        first = at_least_float32(tokens[0])
        noise = torch.randn(count, tokens.shape[-1], generator=self._generator)
        self._added = noise.to(first) * first.std()
        second = first.clone()
        second[tokens.shape[1] - self._patches + self._changed] += self._added
        return torch.stack((first, second)).to(tokens)


def check_block_order(architecture: Architecture, model: nn.Module, inputs: Inputs, patches: int) -> None:
    """Refuse a model that has its patches in other places after a block; costs a run of two pictures.

    A model that fails in such a run is believed.

    Raises:
        UnsupportedModelError: most of what is added to patches before a block is found elsewhere after it.
    """
    if patches < 2:
        return
    twice = torch.zeros(2, dtype=torch.int64, device=inputs.device)
    given = outside_inference(inputs[twice])
    interception = Interception(architecture, _Changing(architecture, patches))
    interception.start(given)
    try:
        with suppress(Exception), outside_inference_mode(), torch.no_grad(), interception:
            ask(model, given)
    except _Moved as moved:
        raise UnsupportedModelError(
            f"{architecture.name} has its patches in other places behind block {moved.layer - 1} than in front of it: "
            f"{moved.missed} of {moved.changed} that were changed show it elsewhere (they are turned, shifted or "
            "shuffled), so no map can be laid out"
        ) from None
