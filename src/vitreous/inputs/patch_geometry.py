"""Where the patches of a grid are centred in the model's input, and where the input lies in the original image.

Patches that are cut side by side are equal cells of the input. The receptive fields of a convolutional stem are shifted
against such cells, those of overlapping patches are closer together, and a model that crops or pads its input has them
elsewhere. Maps are enlarged to pixels accordingly, of the input or of the whole photo.

A grid has two lengths, (rows, columns), or three where the input is a volume or a clip: (depth, rows, columns) or
(frames, rows, columns). Sizes in pixels have as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vitreous.errors import InputError

Size = tuple[int, ...]  # of an image (height, width), of a volume (depth, height, width)
INTERPOLATION = {2: "bilinear", 3: "trilinear"}  # of torch, by the axes of a map


def plane(lengths: Size) -> tuple[int, int]:
    """The rows and columns of an image's grid, or its height and width.

    Raises:
        InputError: it is a volume or a clip.
    """
    if len(lengths) != 2:
        raise InputError(
            "this is for images, and a volume or a clip has one axis more: take one slice or frame of it, "
            "explanation.slice(number)"
        )
    return lengths[0], lengths[1]


@dataclass(frozen=True)
class PatchGeometry:
    """The centres of patches in pixels of the model's input: patch (r, c) is centred at offset + (r, c) * pitch.

    Attributes:
        offset: row and column of the first patch's centre, behind its depth in a volume; the first pixel's centre is
            at 0.5.
        pitch: the distance between the centres of neighbouring patches, down and across.
        image_size: height and width of the model's input, behind the depth of a volume.
    """

    offset: tuple[float, ...]
    pitch: tuple[float, ...]
    image_size: Size

    def __post_init__(self) -> None:
        for name, kind in (("offset", float), ("pitch", float), ("image_size", int)):
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))
        axes = {len(self.offset), len(self.pitch), len(self.image_size)}
        if axes not in ({2}, {3}):
            raise ValueError(f"{self} has no patches in rows and columns")
        if not all(map(math.isfinite, (*self.offset, *self.pitch))) or min(*self.pitch, *self.image_size) <= 0:
            raise ValueError(f"{self} has no patches in rows and columns")

    def positions(self, axis: int, places: Tensor) -> Tensor:
        """Places along an axis, from 0 to 1 over the input, counted in patches: 0.5 is the centre of the first one."""
        return (places * self.image_size[axis] - self.offset[axis]) / self.pitch[axis] + 0.5

    def cell(self, axis: int, number: int) -> tuple[float, float]:
        """Where a patch begins and ends along an axis, from 0 to 1 over the input: half way to its neighbours."""
        centre, half = self.offset[axis] + number * self.pitch[axis], self.pitch[axis] / 2
        return (centre - half) / self.image_size[axis], (centre + half) / self.image_size[axis]

    def shows_all(self, grid: Size) -> bool:
        """Whether every one of so many rows and columns of patches has a pixel whose next centre is its own."""
        lines = zip(self.image_size, grid, strict=True)
        return all(
            len(set(patch_of_line(length, cells, self, axis).tolist())) == cells
            for axis, (length, cells) in enumerate(lines)
        )

    def applies_to(self, grid: tuple[int, ...]) -> bool:
        """Whether a map of so many rows and columns is one of patches; in one of pixels they are where they are."""
        return tuple(grid) != self.image_size


def patch_of_line(length: int, cells: int, geometry: PatchGeometry | None = None, axis: int = 0) -> Tensor:
    """Which of so many patches in a line each of ``length`` pixels belongs to, (length,): the one with the next centre.

    Without a geometry patches are equal cells. Where they are no divisor, a model pads the picture behind its end, so
    the last patch stands over the edge. Cells that would then lie behind it altogether are of no patch embedding: such
    a line is cut into equal stretches.
    """
    if geometry is not None:
        positions = geometry.positions(axis, _middles(length))
        return positions.floor().long().clamp(0, cells - 1)
    side, pixels = math.ceil(length / cells), torch.arange(length)
    return pixels // side if side * (cells - 1) < length else pixels * cells // length


def _middles(length: int) -> Tensor:
    """Where the centres of so many pixels are, from 0 to 1."""
    return (torch.arange(length, dtype=torch.float64) + 0.5) / length


def line_weights(positions: Tensor, cells: int, *, smooth: bool) -> Tensor:
    """What each patch counts at each position in a line, (positions, cells): interpolation as a matrix.

    Args:
        positions: places counted in patches; 0.5 is the centre of the first one.
        cells: how many patches there are.
        smooth: interpolate linearly between the centres; otherwise the patch with the next centre counts alone.
    """
    number = torch.arange(len(positions))
    weights = torch.zeros(len(positions), cells, dtype=torch.float64)
    if not smooth:
        weights[number, positions.floor().long().clamp(0, cells - 1)] = 1
        return weights
    positions = (positions - 0.5).clamp(0, cells - 1)
    below = positions.floor().long()
    weights[number, below] = 1 - (positions - below)
    weights[number, (below + 1).clamp(max=cells - 1)] += positions - below
    return weights


def enlarge(maps: Tensor, size: Size, geometry: PatchGeometry, *, smooth: bool) -> Tensor:
    """Maps (..., *grid) resized to (..., *size) by the centres of the patches.

    Args:
        maps: one value for every patch.
        size: height and width of the result, behind the depth of a volume; it shows all of the input.
        geometry: where patches are centred.
        smooth: interpolate between the centres; otherwise every pixel has the value of the patch with the next centre.
    """
    grid = tuple(maps.shape[-len(size) :])
    return along_axes(maps, interpolations(grid, size, geometry, smooth=smooth))


def interpolations(grid: Size, size: Size, geometry: PatchGeometry, *, smooth: bool = True) -> list[Tensor]:
    """The matrices (length, cells) of every axis that enlarge a map, see ``enlarge``."""
    return [
        line_weights(geometry.positions(axis, _middles(length)), cells, smooth=smooth)
        for axis, (length, cells) in enumerate(zip(size, grid, strict=True))
    ]


def along_axes(maps: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Maps multiplied along each of their last axes by its matrix (new length, length)."""
    *depth, down, across = (matrix.to(maps) for matrix in matrices)
    maps = down @ maps @ across.T
    for matrix in depth:  # of a volume
        plane = maps.shape[-2:]
        maps = (matrix @ maps.flatten(-2)).reshape(*maps.shape[:-3], len(matrix), *plane)
    return maps


@dataclass(frozen=True)
class Frame:
    """The crop of an image that became the model's input, in pixels of the image.

    Attributes:
        size: Height and width of the photo.
        top: Where the rectangle starts; negative where the model also sees a border around the photo.
        left: The same across.
        bottom: Where it ends.
        right: The same across.
    """

    size: tuple[int, int]
    top: float
    left: float
    bottom: float
    right: float

    @classmethod
    def whole(cls, size: tuple[int, int]) -> Self:
        """The frame of a model without a crop."""
        return cls(size, 0, 0, *size)

    def scaled(self, size: tuple[int, int]) -> Frame:
        """The frame in the same image at another size."""
        down, across = size[0] / self.size[0], size[1] / self.size[1]
        return Frame(size, self.top * down, self.left * across, self.bottom * down, self.right * across)

    @property
    def rows(self) -> slice:
        """The rows of the image whose centre is in the crop, at least one."""
        return _seen(self.top, self.bottom, self.size[0])

    @property
    def columns(self) -> slice:
        """The columns of the image whose centre is in the crop, at least one."""
        return _seen(self.left, self.right, self.size[1])

    def place(self, maps: Tensor, *, smooth: bool, geometry: PatchGeometry | None = None) -> Tensor:
        """Resize maps to the pixels of the image.

        Args:
            maps: Maps (..., rows, columns) that fill the model's input evenly, or according to their geometry.
            smooth: Interpolate bilinearly between the middles of the cells; otherwise every cell is a rectangle.
            geometry: Where patches are centred; equal cells by default.

        Returns:
            Values (..., height, width) of the pixels in ``rows`` and ``columns``, the ones that the model sees.
        """
        parts = (self.rows, (self.top, self.bottom)), (self.columns, (self.left, self.right))
        used = geometry if geometry is not None and geometry.applies_to(maps.shape[-2:]) else None
        down, across = (
            line_weights(_positions(pixels, interval, cells, used, axis), cells, smooth=smooth).to(maps)
            for axis, ((pixels, interval), cells) in enumerate(zip(parts, maps.shape[-2:], strict=True))
        )
        return down @ maps @ across.T


def _seen(start: float, stop: float, length: int) -> slice:
    """Pixels whose middle lies between start and stop; where it is none's, the one pixel around their middle.

    Of a photo that is a thin strip the model can see less than a pixel, and there is no picture without any.
    """
    first, last = max(0, math.ceil(start - 0.5)), min(length, math.floor(stop - 0.5) + 1)
    if first >= last:
        first = min(max(0, math.floor((start + stop) / 2)), length - 1)
        last = first + 1
    return slice(first, last)


def _positions(
    pixels: slice, interval: tuple[float, float], cells: int, geometry: PatchGeometry | None, axis: int
) -> Tensor:
    """Positions of the image's pixels along one axis, in units of patches: 0.5 is the centre of the first one."""
    start, stop = interval
    places = (torch.arange(pixels.start, pixels.stop, dtype=torch.float64) + 0.5 - start) / (stop - start)
    return places * cells if geometry is None else geometry.positions(axis, places)
