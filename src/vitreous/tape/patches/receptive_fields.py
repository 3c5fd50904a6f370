"""Which pixels tokens are made of (their receptive fields, by gradients), and whether blocks keep patches in place.

Every one of a few copies of a fixed picture of noise belongs to one token. The gradient of a random projection of that
token shows which pixels count for it. All copies run together, as far as the first block, once for a model and a size
of pictures; the picture is always the same, so that what is found depends on the model alone.

A block adds to the stream, so what is added to a patch before a block is found in the same place after it, more
than in any other. A model that turns, shifts or shuffles its patches between blocks and does not turn them back gives
the same class scores, but its maps would show other places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import at_least_float32, outside_inference_mode
from vitreous.architecture import Architecture, Point
from vitreous.errors import UnsupportedModelError
from vitreous.inputs.model_io import Inputs, ask, outside_inference
from vitreous.inputs.patch_geometry import PatchGeometry, Size, patch_of_line
from vitreous.tape.recording.interception import Interception, result_at, with_result

PROBES = 8  # tokens that are probed
PROBES_BEHIND = 4  # where blocks of earlier stages have to run as well
_NOTHING = 1e-12  # of a line's greatest energy (squared gradient): rounding, or exactly nothing, in a receptive field
_NO_SHIFT = 0.5  # pixels; receptive fields of known ends are exact to half a pixel
_NO_BLURRED_SHIFT = 1 / 8  # of a patch; centres of mass are not as exact, weights are no smooth window
_SHIFTS_AT_LEAST = 4  # so many centres of mass have to agree, to a quarter of a patch
_SHIFTS_AGREE = 0.25
_PITCHES = (0.5, 1.5)  # times what equal cells would have: overlapping patches are closer together
_CLEARLY_MORE = 2.0  # times what other tokens have of a patch's pixels; scattered pixels are alike for all
_WRONG = 1 / 8  # of the tokens may be unclear; some patches may have changed places where more are
_WRONG_IF_MIXED = 1 / 2
_WIDE = 1.5  # patches: a receptive field that is as wide has no gaps, unless it gathers scattered pixels
_GAPS = 0.4


@dataclass(frozen=True)
class ReceptiveFields:
    """What pixels count for some tokens.

    Attributes:
        energy: the squared gradient of each pixel, (tokens, height, width), in float64; of a volume's voxels (tokens,
            depth, height, width).
        places: by axis of the grid, where each token's patch is: its row, its column.
        grid: rows and columns of patches.
    """

    energy: Tensor
    places: tuple[Tensor, ...]
    grid: Size

    def geometry(self) -> PatchGeometry | None:
        """Where patches are centred; ``None`` where the fields show equal cells of the picture."""
        size = self.energy.shape[1:]
        axes = list(zip(self._marginals(), self.places, size, self.grid, strict=True))
        lines = [_line_of_ends(marginal, index, length / cells) for marginal, index, length, cells in axes]
        if not any(lines):
            shift = _shift_of_mass(
                torch.cat([_shifts(marginal, index, cells) for marginal, index, _, cells in axes if cells > 1])
            )
            lines = [_shifted(length / cells, shift) for _, _, length, cells in axes]
        equal = [_Line(length / cells / 2, length / cells) for length, cells in zip(size, self.grid, strict=True)]
        found = [
            same if line is None or line.distance(same, cells) <= _NO_SHIFT else line
            for line, same, cells in zip(lines, equal, self.grid, strict=True)
        ]
        if found == equal:
            return None
        return PatchGeometry(tuple(line.offset for line in found), tuple(line.pitch for line in found), tuple(size))

    def check(self, name: str, geometry: PatchGeometry | None, *, mixed: bool) -> None:
        """Refuse tokens that are made of other pixels than those of their patch.

        Args:
            name: the model's.
            geometry: where patches are centred.
            mixed: whether the tokens have been through blocks of earlier stages. They see much of the picture then, and
                their own place has to count no less than it would if they saw all of it.

        Raises:
            UnsupportedModelError: tokens see scattered pixels, or those of another place.
        """
        if len(self.energy) < 2:
            return
        if any(_scattered(marginal, cells) for marginal, cells in zip(self._marginals(), self.grid, strict=True)):
            raise UnsupportedModelError(
                f"a token of {name} gathers scattered pixels of the picture (a dilated convolution, or an order of "
                "axes in which neighbouring pixels go to different tokens), so that it has no place in a map"
            )
        share = self._shares(geometry)
        same = torch.stack([place[:, None] == place for place in self.places]).all(dim=0)
        own = share.diagonal()
        others = (share * ~same).sum(dim=0) / (~same).sum(dim=0).clamp(min=1)
        even = 1 / math.prod(self.grid)
        wrong = int((own < even / 2 if mixed else own <= _CLEARLY_MORE * others).sum())
        if wrong > (_WRONG_IF_MIXED if mixed else _WRONG) * len(own):
            raise _elsewhere(name, wrong, len(own))

    def _marginals(self) -> list[Tensor]:
        axes = range(1, self.energy.dim())
        return [self.energy.sum(dim=[other for other in axes if other != axis]) for axis in axes]

    def _shares(self, geometry: PatchGeometry | None) -> Tensor:
        """The part of each token's energy in the pixels of each token's patch, (token, patch)."""
        inside = [
            (patch_of_line(length, cells, geometry, axis) == place[:, None]).to(self.energy)
            for axis, (length, cells, place) in enumerate(
                zip(self.energy.shape[1:], self.grid, self.places, strict=True)
            )
        ]
        if len(inside) == 3:
            sums = torch.einsum("tdhw,pd,ph,pw->tp", self.energy, *inside)
        else:
            sums = torch.einsum("thw,ph,pw->tp", self.energy, *inside)
        return sums / self.energy.flatten(1).sum(dim=1)[:, None]


def probed_patches(grid: Size, count: int) -> tuple[Tensor, ...]:
    """By axis, the places of some patches, spread over the picture and never in the order of a diagonal."""
    first, *others = (torch.linspace(0, cells - 1, count).round().long() for cells in grid)
    generator = torch.Generator().manual_seed(0)
    return first, *(places[torch.randperm(count, generator=generator)] for places in others)


def token_numbers(places: Sequence[Tensor], grid: Size) -> Tensor:
    """Which patches stand at these places, counted row by row."""
    number = places[0]
    for place, cells in zip(places[1:], grid[1:], strict=True):
        number = number * cells + place
    return number


def noise_picture(shape: torch.Size) -> Tensor:
    """The picture that is always the same, (channel, height, width)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def receptive_fields(
    stream: Tensor, pictures: Tensor, grid: Size, prefix: int, channel_axis: int = 1
) -> ReceptiveFields | None:
    """The pixels that count for one token of each picture.

    Args:
        stream: what became of the pictures before the first block, (picture, token, channel).
        pictures: (picture, channel, height, width), from which the stream was made in a graph.
        grid: rows and columns of patches.
        prefix: how many tokens stand before the patches.
        channel_axis: the axis of the pictures' channels.

    Returns:
        ``None`` where gradients do not show it: the model cuts them off, or no token depends on the picture.
    """
    if not stream.requires_grad:
        return None
    places = probed_patches(grid, len(stream))
    tokens = stream[torch.arange(len(stream)), prefix + token_numbers(places, grid)]
    generator = torch.Generator().manual_seed(2)
    directions = torch.randn(tokens.shape, generator=generator).to(tokens)
    try:
        (gradient,) = torch.autograd.grad((tokens * directions).sum(), [pictures], allow_unused=True)
    except RuntimeError:  # an operator without a gradient
        return None
    if gradient is None or not bool(gradient.isfinite().all()):
        return None
    energy = gradient.detach().cpu().double().square().sum(dim=channel_axis)
    seeing = energy.flatten(1).sum(dim=1) > 0  # something else may stand in the place of some patches
    if not bool(seeing.any()):
        return None
    return ReceptiveFields(energy[seeing], tuple(place[seeing] for place in places), grid)


def with_changed_patches(picture: Tensor, grid: Size, count: int, channel_axis: int = 1) -> Tensor:
    """A picture (channel, height, width) as it is, and each time with another of the patches that are probed.

    ``channel_axis`` counts from the axis of pictures on, which stands before the others in a batch.
    """
    places = probed_patches(grid, count)
    size = [length for axis, length in enumerate(picture.shape, start=1) if axis != channel_axis]
    inside = torch.ones(count, *[1] * len(size), dtype=torch.bool)
    for axis, (length, cells, place) in enumerate(zip(size, grid, places, strict=True), start=1):
        line = patch_of_line(length, cells) == place[:, None]
        inside = inside & line.view(count, *(length if other == axis else 1 for other in range(1, len(size) + 1)))
    pictures = picture.repeat(count + 1, *[1] * picture.dim())
    pictures[1:] += inside.unsqueeze(channel_axis).to(picture) * picture.flip(tuple(range(picture.dim())))
    return pictures


def check_changed_patches(name: str, streams: Tensor, grid: Size, *, mixed: bool) -> None:
    """Refuse tokens that do not change with their patch; for models whose gradients do not reach the picture.

    Args:
        name: the model's.
        streams: what became of ``with_changed_patches``, (picture, token, channel).
        grid: rows and columns of patches.
        mixed: see ``ReceptiveFields.check``.

    Raises:
        UnsupportedModelError: other tokens change more.
    """
    numbers = token_numbers(probed_patches(grid, len(streams) - 1), grid)
    change = (streams[1:] - streams[:1])[:, -math.prod(grid) :].norm(dim=-1).cpu()
    own = change.gather(1, numbers[:, None])[:, 0]
    limit = change.mean(dim=1) * (1 / 2 if mixed else _CLEARLY_MORE)
    seeing = change.amax(dim=1) > 0
    wrong, count = int((seeing & (own <= limit)).sum()), int(seeing.sum())
    if wrong > (_WRONG_IF_MIXED if mixed else _WRONG) * count:
        raise _elsewhere(name, wrong, count)


def _elsewhere(name: str, wrong: int, count: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{wrong} of {count} tokens of {name} that were looked at do not see the pixels of their place, row by row, "
        "more than other tokens do: its patches stand in another order, or gather scattered pixels, so no map can be "
        "laid out"
    )


@dataclass(frozen=True)
class _Line:
    """Where patches in a line are centred, in pixels."""

    offset: float
    pitch: float

    def distance(self, other: _Line, cells: int) -> float:
        """How far the centres of a line of so many patches are from those of another, at most."""
        last = self.offset - other.offset + (cells - 1) * (self.pitch - other.pitch)
        return max(abs(self.offset - other.offset), abs(last))


def _ends(energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels of a line that count, (token, pixel), the first of each token, and the one after the last."""
    seen = energy > _NOTHING * energy.amax(dim=1, keepdim=True)
    return seen, seen.int().argmax(dim=1), seen.shape[1] - seen.flip(1).int().argmax(dim=1)


def _line_of_ends(energy: Tensor, index: Tensor, cell: float) -> _Line | None:
    """The line through the middles of receptive fields that no edge of the picture cuts off: all have one width."""
    _, first, last = _ends(energy)
    width, middle = last - first, (first + last) / 2
    free = (first > 0) & (last < energy.shape[1])
    if not bool(free.any()) and int(width.max()) > cell:
        return None  # the edges may have cut off all of them
    whole = width == (width[free] if bool(free.any()) else width).max()
    index, middle = index[whole], middle[whole]
    low, high = int(index.argmin()), int(index.argmax())
    steps = int(index[high] - index[low])
    if steps == 0:
        return None
    pitch = float(middle[high] - middle[low]) / steps
    line = _Line(float(middle[low]) - pitch * int(index[low]), pitch)
    straight = (middle - (line.offset + pitch * index)).abs().max() <= _NO_SHIFT
    return line if bool(straight) and _PITCHES[0] <= pitch / cell <= _PITCHES[1] else None


def _shifts(energy: Tensor, index: Tensor, cells: int) -> Tensor:
    """How far centres of mass are from those of equal cells, in patches; edges cut off those beside them."""
    inside = (index > 0) & (index < cells - 1)
    energy, index = energy[inside], index[inside]
    places = (torch.arange(energy.shape[1], dtype=energy.dtype) + 0.5) * (cells / energy.shape[1])
    return (energy @ places) / energy.sum(dim=1) - (index + 0.5)


def _shift_of_mass(shifts: Tensor) -> float:
    """What receptive fields that reach far, or over all of a picture, are shifted by down and across, in patches."""
    if len(shifts) < _SHIFTS_AT_LEAST:
        return 0.0
    shift = float(shifts.median())
    agree = float((shifts - shift).abs().max()) <= _SHIFTS_AGREE
    return shift if agree and _NO_BLURRED_SHIFT < abs(shift) < 1 else 0.0


def _shifted(cell: float, shift: float) -> _Line:
    """Equal cells that are shifted, to half a pixel."""
    return _Line(cell / 2 + round(2 * shift * cell) / 2, cell)


def _scattered(energy: Tensor, cells: int) -> bool:
    """Whether most receptive fields are wider than a patch and full of gaps, along one axis."""
    seen, first, last = _ends(energy)
    width = last - first
    gaps = 1 - seen.sum(dim=1) / width
    return bool(((width > _WIDE * energy.shape[1] / cells) & (gaps > _GAPS)).float().mean() > 0.5)


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
