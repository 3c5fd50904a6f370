"""Maps as pictures: with the opacity, sign and threshold that a visitor sets, from scores that are there already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitreous.defaults import DEFAULT_OPACITY
from vitreous.errors import InputError
from vitreous.pictures import Look
from vitreous.pictures.base_image import BaseImage
from vitreous.web.record import Record
from vitreous.web.rows import BlockRows

Sign = Literal["both", "for", "against"]
SIGNS: tuple[Sign, ...] = get_args(Sign)
TILE = 420  # pixels of the longer side of a map on the page
_MARK = "#ffffff"


@dataclass(frozen=True)
class Sliders:
    """How maps are shown; none of it needs the model.

    Attributes:
        opacity: Of the colours over the grey photo, from 0 to 1.
        sign: Which scores are shown of maps whose sign means something.
        threshold: The part of the largest score below which nothing is shown, from 0 to 1.
        smooth: Interpolate between patches; otherwise patches are rectangles.
    """

    opacity: float = DEFAULT_OPACITY
    sign: Sign = "both"
    threshold: float = 0.0
    smooth: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.opacity <= 1 and 0 <= self.threshold <= 1 and self.sign in SIGNS):
            raise InputError("Opacity and threshold lie between 0 and 1, and the sign is both, for or against.")

    @property
    def look(self) -> Look:
        """What of it drawing knows."""
        return Look(smooth=self.smooth, opacity=self.opacity)


def adjusted(scores: Tensor, *, signed: bool, sliders: Sliders) -> Tensor:
    """Give scores of which those are put out that are not to be shown: set to 0, or to the lowest without a sign."""
    if not signed:
        low, high = scores.min(), scores.max()
        return torch.where(scores >= low + sliders.threshold * (high - low), scores, low)
    kept = scores.abs() >= sliders.threshold * scores.abs().max()
    if sliders.sign != "both":
        kept &= scores > 0 if sliders.sign == "for" else scores < 0
    return torch.where(kept, scores, torch.zeros_like(scores))


def backdrop_of(record: Record, size: int = TILE) -> BaseImage:
    """Give the photo to draw on."""
    assert record.sample is not None
    return BaseImage.of(record.sample, 0, record.photo.picture).fitted(size, size)


def draw_map(record: Record, method: str, class_index: int, sliders: Sliders, backdrop: BaseImage) -> Image.Image:
    """Draw one map. Colours keep their meaning while sliders move: they are those of the whole map.

    Raises:
        InputError: the scores are not finite.
    """
    assert record.sample is not None
    scores, signed = record.scores[method, class_index], record.signed[method]
    shown = adjusted(scores, signed=signed, sliders=sliders)
    span = (float(scores.min()), float(scores.max()))
    return backdrop.lay(shown, record.sample.grid_for(scores), signed=signed, look=sliders.look, span=span)


def patch_at(backdrop: BaseImage, grid: tuple[int, int], across: float, down: float) -> tuple[int, int]:
    """Give row and column of the patch at a point of the drawn photo; the nearest one where the model sees none."""
    frame, geometry = backdrop.frame, backdrop.geometry
    places = (down - frame.top) / (frame.bottom - frame.top), (across - frame.left) / (frame.right - frame.left)
    row, column = (
        place * grid[axis] if geometry is None else float(geometry.positions(axis, torch.tensor(place)))
        for axis, place in enumerate(places)
    )
    return min(max(int(row), 0), grid[0] - 1), min(max(int(column), 0), grid[1] - 1)


def mark_patch(picture: Image.Image, backdrop: BaseImage, grid: tuple[int, int], patch: tuple[int, int]) -> Image.Image:
    """Draw a frame around a patch."""
    frame, geometry = backdrop.frame, backdrop.geometry
    height, width = frame.bottom - frame.top, frame.right - frame.left
    down, across = height / grid[0], width / grid[1]
    top, left = frame.top + patch[0] * down, frame.left + patch[1] * across
    if geometry is not None:
        rows, columns = (geometry.cell(axis, number) for axis, number in enumerate(patch))
        top, left = frame.top + rows[0] * height, frame.left + columns[0] * width
        down, across = (rows[1] - rows[0]) * height, (columns[1] - columns[0]) * width
    marked = picture.copy()
    draw = ImageDraw.Draw(marked)
    draw.rectangle((left - 2, top - 2, left + across + 1, top + down + 1), outline="#000000", width=1)
    draw.rectangle((left - 1, top - 1, left + across, top + down), outline=_MARK, width=2)
    return marked


def draw_rows(rows: BlockRows, patch: tuple[int, int], backdrop: BaseImage) -> dict[str, Image.Image]:
    """Draw what a patch draws on, by what it is called."""
    number = patch[0] * rows.grid[1] + patch[1]
    matrices = {"attention": rows.attention, "contribution": rows.contribution}
    return {
        name: mark_patch(backdrop.lay(matrix[number], rows.grid, signed=False), backdrop, rows.grid, patch)
        for name, matrix in matrices.items()
        if matrix is not None
    }
