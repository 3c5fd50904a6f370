"""Heatmaps: raw patch scores enlarged to pixels and scaled to a display range, each by itself or all together."""

from __future__ import annotations

import torch
from torch.nn import functional

from vitreous.inputs.patch_geometry import Frame, PatchGeometry, enlarge


def display_maps(
    scores: torch.Tensor,
    grid: tuple[int, int],
    size: tuple[int, int],
    *,
    signed: bool,
    smooth: bool,
    geometry: PatchGeometry | None = None,
) -> torch.Tensor:
    """Scale every map for display and enlarge it.

    Args:
        scores: Raw scores (..., patches), any floating dtype.
        grid: Rows and columns of patches.
        size: Height and width of the result.
        signed: Divide by the largest absolute value, into [-1, 1], so that zero stays zero; otherwise stretch the
            values from smallest to largest over [0, 1].
        smooth: Interpolate bilinearly between patch centres; otherwise every patch is a rectangle of one value.
        geometry: Where patches are centred; equal cells by default.

    Returns:
        Maps (..., height, width) in float32, or float64 for float64 scores. A constant map becomes all zeros.
    """
    maps = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).reshape(-1, 1, *grid)
    maps = _fill_range(maps, signed=signed)
    if geometry is not None and geometry.applies_to(grid):
        maps = enlarge(maps, size, geometry, smooth=smooth)
        maps = _fill_range(maps, signed=signed) if smooth else maps
    elif smooth:
        # Interpolation can miss a patch's centre and so its peak; the range is filled again afterwards. It is filled
        # before as well because rounding in the interpolation of a constant map would be stretched into a pattern.
        enlarged = functional.interpolate(maps, size=size, mode="bilinear", align_corners=False)
        maps = _fill_range(enlarged, signed=signed)
    else:
        maps = functional.interpolate(maps, size=size, mode="nearest-exact")
    return maps.reshape(*scores.shape[:-1], *size)


def framed_maps(
    scores: torch.Tensor,
    grid: tuple[int, int],
    frame: Frame,
    *,
    signed: bool,
    smooth: bool,
    span: tuple[float, float] | None = None,
    geometry: PatchGeometry | None = None,
) -> torch.Tensor:
    """Scale maps for display and lay them out in a photo's own pixels.

    Args:
        scores: Raw scores (..., patches).
        grid: Rows and columns of patches.
        frame: Which part of the photo they belong to.
        signed: See ``display_maps``.
        smooth: See ``display_maps``.
        span: The smallest and largest raw score that several maps share, so that their colours can be compared; by
            default every map fills the range by itself.
        geometry: See ``display_maps``.

    Returns:
        Values (..., height, width) of the pixels that the model sees.
    """
    maps = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).reshape(*scores.shape[:-1], *grid)
    if span is None:
        placed = frame.place(_fill_range(maps, signed=signed), smooth=smooth, geometry=geometry)
        return _fill_range(placed, signed=signed) if smooth else placed
    low, high = (-max(map(abs, span)), max(map(abs, span))) if signed else span
    if high <= low:
        return torch.zeros_like(frame.place(maps, smooth=smooth))
    unit = (maps - low) / (high - low)
    return frame.place(2 * unit - 1 if signed else unit, smooth=smooth, geometry=geometry).clamp(-1, 1)


def _fill_range(maps: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Scale each (rows, columns) map to [0, 1], or [-1, 1] when signed; constant maps become zero."""
    peak = maps.abs().amax(dim=(-2, -1), keepdim=True)
    unit = maps / torch.where(peak > 0, peak, 1)
    lowest = unit.amin(dim=(-2, -1), keepdim=True)
    spread = unit.amax(dim=(-2, -1), keepdim=True) - lowest
    constant = spread <= 4 * torch.finfo(maps.dtype).eps
    scaled = unit if signed else (unit - lowest) / torch.where(constant, 1, spread)
    return torch.where(constant, 0, scaled)
