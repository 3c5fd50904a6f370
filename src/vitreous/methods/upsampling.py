"""Bilinear upsampling of patch maps to pixels, and properties of the large maps computed without building them."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous._utils.tensors import in_float64
from vitreous.inputs.patch_geometry import PatchGeometry, interpolations


class BilinearUpsampler:
    """Bilinear upsampling, corners not aligned, of maps (..., patches) to (..., height x width).

    It is linear and the same in both directions, f -> U_rows f U_columnsᵀ with rows of U that sum to 1. So products of
    large maps, their extremes, and shifting and stretching them all can be had from the small ones.

    Args:
        grid: rows and columns of patches.
        size: height and width of the picture.
        like: a tensor of the precision and on the device of the maps.
        geometry: where patches are centred; equal cells by default.
    """

    def __init__(
        self, grid: tuple[int, int], size: tuple[int, int], like: Tensor, geometry: PatchGeometry | None = None
    ) -> None:
        self._grid = grid
        if geometry is None:
            self._rows, self._columns = (
                _interpolation(count, length, like) for count, length in zip(grid, size, strict=True)
            )
        else:
            self._rows, self._columns = (matrix.to(like) for matrix in interpolations(grid, size, geometry))

    def pixels(self, maps: Tensor) -> Tensor:
        """The large maps."""
        return self._between(self._rows, maps, self._columns).flatten(-2)

    def extremes(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest pixel of every map, (..., 1).

        Between the centres of four patches a map is linear along rows and along columns, so of the pixels there only
        those in the corners count.
        """
        rows, columns = (matrix[_at_corners(matrix)] for matrix in (self._rows, self._columns))
        corners = self._between(rows, maps, columns).flatten(-2)
        return corners.amin(dim=-1, keepdim=True), corners.amax(dim=-1, keepdim=True)

    def products(self, maps: Tensor) -> Tensor:
        """Scalar products between the large maps of (n, patches): (n, n), in float64."""
        rows, columns = (wide.T @ wide for wide in map(in_float64, (self._rows, self._columns)))
        maps = in_float64(maps)
        return self._between(rows, maps, columns).flatten(1) @ maps.T

    def stretched(self, maps: Tensor) -> Tensor:
        """Small maps shifted and stretched so that the pixels of the large ones reach from 0 to 1; constant ones 0."""
        low, high = self.extremes(maps)
        return ((maps - low) / (high - low).masked_fill(high == low, 1)).masked_fill(high == low, 0)

    def _between(self, rows: Tensor, maps: Tensor, columns: Tensor) -> Tensor:
        return rows @ maps.reshape(*maps.shape[:-1], *self._grid) @ columns.T


def _interpolation(count: int, length: int, like: Tensor) -> Tensor:
    """The matrix (length, count) that enlarges a line of ``count`` values."""
    each = torch.eye(count, dtype=like.dtype, device=like.device)[:, None]
    return torch.nn.functional.interpolate(each, length, mode="linear", align_corners=False)[:, 0].T.contiguous()


def _at_corners(matrix: Tensor) -> Tensor:
    """Which pixels of a line are the first or the last between two centres of patches, (length,)."""
    before = (matrix != 0).int().argmax(dim=1)  # the centre before the pixel
    changes = before[1:] != before[:-1]
    edge = changes.new_ones(1)
    return torch.cat((edge, changes)) | torch.cat((changes, edge))
