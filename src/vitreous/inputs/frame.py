"""Where in a photo the part lies that a model sees, and maps of that part laid out in the photo's own pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vitreous.inputs.patch_geometry import PatchGeometry, line_weights


@dataclass(frozen=True)
class Frame:
    """The rectangle of a photo that became a model's input, in the photo's pixels.

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
        """The frame of a model that sees the whole photo."""
        return cls(size, 0, 0, *size)

    def scaled(self, size: tuple[int, int]) -> Frame:
        """The frame in the same photo at another size."""
        down, across = size[0] / self.size[0], size[1] / self.size[1]
        return Frame(size, self.top * down, self.left * across, self.bottom * down, self.right * across)

    @property
    def rows(self) -> slice:
        """The rows of the photo whose middle the model sees, at least one."""
        return _seen(self.top, self.bottom, self.size[0])

    @property
    def columns(self) -> slice:
        """The columns of the photo whose middle the model sees, at least one."""
        return _seen(self.left, self.right, self.size[1])

    def place(self, maps: Tensor, *, smooth: bool, geometry: PatchGeometry | None = None) -> Tensor:
        """Enlarge maps to the photo's pixels.

        Args:
            maps: Maps (..., rows, columns) that fill the model's input evenly, or as their geometry says.
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
    """Where pixels of the photo are along one axis, counted in patches: 0.5 is the centre of the first one."""
    start, stop = interval
    places = (torch.arange(pixels.start, pixels.stop, dtype=torch.float64) + 0.5 - start) / (stop - start)
    return places * cells if geometry is None else geometry.positions(axis, places)
