"""Rows of pictures with captions: the layout that comparisons, class grids and strips share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from vitreous.pictures.captions import font, line_height, wrap
from vitreous.pictures.sheet import FAINT, Sheet

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
    """A picture and what stands below it."""

    image: Image.Image
    caption: str = ""


@dataclass(frozen=True)
class Row:
    """Pictures side by side and what stands above them."""

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
) -> Sheet:
    """Lay out rows of pictures.

    Args:
        rows: The rows; all columns are as wide as a tile.
        tile: The width of a column, in units.
        headings: What stands above the columns.
        legend: Which colour bars to explain below: for signed maps, for positive ones, or both.
        columns: How many pictures are side by side before a row is continued below; all by default.
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
    parts = _Parts(headings=headings, tile=tile)
    body = sum(line.height(tile, inner) for line in lines)
    foot = (12 + line_height(font(12)) + 6 if legend else 0) + note_height(note, inner)
    sheet = Sheet(width, 2 * MARGIN + parts.head_height + body + foot)
    top = parts.draw_head(sheet)
    for line in lines:
        top = line.draw(sheet, top, tile, inner)
    for number, signed in enumerate(legend):
        marks = ("against", "0", "for") if signed else ("low", "high")
        sheet.bar(MARGIN + number * (_BAR + _BETWEEN_BARS), top, _BAR, signed=signed, marks=marks)
    write_note(sheet, note)
    return sheet


def note_height(note: str, width: int) -> float:
    """Give the height that a sentence at the bottom of a page takes, nothing where there is none."""
    return len(wrap(note, font(_NOTE), width, lines=_NOTE_LINES)) * line_height(font(_NOTE)) + 4 if note else 0


def write_note(sheet: Sheet, note: str) -> None:
    """Write a sentence at the bottom of a page, which has left ``note_height`` for it."""
    width = sheet.width - 2 * MARGIN
    if note:
        top = sheet.height - MARGIN - note_height(note, width) + 4
        sheet.write(MARGIN, top, note, width=width, size=_NOTE, ink=FAINT, lines=_NOTE_LINES)


@dataclass(frozen=True)
class _Line:
    """One line of a row on the page."""

    tiles: Sequence[Tile]
    label: str

    def height(self, tile: int, inner: int) -> float:
        return self._label_height(inner) + self._picture_height(tile) + self._caption_height(tile) + GAP

    def draw(self, sheet: Sheet, top: float, tile: int, inner: int) -> float:
        if self.label:
            sheet.write(MARGIN, top, self.label, width=inner, size=_LABEL, bold=True, lines=2)
        pictures = top + self._label_height(inner)
        tallest = self._picture_height(tile)
        for number, one in enumerate(self.tiles):
            left = MARGIN + number * (tile + GAP)
            width, height = fit(one.image, tile)
            # Captions stand close below their picture, so pictures keep to the bottom.
            sheet.picture(left + (tile - width) / 2, pictures + tallest - height, width, height, one.image)
            if one.caption:
                sheet.write(
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
class _Parts:
    """What stands above the rows."""

    headings: Sequence[str]
    tile: int

    @property
    def head_height(self) -> float:
        return max((len(lines) for lines in self._broken()), default=0) * line_height(font(_LABEL, bold=True)) + (
            4 if self.headings else 0
        )

    def draw_head(self, sheet: Sheet) -> float:
        bottom = MARGIN + self.head_height
        for number, (heading, lines) in enumerate(zip(self.headings, self._broken(), strict=True)):
            left = MARGIN + number * (self.tile + GAP)
            above = bottom - 4 - len(lines) * line_height(font(_LABEL, bold=True))
            sheet.write(left, above, heading, width=self.tile, size=_LABEL, bold=True, lines=3, align="center")
        return bottom

    def _broken(self) -> list[list[str]]:
        return [wrap(heading, font(_LABEL, bold=True), self.tile, lines=3) for heading in self.headings]


def fit(image: Image.Image, tile: int) -> tuple[float, float]:
    """Width and height on the page: as wide as the tile, and not taller than a third more."""
    scale = min(tile / image.width, tile * 4 / 3 / image.height)
    return image.width * scale, image.height * scale
