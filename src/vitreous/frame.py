"""Where in a photo the part lies that a model sees, and maps of that part laid out in the photo's own pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


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

    def place(self, maps: Tensor, *, smooth: bool) -> Tensor:
        """Enlarge maps to the photo's pixels.

        Args:
            maps: Maps (..., rows, columns) that fill the model's input evenly.
            smooth: Interpolate bilinearly between the middles of the cells; otherwise every cell is a rectangle.

        Returns:
            Values (..., height, width) of the pixels in ``rows`` and ``columns``, the ones that the model sees.
        """
        down = _weights(self.rows, (self.top, self.bottom), maps.shape[-2], smooth=smooth).to(maps)
        across = _weights(self.columns, (self.left, self.right), maps.shape[-1], smooth=smooth).to(maps)
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


def _weights(pixels: slice, interval: tuple[float, float], cells: int, *, smooth: bool) -> Tensor:
    """What each cell counts in each pixel, (pixels, cells): interpolation along one axis as a matrix."""
    start, stop = interval
    middles = torch.arange(pixels.start, pixels.stop, dtype=torch.float64) + 0.5
    position = (middles - start) / (stop - start) * cells
    number = torch.arange(len(middles))
    weights = torch.zeros(len(middles), cells, dtype=torch.float64)
    if not smooth:
        weights[number, position.floor().long().clamp(0, cells - 1)] = 1
        return weights
    position = (position - 0.5).clamp(0, cells - 1)
    below = position.floor().long()
    weights[number, below] = 1 - (position - below)
    weights[number, (below + 1).clamp(max=cells - 1)] += position - below
    return weights
