"""How a picture becomes patches: the convolutions and poolings before the first block, one of which makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitreous.errors import InputError

Size = tuple[int, int]


@dataclass(frozen=True)
class Embedding:
    """A call that may have made the patches.

    Attributes:
        given: height and width of what it was given.
        grid: rows and columns of what it made.
        patch: height and width of the squares that it cut its input into, side by side; ``None`` where it did not.
    """

    given: Size
    grid: Size
    patch: Size | None

    @classmethod
    def without_patch(cls, output: Tensor, given: Tensor) -> Embedding:
        """A pooling, or a convolution of overlapping or padded squares."""
        return cls(_size(given), _size(output), None)

    @property
    def makes_patches(self) -> bool:
        """Whether it makes the picture coarser; one that does not only filters it."""
        return self.grid != self.given

    @property
    def patches(self) -> int:
        """How many patches it would have made."""
        return self.grid[0] * self.grid[1]

    def enlarges(self, picture: Size) -> bool:
        """Whether what it was given is higher or wider than the picture."""
        return any(mine > theirs for mine, theirs in zip(self.given, picture, strict=True))

    def widest_edge(self, picture: Size) -> Size:
        """How many rows and columns at an edge of the picture change the outermost patches for certain.

        As many as a patch has. But a model that hands squares of fewer pixels than the picture has to this call may
        have scaled or cut it: scaling leaves out no more than one pixel of the outcome, and as much again for what
        does not divide it, where cutting leaves out a border.
        """
        patch = tuple(math.ceil(length / count) for length, count in zip(picture, self.grid, strict=True))
        if self.patch is None:
            return patch[0], patch[1]
        scaled = tuple(
            2 * math.ceil(length / mine) if mine < length else side
            for length, mine, side in zip(picture, self.given, patch, strict=True)
        )
        return min(patch[0], scaled[0]), min(patch[1], scaled[1])

    def check_border(self, name: str, picture: Size) -> None:
        """Refuse a picture whose far edges are in no patch, or so much padded that its grid does not tell the patches.

        Raises:
            InputError: the patches do not cover the picture, or most of the last ones is padding.
        """
        if self.patch is None or any(mine < theirs for mine, theirs in zip(self.given, picture, strict=True)):
            return
        covered = tuple(count * side for count, side in zip(self.grid, self.patch, strict=True))
        expected = tuple(math.ceil(length / count) for length, count in zip(picture, self.grid, strict=True))
        if self.given != picture and expected != self.patch and _less_than_a_patch(self.given, picture, self.patch):
            raise InputError(
                f"{name} pads images of {picture[0]} x {picture[1]} pixels to {self.given[0]} x {self.given[1]}, so "
                "that the last patches are mostly padding and no map fits them; crop or resize them first"
            )
        if self.given == picture and covered != picture:
            raise InputError(
                f"{name} sees only {covered[0]} x {covered[1]} of the {picture[0]} x {picture[1]} pixels of these "
                f"images, in whole patches of {self.patch[0]} x {self.patch[1]}, so that no map fits them; crop or "
                "resize them first"
            )


def embedding_of(  # the signature of conv2d
    output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Embedding:
    """The convolution as what may have made the patches."""
    del bias, groups
    kernel, steps = _size(weight), _pair(stride)
    side_by_side = kernel == steps and padding in (0, (0, 0), [0, 0], "valid") and _pair(dilation) == (1, 1)
    return Embedding(_size(input), _size(output), kernel if side_by_side else None)


def _less_than_a_patch(given: Size, picture: Size, patch: Size) -> bool:
    """Whether a picture was padded, not enlarged."""
    return all(mine - theirs < side for mine, theirs, side in zip(given, picture, patch, strict=True))


def _size(picture: Tensor) -> Size:
    return picture.shape[-2], picture.shape[-1]


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
