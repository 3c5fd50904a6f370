"""Perturbation methods: run the model with parts of the image painted or dropped, in batches over images and masks.

Masks are drawn from a seed, the same for every image of a batch.

``rerun`` and the functions behind it run the model again in batches of bounded size, for integrals, noise and masks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError
from vitreous.inputs.model_io import Inputs
from vitreous.inputs.patch_geometry import INTERPOLATION, PatchGeometry, Size, patch_of_line
from vitreous.inputs.targets import check_classes
from vitreous.methods.readout import Procedure, View, total
from vitreous.tape import Intervention, Layout, Needs, Tape
from vitreous.tape.output import Quantity
from vitreous.tape.runner import ModelRunner

_AT_ONCE = 16  # masks of pixels built at once


class Masks(ABC):
    """Masks of one image size."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pixels(self, numbers: Tensor) -> Tensor:
        """Return some of the masks as factors of pixels, (numbers, height, width), with the depth of volumes first."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_j weights_j mask_j, (..., masks) -> (..., height x width)."""
        parts = torch.split(torch.arange(len(self)), _AT_ONCE)
        return total(weights[..., part] @ self.pixels(part).flatten(1).to(weights) for part in parts)


class PatchMasks(Masks):
    """Masks of whole patches.

    Attributes:
        kept: which patches are kept, (masks, patches); 0 and 1, or values in between for painting only.
    """

    def __init__(self, kept: Tensor, layout: Layout, size: Size) -> None:
        self.kept = kept
        self._patch_of_pixel = patch_of_pixel(layout.grid, size, layout.geometry)
        self._size = size

    def __len__(self) -> int:
        return len(self.kept)

    def pixels(self, numbers: Tensor) -> Tensor:
        """Return the factor of each pixel's patch."""
        return self.kept[numbers][:, self._patch_of_pixel].view(len(numbers), *self._size)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_j weights_j mask_j, (..., masks) -> (..., patches)."""
        return weights @ self.kept.to(weights)


class PixelMasks(Masks):
    """Explicit masks of pixels, (masks, height, width)."""

    def __init__(self, masks: Tensor) -> None:
        self._masks = masks

    def __len__(self) -> int:
        return len(self._masks)

    def pixels(self, numbers: Tensor) -> Tensor:
        """The masks themselves."""
        return self._masks[numbers]


class CellMasks(Masks):
    """RISE's masks: a coarse grid of kept and dropped cells, upsampled bilinearly and shifted by part of a cell."""

    def __init__(self, count: int, cells: int, keep: float, size: Size, generator: torch.Generator) -> None:
        self._cells = (uniform(count, 1, *[cells] * len(size), generator=generator) < keep).float()
        self._size, self._cell = size, [math.ceil(length / cells) for length in size]
        self._shifts = [torch.randint(0, side, (count,), generator=generator).tolist() for side in self._cell]

    def __len__(self) -> int:
        return len(self._cells)

    def pixels(self, numbers: Tensor) -> Tensor:
        """Upsample to one cell more than the image and crop at the random shift."""
        chosen = self._cells[numbers]
        count = chosen.shape[-1] + 1
        enlarged = torch.nn.functional.interpolate(
            chosen, size=[count * side for side in self._cell], mode=INTERPOLATION[len(self._cell)], align_corners=False
        )
        starts = [[shifts[number] for shifts in self._shifts] for number in numbers.tolist()]
        return torch.stack(
            [
                mask[tuple(slice(start, start + length) for start, length in zip(corner, self._size, strict=True))]
                for mask, corner in zip(enlarged[:, 0], starts, strict=True)
            ]
        )


def patch_of_pixel(grid: Size, size: Size, geometry: PatchGeometry | None = None) -> Tensor:
    """Return the patch of each pixel, (height x width,). The last patches may extend beyond the edge (padding)."""
    number = torch.zeros((), dtype=torch.int64)
    for axis, (length, count) in enumerate(zip(size, grid, strict=True)):
        number = number[..., None] * count + patch_of_line(length, count, geometry, axis)
    return number.flatten()


def seeded(seed: int) -> torch.Generator:
    """Return a CPU generator, so that random numbers do not depend on the device."""
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw float32 numbers from 0 to 1; another dtype would draw different numbers."""
    return torch.rand(*shape, generator=generator, dtype=torch.float32)


def independent(count: int, patches: int, generator: torch.Generator, keep: float = 0.5) -> Tensor:
    """Keep every patch with probability ``keep``, but at least one: some models read nothing but patches."""
    draws = uniform(count, patches, generator=generator)
    return (draws < keep) | (draws == draws.amin(dim=1, keepdim=True))


def balanced(count: int, patches: int, generator: torch.Generator) -> Tensor:
    """Keep every patch in exactly half of the masks: a Latin hypercube of two levels."""
    return uniform(count, patches, generator=generator).argsort(dim=0) < count // 2


def blocks_of_patches(count: int, cells: int, keep: float, grid: Size, generator: torch.Generator) -> Tensor:
    """Draw RISE's masks at the resolution of patches, without interpolation: shifted squares of patches."""
    drawn = independent(count, (cells + 1) ** len(grid), generator, keep)
    cell = torch.zeros(count, dtype=torch.int64)
    for length in grid:
        side = math.ceil(length / cells)
        place = (torch.arange(length) + torch.randint(0, side, (count, 1), generator=generator)) // side
        cell = cell[..., None] * (cells + 1) + place.view(count, *[1] * (cell.dim() - 1), length)
    kept = drawn.gather(1, cell.flatten(1))
    kept[~kept.any(dim=1), 0] = True  # the only kept cell may be outside of the image
    return kept


def windows(grid: Size, window: int, stride: int) -> Tensor:
    """Return square windows of patches, cubes in a volume, (windows, patches); the last ones may be cut off."""
    if window < 1 or stride < 1:
        raise MethodError("window and stride must be at least 1")
    inside = torch.ones(1, 1, dtype=torch.bool)
    for length in grid:
        starts = torch.arange(max(0, math.ceil((length - window) / stride)) + 1) * stride
        places = torch.arange(length)
        line = (places >= starts[:, None]) & (places < starts[:, None] + window)
        inside = (inside[:, None, :, None] & line[None, :, None, :]).flatten(2).flatten(0, 1)
    return inside


def windows_within(budget: int | None, grid: Size, window: int, stride: int) -> Tensor:
    """Return at most ``budget`` square windows of patches: ``stride`` is raised until they fit.

    Windows grow with a raised stride, so that they cover every patch.
    """
    found = windows(grid, window, stride)
    while budget is not None and len(found) > budget:
        stride += 1
        found = windows(grid, max(window, stride), stride)
    return found


By = Literal["paint", "drop"]
RunMasked = Callable[[Tensor, Tensor], Tensor]


def masked_outputs(view: View, masks: Masks, by: By, quantity: Quantity) -> Tensor:
    """The model's output of every target for every mask, (batch, masks, targets).

    Painted parts become 0, the mean colour of normalised images; dropped patches are removed from the sequence (only
    masks of whole patches can be dropped), and masks that keep equally many patches share batches.
    """
    runner = view.runner
    if by == "paint":
        return run_pairs(
            view,
            [torch.arange(len(masks))],
            lambda image, mask: runner.logits(
                runner.images[image] * masks.pixels(mask).to(runner.images).unsqueeze(runner.channel_axis)
            ),
            quantity,
        )
    assert isinstance(masks, PatchMasks)
    counts = masks.kept.sum(dim=1)

    def run(image: Tensor, mask: Tensor) -> Tensor:
        patches = masks.kept[mask].nonzero()[:, 1].view(len(mask), -1)
        return runner.logits_of_kept(runner.inputs[image], patches)

    return run_pairs(view, [torch.where(counts == count)[0] for count in sorted(set(counts.tolist()))], run, quantity)


def run_pairs(view: View, groups: Iterable[Tensor], run: RunMasked, quantity: Quantity) -> Tensor:
    """Run all pairs of images and masks, (batch, masks, targets); ``run(images, masks)`` takes indices, returns logits.

    Masks of one group may share a batch; every mask is in one group.
    """
    runner, targets = view.runner, all_targets(view)
    batch = len(runner.inputs)
    groups = list(groups)
    found = at_least_float32(view.tape.logits).new_empty(batch, sum(map(len, groups)), targets.shape[1])
    for group in groups:
        image, mask = torch.arange(batch).repeat_interleave(len(group)), group.repeat(batch)
        for images, masks in zip(*(torch.split(numbers, runner.batch) for numbers in (image, mask)), strict=True):
            outputs = runner.explained(at_least_float32(run(images, masks)), quantity)
            found[images, masks] = outputs.gather(1, targets[images])
    return found


def original_output(view: View, quantity: Quantity) -> Tensor:
    """The model's output of every target for the original image, (batch, targets), from the tape."""
    return view.runner.explained(at_least_float32(view.tape.logits), quantity).gather(1, all_targets(view))


def all_targets(view: View) -> Tensor:
    """All explained targets, (batch, targets): one forward pass serves all of them."""
    return view.target[:, None] if view.runner.targets is None else view.runner.targets


class PerturbationMethod(Procedure):
    """A method that runs the model on masked inputs, once for all targets."""

    _by: By = "paint"

    def needs(self, layer: int, depth: int) -> Needs:
        """Painting needs an image; tokens of a text can be dropped too."""
        del layer, depth
        return Needs(picture=self._by == "paint")

    def map(self, view: View) -> Tensor:
        """The map of the view's target."""
        memory = view.runner.memory
        if self not in memory:
            memory[self] = self.maps(view)
        (column, *_) = torch.where((all_targets(view) == view.target[:, None]).all(dim=0))[0].tolist()
        return memory[self][:, column]

    @abstractmethod
    def maps(self, view: View) -> Tensor:
        """The maps of all targets, (batch, targets, patches or pixels)."""


@dataclass
class Unrecorded:
    """Images and targets without a recorded run, for methods that only read their own runs.

    Attributes:
        runner: the model and the images.
        target: the explained class of each image, (batch,).
        output: the model's output in the last run, for other images.
    """

    runner: ModelRunner
    target: Tensor
    output: Tensor | None = None

    def note(self, tape: Tape) -> None:
        """Record what is the same in every run: patch grid, number of classes, precision."""
        check_classes(self.target, tape.logits.shape[1])
        self.runner.note_layout(tape.layout)
        self.output = at_least_float32(tape.logits[:1])


@contextmanager
def rerun(
    view: View | Unrecorded, inputs: Inputs, needs: Needs, intervention: Intervention | None = None
) -> Iterator[View]:
    """Run the model on other inputs and yield the view of that run, with gradients of the same targets.

    The batch of the run, or of the stream of an intervention, is a multiple of the original batch: variations of all
    images in their order.
    """
    with view.runner.record(inputs, needs, intervention) as tape:
        if isinstance(view, Unrecorded):
            view.note(tape)
        target = view.target.repeat(len(tape.logits) // len(view.target))
        gradients = {backward: tape.backward(backward, target, part) for backward, part in needs.gradients.items()}
        yield View(tape, gradients, target, view.runner)


def rerun_scaled(
    view: View, scales: Tensor, needs: Needs, attention_scale: Mapping[int, Tensor] | None = None
) -> AbstractContextManager[View]:
    """Run the model on the images multiplied by each of ``scales``.

    For texts the first block's tokens are scaled, which must be on the tape; token ids cannot be scaled.
    """
    attention_scale = attention_scale or {}
    if not view.tape.reads_text:
        change = Intervention(attention_scale=attention_scale)
        return rerun(view, each_scaled(scales, view.runner.images), needs, change)
    stream = each_scaled(scales, view.tokens(0))
    return rerun(view, view.runner.inputs[:1], needs, Intervention(0, stream, attention_scale))


def few_at_once(view: View | Unrecorded, points: Tensor, *, room: int = 1) -> Iterator[Tensor]:
    """Split the variations (points, ...), so that images x points of one piece fit into one run.

    ``room`` times as many fit if a run takes that much less memory.
    """
    yield from torch.split(points, max(1, room * view.runner.at_once // len(view.target)))


def each_scaled(scales: Tensor, inputs: Tensor) -> Tensor:
    """Multiply the inputs (batch, ...) by each of ``scales``: (scales x batch, ...), scales outermost."""
    scaled = scales.to(inputs).view(-1, *[1] * inputs.dim()) * inputs
    return scaled.flatten(0, 1)


def sum_of_variations(values: Tensor, batch: int) -> Tensor:
    """Sum over variations: (variations x batch, ...) -> (batch, ...)."""
    return values.reshape(-1, batch, *values.shape[1:]).sum(dim=0)
