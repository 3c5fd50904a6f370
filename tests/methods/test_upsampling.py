"""Enlarged maps against torch's interpolation, and what is said of them without building them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitreous.methods.vitcx import BilinearUpsampler

# Float64: the same numbers but for the order of sums.
SAME = {"rtol": 1e-12, "atol": 1e-13}
SIZES = [((14, 14), (224, 224)), ((4, 6), (30, 45)), ((1, 3), (8, 29)), ((3, 3), (3, 3)), ((7, 2), (7, 90))]


def maps_of(grid: tuple[int, int]) -> Tensor:
    return torch.randn(5, grid[0] * grid[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def interpolated(maps: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    large = torch.nn.functional.interpolate(maps.view(1, -1, *grid), size, mode="bilinear", align_corners=False)
    return large[0].flatten(1)


@pytest.mark.parametrize(("grid", "size"), SIZES)
def test_large_maps_are_torchs_bilinear_ones(grid, size):
    maps = maps_of(grid)
    large, upsampler = interpolated(maps, grid, size), BilinearUpsampler(grid, size, maps)
    torch.testing.assert_close(upsampler.pixels(maps), large, **SAME)
    low, high = upsampler.extremes(maps)
    torch.testing.assert_close(low, large.amin(dim=1, keepdim=True), **SAME)
    torch.testing.assert_close(high, large.amax(dim=1, keepdim=True), **SAME)
    torch.testing.assert_close(upsampler.products(maps), large @ large.T, **SAME)


@pytest.mark.parametrize(("grid", "size"), SIZES)
def test_stretched_maps_reach_from_0_to_1_when_they_are_enlarged(grid, size):
    maps = torch.cat((maps_of(grid), torch.full((1, grid[0] * grid[1]), 3.5, dtype=torch.float64)))
    upsampler = BilinearUpsampler(grid, size, maps)
    large = upsampler.pixels(upsampler.stretched(maps))
    torch.testing.assert_close(large[:-1].amin(dim=1), torch.zeros(5, dtype=torch.float64), **SAME)
    torch.testing.assert_close(large[:-1].amax(dim=1), torch.ones(5, dtype=torch.float64), **SAME)
    assert (large[-1] == 0).all()
