"""Maps of pixels, and what becomes of them where a map of patches is wanted."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.inputs.patch_geometry import PatchGeometry, patch_of_line
from vitreous.tape import Layout

Resolution = Literal["patch", "pixel"]
ResolutionOption = Annotated[Resolution, "one score per patch, the sum of its pixels, or one per pixel"]


def input_scores(attributions: Tensor, layout: Layout, resolution: Resolution) -> Tensor:
    """What all numbers of the input count, summed to those of patches or pixels.

    Of a picture (batch, channel, height, width), of tokens (batch, tokens, channels).
    """
    if attributions.dim() == 4:
        pixels = attributions.sum(dim=1)
        maps = pixels if resolution == "pixel" else patch_sums(pixels, layout.grid, layout.geometry)
        return maps.flatten(1)
    if resolution == "pixel":
        raise MethodError("resolution=pixel needs a picture: a text has no pixels")
    return attributions.sum(dim=-1)[:, layout.prefix :]


def patch_sums(pixels: Tensor, grid: tuple[int, int], geometry: PatchGeometry | None = None) -> Tensor:
    """Sums over (batch, height, width) of the pixels that fall into each patch of the grid: (batch, rows, columns).

    Every pixel counts once, also where the grid does not divide the picture, so the sum of the map stays the same.
    """
    rows, columns = (
        _cells(patch_of_line(length, cells, geometry, axis), cells, pixels)
        for axis, (length, cells) in enumerate(zip(pixels.shape[1:], grid, strict=True))
    )
    return rows @ pixels @ columns.T


def patch_means(
    maps: Tensor, size: tuple[int, int], grid: tuple[int, int], geometry: PatchGeometry | None = None
) -> Tensor:
    """Maps (..., height x width) averaged over the pixels of every patch: (..., patches)."""
    pixels = maps.reshape(-1, *size)
    sums = patch_sums(pixels, grid, geometry) / patch_sums(torch.ones_like(pixels[:1]), grid, geometry)
    return sums.reshape(*maps.shape[:-1], -1)


def layout_means(maps: Tensor, size: tuple[int, int], layout: Layout) -> Tensor:
    """Maps (..., height x width) averaged over the pixels of every patch of a layout: (..., patches)."""
    return patch_means(maps, size, layout.grid, layout.geometry)


def _cells(patches: Tensor, cells: int, like: Tensor) -> Tensor:
    """Which of so many patches each pixel belongs to, as a matrix (cells, length) of 0 and 1."""
    return torch.nn.functional.one_hot(patches, cells).T.to(like)
