"""Tiles, the layout that comparisons, class grids and strips share: rows of images with captions, and maps as tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import Look
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import Canvas
from vitreous.pictures.captions import FAINT, font, line_height, placeholder, wrap

_LETTERS = 12  # size of the text in a placeholder
MARGIN = 16
GAP = 10
_CAPTION = 13
_CAPTION_LINES = 3
_LABEL = 15
_BAR = 200
_BETWEEN_BARS = 36
_NOTE = 12
_NOTE_LINES = 5
# Pictures hold this many pixels per unit, so that a page printed or enlarged stays sharp.
SHARPNESS = 2


@dataclass(frozen=True)
class Tile:
    """An image with a caption below."""

    image: Image.Image
    caption: str = ""


@dataclass(frozen=True)
class Row:
    """Tiles side by side with a label above."""

    tiles: Sequence[Tile]
    label: str = ""


def tiled(
    rows: Sequence[Row],
    *,
    tile: int,
    headings: Sequence[str] = (),
    legend: Sequence[bool] = (),
    columns: int | None = None,
    note: str = "",
) -> Canvas:
    """Lay out rows of tiles.

    Args:
        rows: The rows; all columns are as wide as a tile.
        tile: The width of a column, in units.
        headings: Headings of the columns.
        legend: The colour bars to draw below: for signed maps (True), for unsigned ones (False), or both.
        columns: How many tiles fit side by side before a row continues below; all by default.
        note: A sentence for the bottom.
    """
    across = columns or max(len(row.tiles) for row in rows)
    lines = [
        _Line(row.tiles[n : n + across], row.label if n == 0 else "")
        for row in rows
        for n in range(0, len(row.tiles), across)
    ]
    across = min(across, max(len(line.tiles) for line in lines))
    width = 2 * MARGIN + across * tile + (across - 1) * GAP
    width = max(width, 2 * MARGIN + len(legend) * (_BAR + _BETWEEN_BARS) - _BETWEEN_BARS)
    inner = width - 2 * MARGIN
    head = _Head(headings=headings, tile=tile)
    body = sum(line.height(tile, inner) for line in lines)
    foot = (12 + line_height(font(12)) + 6 if legend else 0) + note_height(note, inner)
    canvas = Canvas(width, 2 * MARGIN + head.height + body + foot)
    top = head.draw(canvas)
    for line in lines:
        top = line.draw(canvas, top, tile, inner)
    for number, signed in enumerate(legend):
        marks = ("against", "0", "for") if signed else ("low", "high")
        canvas.bar(MARGIN + number * (_BAR + _BETWEEN_BARS), top, _BAR, signed=signed, marks=marks)
    write_note(canvas, note)
    return canvas


def note_height(note: str, width: int) -> float:
    """Give the height of a sentence at the bottom of a page; 0 without one."""
    return len(wrap(note, font(_NOTE), width, lines=_NOTE_LINES)) * line_height(font(_NOTE)) + 4 if note else 0


def write_note(canvas: Canvas, note: str) -> None:
    """Write a sentence at the bottom of a page, which has reserved ``note_height`` for it."""
    width = canvas.width - 2 * MARGIN
    if note:
        top = canvas.height - MARGIN - note_height(note, width) + 4
        canvas.write(MARGIN, top, note, width=width, size=_NOTE, ink=FAINT, lines=_NOTE_LINES)


@dataclass(frozen=True)
class _Line:
    """One line of a row."""

    tiles: Sequence[Tile]
    label: str

    def height(self, tile: int, inner: int) -> float:
        return self._label_height(inner) + self._picture_height(tile) + self._caption_height(tile) + GAP

    def draw(self, canvas: Canvas, top: float, tile: int, inner: int) -> float:
        if self.label:
            canvas.write(MARGIN, top, self.label, width=inner, size=_LABEL, bold=True, lines=2)
        pictures = top + self._label_height(inner)
        tallest = self._picture_height(tile)
        for number, one in enumerate(self.tiles):
            left = MARGIN + number * (tile + GAP)
            width, height = fit(one.image, tile)
            # Tiles are aligned at the bottom, close to their captions.
            canvas.picture(left + (tile - width) / 2, pictures + tallest - height, width, height, one.image)
            if one.caption:
                canvas.write(
                    left,
                    pictures + tallest + 3,
                    one.caption,
                    width=tile,
                    size=_CAPTION,
                    lines=_CAPTION_LINES,
                    align="center",
                )
        return top + self.height(tile, inner)

    def _label_height(self, inner: int) -> float:
        style = font(_LABEL, bold=True)
        return len(wrap(self.label, style, inner, lines=2)) * line_height(style) + 4 if self.label else 0

    def _picture_height(self, tile: int) -> float:
        return max(fit(one.image, tile)[1] for one in self.tiles)

    def _caption_height(self, tile: int) -> float:
        style = font(_CAPTION)
        counts = [len(wrap(one.caption, style, tile, lines=_CAPTION_LINES)) if one.caption else 0 for one in self.tiles]
        return max(counts) * line_height(style) + 3


@dataclass(frozen=True)
class _Head:
    """The headings above the rows."""

    headings: Sequence[str]
    tile: int

    @property
    def height(self) -> float:
        return max((len(lines) for lines in self._broken()), default=0) * line_height(font(_LABEL, bold=True)) + (
            4 if self.headings else 0
        )

    def draw(self, canvas: Canvas) -> float:
        bottom = MARGIN + self.height
        for number, (heading, lines) in enumerate(zip(self.headings, self._broken(), strict=True)):
            left = MARGIN + number * (self.tile + GAP)
            above = bottom - 4 - len(lines) * line_height(font(_LABEL, bold=True))
            canvas.write(left, above, heading, width=self.tile, size=_LABEL, bold=True, lines=3, align="center")
        return bottom

    def _broken(self) -> list[list[str]]:
        return [wrap(heading, font(_LABEL, bold=True), self.tile, lines=3) for heading in self.headings]


def fit(image: Image.Image, tile: int) -> tuple[float, float]:
    """Fit an image into a tile: as wide as the tile, and at most a third taller."""
    scale = min(tile / image.width, tile * 4 / 3 / image.height)
    return image.width * scale, image.height * scale


def map_picture(
    scores: Tensor,
    grid: tuple[int, int],
    base: BaseImage,
    *,
    signed: bool,
    look: Look | None,
    span: tuple[float, float] | None = None,
    scale: float = SHARPNESS,
) -> Image.Image:
    """Lay a map over its base image; a map with NaN or infinity becomes a placeholder.

    Args:
        scores: Raw scores (patches,).
        grid: Rows and columns of patches.
        base: The base image.
        signed: Whether the sign of the scores carries meaning.
        look: How maps are drawn.
        span: See ``framed_maps``.
        scale: Pixels of the photo per unit of the page.
    """
    if not bool(scores.isfinite().all()):
        return placeholder(base.photo.size, max(1, round(_LETTERS * scale)))
    return base.lay(scores, grid, signed=signed, look=look, span=span)


def map_tile(
    explanation: Explanation, method: str, position: tuple[int, int], base: BaseImage, look: Look | None
) -> Tile:
    """Draw a map as a tile.

    Args:
        explanation: The explanation.
        method: Spelling of the method.
        position: Which image of the batch, and which of its classes.
        base: The base image.
        look: How maps are drawn.
    """
    scores, grid = explanation.scores_of(method, *position), explanation.grid_of(method)
    return Tile(map_picture(scores, grid, base, signed=explanation.signed[method], look=look))


def bar_marks(scores: Tensor, *, signed: bool) -> tuple[str, ...]:
    """Label the ends of a map's colour bar with raw values, and its middle with 0 when the map is signed."""
    low, high = float(scores.min()), float(scores.max())
    if not signed:
        return f"{low:.3g}", f"{high:.3g}"
    largest = max(abs(low), abs(high))
    return f"{-largest:.3g} against", "0", f"for {largest:.3g}"
