"""Where in the picture the numbers of a run stand: positions are followed through the steps of a traced run.

Stages of a hierarchical model have another grid than the patch embedding made, and some keep their tokens window by
window. Neither shows in shapes. But every step either moves numbers (then the same step moves their positions), works
on each place by itself (then positions stay), or joins neighbours (then their positions are averaged).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous.architecture.operations import (
    ALIAS,
    CONVOLUTION,
    FUSED,
    MULTI_HEAD,
    PRODUCT,
    SLICE,
    product_axes,
    product_operands,
    to_letters,
)
from vitreous.architecture.trace import Step, Trace, Value, tensors_in

_CAST = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "requires_grad", "cpu", "cuda"})
_MOVE = frozenset(
    {
        *("roll", "flip", "fliplr", "flipud", "rot90", "cat", "stack", "hstack", "vstack", "repeat", "tile"),
        *("repeat_interleave", "index_select", "gather", "take_along_dim", "pixel_shuffle", "pixel_unshuffle"),
        *("channel_shuffle", "unfold", "fold", "broadcast_to", "tril", "triu"),
    }
)
_REDUCE = frozenset({"mean", "sum", "amax", "amin", "max", "min", "nanmean", "logsumexp", "std", "var", "norm"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "interpolate", "upsample", "grid_sample"})
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
_COLOURS = (1, 3)  # channels that most pictures have
_NEAR = 1e-2  # of a pixel: positions are float32 means of a few hundred whole numbers


class Follower:
    """Follows what is noted of the numbers of a value through the steps behind it.

    Args:
        trace: the run.
        start: the value.
        noted: a number for each of its numbers; NaN for one that has none.
        averages: whether numbers that are joined get the mean of what is noted; otherwise they have nothing noted
            unless they all have the same.
    """

    def __init__(self, trace: Trace, start: Value, noted: Tensor, *, averages: bool) -> None:
        self._trace, self._averages = trace, averages
        self._known: dict[int, Tensor] = {start.index: noted}
        self._start = start

    def follow(self, last: int, visit: Callable[[Step, Value, Tensor], None]) -> None:
        """Go on to the step ``last`` and tell what is noted of each value on the way; unknown ones are left out."""
        trace = self._trace
        steps = trace.steps[self._start.step + 1 : last + 1]
        final = {index: step.number for step in steps for index in step.operands}
        with torch.no_grad():
            for step in steps:
                for index, noted in self._results(step).items():
                    self._known[index] = noted
                    visit(step, trace.values[index], noted)
                for index in {*step.operands, *step.outputs}:
                    if final.get(index, -1) <= step.number:
                        self._known.pop(index, None)

    def _results(self, step: Step) -> dict[int, Tensor]:
        operands = [index for index in step.operands if index in self._known]
        if not operands:
            return {}
        try:
            results = self._apply(step, operands)
        except _FAILURES:
            return {}
        values = [self._trace.values[index] for index in step.outputs]
        if len(results) != len(values):
            return {}
        return {
            value.index: noted
            for value, noted in zip(values, results, strict=True)
            if noted is not None and noted.shape == value.shape
        }

    def _apply(self, step: Step, operands: list[int]) -> list[Tensor | None]:
        name, first = step.operation, self._known[operands[0]]
        shape = self._trace.values[step.outputs[0]].shape
        noted: Tensor | None = None
        if name in _CAST or "dropout" in name:
            noted = first
        elif name in ALIAS or name in SLICE or name in _MOVE or name == "pad":
            return self._moved(step)
        elif name in _REDUCE and shape != first.shape:
            return self._reduced(step, first)
        elif name in {"linear", FUSED, MULTI_HEAD}:
            # A learned query depends on nothing, and stands nowhere.
            first_argument = step.argument(0, "input" if name == "linear" else "query")
            own = self._trace.values[step.operands[0]].tensor is first_argument
            query = self._known.get(step.operands[0]) if own else None
            noted = None if query is None else self._joined(query, (query.dim() - 1,)).expand(shape)
        elif name in CONVOLUTION or "pool" in name or name in _TRANSPOSED:
            noted = self._resized(first, shape, "pool" not in name and name != "interpolate", 3 if "3d" in name else 2)
        elif name in PRODUCT:
            noted = self._product(step, shape)
        else:
            # Of x + f(x) the one that was there before.
            same = [index for index in operands if self._known[index].shape == shape]
            noted = self._known[min(same)] if same else None
        return [noted] + [None] * (len(step.outputs) - 1)

    def _joined(self, noted: Tensor, axes: tuple[int, ...]) -> Tensor:
        """What is noted of the numbers along some axes together, with those axes of size 1."""
        if self._averages:
            return noted.nanmean(dim=axes, keepdim=True)
        low, high = noted.amin(dim=axes, keepdim=True), noted.amax(dim=axes, keepdim=True)
        return torch.where(low == high, low, torch.nan)

    def _moved(self, step: Step) -> list[Tensor | None]:
        """The same step on what is noted; a constant that is put beside it has nothing noted."""
        tensors = {id(self._trace.values[index].tensor): self._known.get(index) for index in step.operands}
        joins = step.operation in {"cat", "stack", "hstack", "vstack", "concat"}
        shift = 1.0 if step.operation in {"pad", "unfold", "fold"} else 0.0  # what is padded with 0 has nothing noted

        def given(value: Any) -> Any:
            if isinstance(value, Tensor) and id(value) in tensors:
                noted = tensors[id(value)]
                return value.new_full(value.shape, torch.nan, dtype=torch.float32) if noted is None else noted + shift
            if isinstance(value, Tensor) and joins:
                return torch.full(value.shape, torch.nan, device=value.device)
            if type(value) in (list, tuple):
                return type(value)(given(item) for item in value)
            return value

        args, kwargs = given(step.args), {key: given(value) for key, value in step.kwargs.items()}
        if step.operation == "pad" and isinstance(kwargs.get("value", 0.0), float | int):
            kwargs = {**kwargs, "value": 0.0} if len(args) < 4 else kwargs
        results: list[Tensor | None] = list(tensors_in(step.func(*args, **kwargs)))
        if shift:
            return [None if each is None else torch.where(each == 0, torch.nan, each - shift) for each in results]
        return results

    def _resized(self, noted: Tensor, shape: torch.Size, channels: bool, axes: int = 2) -> Tensor:  # noqa: FBT001
        """Behind a convolution or a pooling over neighbours: the mean position of each place's part of the grid."""
        spatial = len(shape) - 2 if channels else min(axes, len(shape) - 1)
        sizes = tuple(shape[-spatial:])
        assert spatial in (1, 2, 3)
        if channels:
            noted = self._joined(noted, (noted.dim() - spatial - 1,))
        if tuple(noted.shape[-spatial:]) == sizes:
            return noted.expand(shape)
        if not self._averages:
            return noted.new_full(shape, torch.nan)
        flat = noted.flatten(0, -spatial - 1)[:, None]
        known = flat.isfinite()
        if any(new > old for new, old in zip(sizes, noted.shape[-spatial:], strict=True)):
            mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[spatial]
            sized = torch.nn.functional.interpolate(flat, size=sizes, mode=mode)
        elif spatial == 3:
            share, total = (
                torch.nn.functional.adaptive_avg_pool3d(each, (sizes[0], sizes[1], sizes[2]))
                for each in (known.float(), torch.where(known, flat, 0.0))
            )
            sized = total / share
        else:
            # One axis is a grid of one row.
            size = (sizes[0] if spatial == 2 else 1, sizes[-1])
            share, total = (
                torch.nn.functional.adaptive_avg_pool2d(each if spatial == 2 else each[:, :, None], size)
                for each in (known.float(), torch.where(known, flat, 0.0))
            )
            sized = total / share  # NaN where nothing is noted
        return sized[:, 0].reshape(*noted.shape[:-spatial], *sizes).expand(shape)

    def _product(self, step: Step, shape: torch.Size) -> Tensor | None:
        """A product of two: what the one hands on whose noted numbers do not change along the axis that is summed."""
        operands = product_operands(step.operation, step.args, step.kwargs)
        axes = None if operands is None else product_axes(step.operation, step.args, *operands)
        if operands is None or axes is None:
            return None
        by_tensor = {id(self._trace.values[index].tensor): self._known.get(index) for index in step.operands}
        constant = not all(id(operand) in by_tensor for operand in operands)
        for operand, letters in zip(operands, (axes.left, axes.right), strict=True):
            noted = by_tensor.get(id(operand))
            if noted is None:
                continue
            summed = tuple(letters.index(letter) for letter in axes.contracted)
            if constant or not self._averages:
                noted = self._joined(noted, summed)
            else:
                low, high = noted.amin(dim=summed, keepdim=True), noted.amax(dim=summed, keepdim=True)
                noted = torch.where(low == high, low, torch.nan)
            if bool(noted.isnan().all()):
                continue
            left = "".join(letter for letter in letters if letter not in axes.contracted)
            return to_letters(noted.squeeze(summed), left, axes.output).expand(shape)
        return torch.full(shape, torch.nan, device=operands[0].device)

    def _reduced(self, step: Step, noted: Tensor) -> list[Tensor | None]:
        axis = step.argument(1, "dim", step.kwargs.get("axis"))
        keep = step.argument(2, "keepdim", default=False)
        if axis is None:
            return [None]
        axes = tuple(each % noted.dim() for each in (axis if isinstance(axis, list | tuple) else (axis,)))
        joined = self._joined(noted, axes)
        result = joined if keep else joined.squeeze(axes)
        return [result] * len(step.outputs)


@dataclass(frozen=True)
class Places:
    """Where the tokens of a stream stand.

    Attributes:
        grid: rows and columns of patches, behind the depth of volumes and clips.
        prefix: how many tokens come before the patches and stand nowhere.
        order: by place, row by row behind the prefix: which token of the model stands there; ``None`` where the model
            has them in this order.
        fold: how many rows of the stream's first axis are one image's.
    """

    grid: tuple[int, ...]
    prefix: int
    order: tuple[int, ...] | None = None
    fold: int = 1


class PixelPositions:
    """The positions of a picture's pixels, or of a volume's voxels, followed through a run along each axis."""

    def __init__(self, trace: Trace, last: int, sizes: Iterable[int]) -> None:
        picture, wanted = trace.values[0], set(sizes)
        self._batch = trace.batch
        self._far = 4.0 * max(picture.shape[1:], default=1)  # between two images: more than any position
        self._followed: list[dict[int, Tensor]] = []  # by axis, the first one with the image's number
        if len(picture.shape) not in (4, 5) or not picture.tensor.is_floating_point():
            return
        device, dims = picture.tensor.device, len(picture.shape)
        for axis in _spatial_axes(picture.shape):
            noted = torch.arange(picture.shape[axis], device=device).view(
                [-1 if each == axis else 1 for each in range(dims)]
            )
            if not self._followed:
                noted = noted + torch.arange(self._batch, device=device).view(-1, *[1] * (dims - 1)) * self._far
            found: dict[int, Tensor] = {}

            def keep(step: Step, value: Value, followed: Tensor, found: dict[int, Tensor] = found) -> None:
                del step
                if value.shape.numel() in wanted and len(value.shape) > 2:
                    found[value.index] = followed

            Follower(trace, picture, noted.float().expand(picture.shape), averages=True).follow(last, keep)
            self._followed.append(found)

    def places(self, value: Value, batch: int, channel: int) -> Places | None:
        """The grid that the tokens of a value make; ``None`` where they make none, or are not known."""
        if not self._followed or not all(value.index in found for found in self._followed):
            return None
        axes = [axis for axis in range(len(value.shape)) if axis not in (batch, channel)]
        flat = [
            noted[value.index].nanmean(dim=channel, keepdim=True).permute(max(batch, 0), *axes, channel).flatten()
            if batch >= 0
            else noted[value.index].nanmean(dim=channel).flatten()
            for noted in self._followed
        ]
        fold = 1 if batch >= 0 else value.shape[0] // self._batch
        if len(flat[0]) % self._batch or (batch < 0 and (channel == 0 or value.shape[0] % self._batch)):
            return None
        positions = [each.view(self._batch, -1) for each in flat]
        images = (positions[0] / self._far).floor()
        expected = torch.arange(self._batch, device=images.device)[:, None]
        if not bool(((images == expected) | images.isnan()).all()):
            return None
        return _grid_of([each[0].cpu() for each in positions], fold)


def _spatial_axes(shape: torch.Size) -> tuple[int, ...]:
    """Rows and columns; in a volume its depth before them, which stands behind the channels or, in a clip, before."""
    if len(shape) == 4:
        return (2, 3)
    return (1, 3, 4) if shape[2] in _COLOURS and shape[1] not in _COLOURS else (2, 3, 4)


def _grid_of(positions: list[Tensor], fold: int) -> Places | None:
    known = torch.stack([each.isfinite() for each in positions]).all(dim=0)
    prefix = int((~known).sum())
    if not bool(known[prefix:].all()) or prefix == len(known):
        return None  # tokens that stand nowhere between those that do, or nothing but them
    numbers = [_numbered(each[prefix:]) for each in positions]
    grid = tuple(int(each.max()) + 1 for each in numbers)
    cells = torch.zeros_like(numbers[0])
    for each, length in zip(numbers, grid, strict=True):
        cells = cells * length + each
    if math.prod(grid) != len(cells) or len(set(cells.tolist())) != len(cells):
        return None
    order = cells.argsort()
    if bool((order == torch.arange(len(order))).all()):
        return Places(grid, prefix, None, fold)
    return Places(grid, prefix, (*range(prefix), *(order + prefix).tolist()), fold)


def _numbered(positions: Tensor) -> Tensor:
    """Equal positions numbered from 0 in ascending order."""
    ascending, order = positions.sort()
    numbers = torch.zeros_like(order)
    numbers[order] = torch.cat((torch.zeros(1), (ascending.diff() > _NEAR).float())).cumsum(0).long()
    return numbers


@dataclass(frozen=True)
class Placement:
    """Which token of the stream each number of a step's result belongs to.

    Attributes:
        dims: how many axes the result has.
        summed: the axes along which all numbers belong to the same token: channels, heads.
        tokens: for the rest of one image's numbers, in their order, the token; -1 for what belongs to none.
    """

    dims: int
    summed: tuple[int, ...]
    tokens: Tensor

    def by_token(self, contribution: Tensor, batch: int, count: int) -> Tensor | None:
        """A contribution of the result's shape, given to its tokens, (batch, tokens); ``None`` if it does not fit.

        What belongs to none, as padding and pooled keys do, is shared by all of the image's tokens.
        """
        if contribution.dim() != self.dims:
            return None
        summed = contribution.sum(dim=self.summed) if self.summed else contribution
        if summed.numel() != batch * len(self.tokens):
            return None
        index = self.tokens.to(summed.device)
        spread = summed.new_zeros(batch, count + 1)
        spread.index_add_(1, torch.where(index < 0, count, index), summed.reshape(batch, -1))
        return spread[:, :count] + spread[:, count:] / count


def find_placements(trace: Trace, start: Value, tokens: Tensor, last: int) -> dict[int, Placement]:
    """Of each step behind a value, as far as ``last``: which tokens its result belongs to.

    Args:
        trace: the run.
        start: the stream in front of these steps.
        tokens: the token that each of its numbers belongs to, counted through all images; of its shape.
        last: a step.
    """
    count = (int(tokens.max()) + 1) // trace.batch
    found: dict[int, Placement] = {}

    def keep(step: Step, value: Value, noted: Tensor) -> None:
        placement = _placement(noted, trace.batch, count) if value.index == step.outputs[0] else None
        if placement is not None:
            found[step.number] = placement

    Follower(trace, start, tokens.float(), averages=False).follow(last, keep)
    return found


def _placement(noted: Tensor, batch: int, count: int) -> Placement | None:
    noted, dims = noted.nan_to_num(-1), noted.dim()
    summed: list[int] = []
    for axis in range(1, dims):
        first = noted.narrow(axis, 0, 1)
        if bool((noted == first).all()):
            summed.append(axis)
            noted = first
    if noted.shape[0] % batch:
        return None
    numbers = noted.reshape(batch, -1).long()
    images = torch.arange(batch, device=noted.device)[:, None]
    tokens = torch.where(numbers < 0, -1, numbers - images * count)
    inside = (tokens >= -1) & (tokens < count)
    if not bool(inside.all()) or not bool((tokens == tokens[0]).all()):
        return None  # images are not one after the other
    return Placement(dims, tuple(summed), tokens[0].cpu())
