"""Tiles, the layout that all figures of maps share: rows of images with captions and colour bars, and maps as tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from vitreous.explanation.views import Look, colour_range
from vitreous.inputs.patch_geometry import Size
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import FAINT, Bar, Canvas, bar_height, line_height, placeholder, wrap
from vitreous.pictures.style import UNITS_PER_INCH, PageStyle

# Pixels per unit of pictures on the page that is served.
SHARPNESS = 2
_CAPTION_LINES = 4
_LABEL_LINES = 2
_HEADING_LINES = 4
_NOTE_LINES = 5
_TALLEST = 4 / 3  # of a tile, by its width
_LEGEND_BAR = 200  # width of a colour bar that several maps share, on the screen
_MOST_PIXELS = 4096  # across one tile


@dataclass(frozen=True)
class Tile:
    """An image with a caption and a colour bar below; a new line in the caption starts a new line."""

    image: Image.Image
    caption: str = ""
    bar: Bar | None = None


@dataclass(frozen=True)
class Row:
    """Tiles side by side with a label above."""

    tiles: Sequence[Tile]
    label: str = ""


@dataclass(frozen=True)
class _Line:
    """One line of a row, with the headings of its columns where they change."""

    tiles: Sequence[Tile]
    label: str
    headings: Sequence[str]


def tiled(
    rows: Sequence[Row],
    *,
    tile: float,
    headings: Sequence[str] = (),
    legend: Sequence[Bar | bool] = (),
    columns: int | None = None,
    note: str = "",
    title: str = "",
    style: PageStyle | None = None,
    scale: float | None = None,
) -> Canvas:
    """Lay out rows of tiles.

    Args:
        rows: The rows; all columns are as wide as a tile.
        tile: The width of a column, in units.
        headings: Headings of the columns.
        legend: The colour bars to draw below; ``True`` and ``False`` are those of signed and of unsigned maps without
            numbers.
        columns: How many tiles fit side by side before a row continues below; all by default.
        note: A sentence for the bottom.
        title: Title of the page.
        style: Sizes and fonts of the page.
        scale: Pixels per unit of a PNG; by default those of the style's resolution.
    """
    layout = _Layout(rows, tile, headings, [_as_bar(bar) for bar in legend], columns, note, title, style or PageStyle())
    return layout.draw(scale)


def _as_bar(bar: Bar | bool) -> Bar:  # noqa: FBT001
    if isinstance(bar, Bar):
        return bar
    return Bar(bar, ("against", "0", "for") if bar else ("low", "high"))


class _Layout:
    """Rows of tiles with all lengths computed."""

    def __init__(
        self,
        rows: Sequence[Row],
        tile: float,
        headings: Sequence[str],
        legend: Sequence[Bar],
        columns: int | None,
        note: str,
        title: str,
        style: PageStyle,
    ) -> None:
        self.tile, self.legend, self.note, self.title, self.style = tile, legend, note, title, style
        across = columns or max(len(row.tiles) for row in rows)
        self.lines = _lines(rows, headings, across)
        across = min(across, max(len(line.tiles) for line in self.lines))
        bars = len(legend) * (_LEGEND_BAR + 3 * style.gap) - 3 * style.gap if style.inner is None else 0
        self.inner = style.inner or max(across * tile + (across - 1) * style.gap, bars)

    def draw(self, scale: float | None) -> Canvas:
        style = self.style
        heights = [self._height(line) for line in self.lines]
        foot = self._legend_height() + self._note_height()
        canvas = Canvas(
            self.inner + 2 * style.margin,
            2 * style.margin + self._title_height() + sum(heights) - (0 if foot else style.gap) + foot,
            scale,
            style=style,
        )
        top = style.margin
        if self.title:
            canvas.write(style.margin, top, self.title, width=self.inner, size=style.title, bold=True, lines=2)
            top += self._title_height()
        for line, height in zip(self.lines, heights, strict=True):
            self._draw_line(canvas, line, top)
            top += height
        self._draw_legend(canvas, top)
        if self.note:
            at = canvas.height - style.margin - self._note_height() + 0.3 * style.note
            canvas.write(style.margin, at, self.note, width=self.inner, size=style.note, ink=FAINT, lines=_NOTE_LINES)
        return canvas

    def _draw_line(self, canvas: Canvas, line: _Line, top: float) -> None:
        style, tile = self.style, self.tile
        if line.label:
            canvas.write(
                style.margin, top, line.label, width=self.inner, size=style.label, bold=True, lines=_LABEL_LINES
            )
        top += self._label_height(line)
        under_headings = top + self._headings_height(line)
        for number, heading in enumerate(line.headings):
            left = style.margin + number * (tile + style.gap)
            height = self._text_height(heading, style.label, _HEADING_LINES, bold=True)
            at = under_headings - height - 0.25 * style.label
            canvas.write(
                left, at, heading, width=tile, size=style.label, bold=True, lines=_HEADING_LINES, align="center"
            )
        tallest = self._picture_height(line)
        for number, one in enumerate(line.tiles):
            left = style.margin + number * (tile + style.gap)
            width, height = fit(one.image, tile)
            # Tiles are aligned at the bottom, close to their captions.
            edge = left + (tile - width) / 2
            canvas.picture(edge, under_headings + tallest - height, width, height, one.image)
            below = under_headings + tallest + 0.25 * style.caption
            if one.bar is not None:
                canvas.bar(edge, below, width, one.bar)
                below += bar_height(style)
            for part in filter(None, one.caption.split("\n")):
                below += canvas.write(
                    left, below, part, width=tile, size=style.caption, lines=_CAPTION_LINES, align="center"
                )

    def _height(self, line: _Line) -> float:
        below = max(
            (bar_height(self.style) if one.bar else 0)
            + sum(
                self._text_height(part, self.style.caption, _CAPTION_LINES)
                for part in filter(None, one.caption.split("\n"))
            )
            for one in line.tiles
        )
        below += 0.25 * self.style.caption if below else 0
        return (
            self._label_height(line) + self._headings_height(line) + self._picture_height(line) + below + self.style.gap
        )

    def _text_height(self, text: str, size: float, lines: int, *, bold: bool = False) -> float:
        style = self.style.font(size, bold=bold)
        return float(len(wrap(text, style, self.tile, lines=lines)) * line_height(style))

    def _title_height(self) -> float:
        if not self.title:
            return 0.0
        style = self.style.font(self.style.title, bold=True)
        return len(wrap(self.title, style, self.inner, lines=2)) * line_height(style) + 0.4 * self.style.title

    def _label_height(self, line: _Line) -> float:
        if not line.label:
            return 0.0
        style = self.style.font(self.style.label, bold=True)
        lines = wrap(line.label, style, self.inner, lines=_LABEL_LINES)
        return len(lines) * line_height(style) + 0.25 * self.style.label

    def _headings_height(self, line: _Line) -> float:
        size = self.style.label
        texts = [heading for heading in line.headings if heading]
        tallest = max((self._text_height(text, size, _HEADING_LINES, bold=True) for text in texts), default=0.0)
        return tallest + (0.25 * size if texts else 0)

    def _picture_height(self, line: _Line) -> float:
        return max(fit(one.image, self.tile)[1] for one in line.tiles)

    def _legend_height(self) -> float:
        return bar_height(self.style) + 0.5 * self.style.note if self.legend else 0.0

    def _draw_legend(self, canvas: Canvas, top: float) -> None:
        style = self.style
        room = (self.inner - 3 * style.gap * (len(self.legend) - 1)) / max(1, len(self.legend))
        wide = min(_LEGEND_BAR, room)
        for number, bar in enumerate(self.legend):
            canvas.bar(style.margin + number * (wide + 3 * style.gap), top, wide, bar)

    def _note_height(self) -> float:
        if not self.note:
            return 0.0
        style = self.style.font(self.style.note)
        lines = wrap(self.note, style, self.inner, lines=_NOTE_LINES)
        return len(lines) * line_height(style) + 0.3 * self.style.note


def _lines(rows: Sequence[Row], headings: Sequence[str], across: int) -> list[_Line]:
    """Break rows that are longer than ``across``; headings stand where those of the line before are others."""
    lines: list[_Line] = []
    before: tuple[str, ...] = ()
    for row in rows:
        for first in range(0, len(row.tiles), across):
            own = tuple(headings[first : first + across])
            label = row.label if first == 0 else ""
            lines.append(_Line(row.tiles[first : first + across], label, own if own != before else ()))
            before = own
    return lines


def fit(image: Image.Image, tile: float) -> tuple[float, float]:
    """Fit an image into a tile: as wide as the tile, and at most a third taller."""
    scale = min(tile / image.width, tile * _TALLEST / image.height)
    return image.width * scale, image.height * scale


def prepare(base: BaseImage, look: Look, style: PageStyle, tile: float) -> BaseImage:
    """Return the base image of a tile: the model's crop unless there is context, at least in the photo's resolution.

    A tile has at least as many pixels per inch as the page, so photos that are smaller are enlarged.
    """
    base = base.with_mask(look.mask)
    if not look.context:
        base = base.cropped()
    width, _ = fit(base.photo, tile)
    pixels = min(max(base.photo.width, style.pixels(width)), max(_MOST_PIXELS, style.pixels(width)))
    if pixels == base.photo.width:
        return base
    return base.fitted(pixels, math.ceil(pixels * base.photo.height / base.photo.width) + 1)


class MapPainter:
    """Draws maps as tiles, each on a scale of its own or all on one.

    Args:
        look: How maps are drawn.
        style: Sizes of the page.
        tile: Width of a tile, in units.
        maps: All maps of the figure with whether they are signed, for a scale that they share.
        shared: Whether they share a scale when ``look`` does not say.
        bars: Whether every map has a colour bar even if they share a scale.
    """

    def __init__(
        self,
        look: Look,
        style: PageStyle,
        tile: float,
        maps: Iterable[tuple[Tensor, bool]] = (),
        *,
        shared: bool = False,
        bars: bool = False,
    ) -> None:
        self.look, self.style, self.tile, self.bars = look, style, tile, bars
        self.shared = shared if look.shared_scale is None else look.shared_scale
        self.signs: set[bool] = set()
        self._spans: dict[bool, tuple[float, float]] = {}
        if self.shared:
            found: dict[bool, list[Tensor]] = {}
            for scores, signed in maps:
                if bool(scores.isfinite().all()):
                    found.setdefault(signed, []).append(scores.detach().flatten().double().cpu())
            self._spans = {
                signed: find_span(torch.cat(every), signed=signed, from_zero=look.from_zero)
                for signed, every in found.items()
            }

    def map_tile(self, scores: Tensor, grid: Size, base: BaseImage, *, signed: bool, caption: str = "") -> Tile:
        """Draw a map as a tile; one with NaN or infinity becomes a placeholder that says so.

        Args:
            scores: Raw scores (patches,).
            grid: Rows and columns of patches.
            base: The base image, see ``prepare``.
            signed: Whether the sign of the scores carries meaning.
            caption: Text below.
        """
        self.signs.add(signed)
        if not bool(scores.isfinite().all()):
            letters = self.style.note * base.photo.width / max(1.0, fit(base.photo, self.tile)[0])
            return Tile(placeholder(base.photo.size, max(1, round(letters))), caption)
        own = find_span(scores, signed=signed, from_zero=self.look.from_zero)
        span = self._spans.get(signed, own)
        picture = base.lay(scores, grid, signed=signed, look=self.look, span=span)
        bar = None if self.shared and not self.bars else Bar(signed, bar_marks(span, signed=signed), self.look.cmap)
        return Tile(picture, caption, bar)

    def legend(self) -> list[Bar]:
        """Return the colour bars that the maps drawn so far share; none where each has its own."""
        if not self.shared or self.bars:
            return []
        return [
            Bar(signed, bar_marks(self._spans[signed], signed=signed, words=True), self.look.cmap)
            for signed in sorted(self.signs & self._spans.keys())
        ]

    def note(self) -> str:
        """Say what the colours mean where that is not clear from the bars; nothing in print."""
        if not self.style.notes or self.shared or True not in self.signs:
            return ""
        return "Signed maps: red speaks for the class, blue against it."


def find_span(scores: Tensor, *, signed: bool, from_zero: bool = True) -> tuple[float, float]:
    """Return the smallest and the largest value of a colour scale for maps of these scores."""
    low, high = colour_range(*scores.aminmax(), signed=signed, from_zero=from_zero)
    return float(low), float(high)


def bar_marks(span: tuple[float, float], *, signed: bool, words: bool = False) -> tuple[str, ...]:
    """Label the ends of a colour bar with raw values, and its middle with 0 when maps are signed."""
    low, high = map(short_number, span)
    if not signed:
        return low, high
    return (f"against {low}", "0", f"{high} for") if words else (low, "0", high)


def short_number(value: float) -> str:
    """Write a number with two digits, without zeros that only take room."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}".removeprefix("-") if value == 0 else str(value)
    if 0.001 <= abs(value) < 10_000:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def own_pixels(base: BaseImage, tile: float, look: Look) -> float | None:
    """Return the scale of a PNG that keeps all pixels of a large photo; ``None`` if the resolution was requested."""
    if look.dpi is not None:
        return None
    return max(base.photo.width / fit(base.photo, tile)[0], 300 / UNITS_PER_INCH)
