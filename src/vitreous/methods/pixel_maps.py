"""Maps of pixels, and what becomes of them where a map of patches is wanted."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.tape import Layout

Resolution = Literal["patch", "pixel"]
ResolutionOption = Annotated[Resolution, "one score per patch, the sum of its pixels, or one per pixel"]


def input_scores(attributions: Tensor, layout: Layout, resolution: Resolution) -> Tensor:
    """What all numbers of the input count, summed to those of patches or pixels.

    Of a picture (batch, channel, height, width), of tokens (batch, tokens, channels).
    """
    if attributions.dim() == 4:
        return at_resolution(attributions.sum(dim=1), layout.grid, resolution)
    if resolution == "pixel":
        raise MethodError("resolution=pixel needs a picture: a text has no pixels")
    return attributions.sum(dim=-1)[:, layout.prefix :]


def at_resolution(pixels: Tensor, grid: tuple[int, int], resolution: Resolution) -> Tensor:
    """A map (batch, height, width) flattened, or the sums over the pixels of every patch, (batch, patches)."""
    return pixels.flatten(1) if resolution == "pixel" else patch_sums(pixels, grid).flatten(1)


def patch_sums(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sums over (batch, height, width) of the pixels that fall into each patch of the grid: (batch, rows, columns).

    Every pixel counts once, also where the grid does not divide the picture, so the sum of the map stays the same.
    """
    rows, columns = (_cells(length, cells, pixels) for length, cells in zip(pixels.shape[1:], grid, strict=True))
    return rows @ pixels @ columns.T


def patch_means(maps: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Maps (..., height x width) averaged over the pixels of every patch: (..., patches)."""
    pixels = maps.reshape(-1, *size)
    sums = patch_sums(pixels, grid) / patch_sums(torch.ones_like(pixels[:1]), grid)
    return sums.reshape(*maps.shape[:-1], -1)


def cell_of_pixel(length: int, cells: int) -> Tensor:
    """Which of so many patches in a line each of ``length`` pixels belongs to, (length,).

    Where they are no divisor, a model pads the picture behind its end, so the last patch stands over the edge. Cells
    that would then lie behind it altogether are of no patch embedding: such a line is cut into equal stretches.
    """
    side, pixels = math.ceil(length / cells), torch.arange(length)
    return pixels // side if side * (cells - 1) < length else pixels * cells // length


def _cells(length: int, cells: int, like: Tensor) -> Tensor:
    """``cell_of_pixel`` as a matrix (cells, length) of 0 and 1."""
    return torch.nn.functional.one_hot(cell_of_pixel(length, cells), cells).T.to(like)
