"""Where in the model's input the patches of a grid are centred, and maps enlarged to pixels accordingly.

Patches that are cut side by side are equal cells of the input, and need none of this. The receptive fields of a
convolutional stem are shifted against such cells, those of overlapping patches are closer together, and a model that
crops or pads its input has them elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Size = tuple[int, int]


@dataclass(frozen=True)
class PatchGeometry:
    """The centres of patches in pixels of the model's input: patch (r, c) is centred at offset + (r, c) * pitch.

    Attributes:
        offset: row and column of the first patch's centre; the first pixel's centre is at 0.5.
        pitch: the distance between the centres of neighbouring patches, down and across.
        image_size: height and width of the model's input.
    """

    offset: tuple[float, float]
    pitch: tuple[float, float]
    image_size: Size

    def __post_init__(self) -> None:
        for name, kind in (("offset", float), ("pitch", float), ("image_size", int)):
            first, second = map(kind, getattr(self, name))
            object.__setattr__(self, name, (first, second))
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
    """Maps (..., rows, columns) at another size of the picture, (..., height, width), by where patches are centred.

    Args:
        maps: one value for every patch.
        size: height and width of the result, which shows all of the input.
        geometry: where patches are centred.
        smooth: interpolate between the centres; otherwise every pixel has the value of the patch with the next centre.
    """
    grid = maps.shape[-2], maps.shape[-1]
    down, across = (matrix.to(maps) for matrix in interpolations(grid, size, geometry, smooth=smooth))
    return down @ maps @ across.T


def interpolations(grid: Size, size: Size, geometry: PatchGeometry, *, smooth: bool = True) -> tuple[Tensor, Tensor]:
    """The matrices (height, rows) and (width, columns) that enlarge a map, see ``enlarge``."""
    rows, columns = (
        line_weights(geometry.positions(axis, _middles(length)), cells, smooth=smooth)
        for axis, (length, cells) in enumerate(zip(size, grid, strict=True))
    )
    return rows, columns
