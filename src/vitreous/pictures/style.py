"""Sizes, fonts, lengths and colours: of a page for the screen or a column in print, of heatmaps, words and chart lines.

Lengths on a page are in units of 1/100 inch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageFont

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous._utils.messages import close_match, short_repr
from vitreous.errors import InputError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

    from vitreous.explanation.views import Look


Font = ImageFont.FreeTypeFont

UNITS_PER_INCH = 100
DEFAULT_DPI = 300
_LEAST_DPI, _MOST_DPI = 36, 2400
_NARROWEST, _WIDEST = 0.5, 100.0  # inches
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27, "px": 1 / 96}
_POINT = UNITS_PER_INCH / 72
_DEFAULT_FAMILY = "DejaVu Sans"
# Where a viewer of an SVG does not have the font, one of about the same width.
_SUBSTITUTES = ("Verdana", "Arial", "sans-serif")


@dataclass(frozen=True)
class PageStyle:
    """How large the parts of a page are, in units of 1/100 inch.

    Attributes:
        margin: Around the page.
        gap: Between tiles.
        title: Font size of the page's title.
        label: Font size of headings.
        caption: Font size below tiles and in charts.
        note: Font size of notes and of the numbers at colour bars.
        bar: Height of a colour bar.
        line: Width of a line in a chart, in points.
        width: Width of the page; ``None`` to make it as wide as its content.
        dpi: Pixels per inch of PNG files, and the least of pictures in PDF and SVG files.
        family: Font family or file; ``None`` for DejaVu Sans.
        notes: Whether remarks on scales are written; in print they belong into the caption.
    """

    margin: float = 16
    gap: float = 10
    title: float = 18
    label: float = 15
    caption: float = 13
    note: float = 12
    bar: float = 7
    line: float = 2.0
    width: float | None = None
    dpi: int = DEFAULT_DPI
    family: str | None = None
    notes: bool = True

    @property
    def inner(self) -> float | None:
        """Width between the margins, when the page has a given width."""
        return None if self.width is None else self.width - 2 * self.margin

    def font(self, size: float, *, bold: bool = False) -> Font:
        """Load the page's font."""
        return font(size, bold=bold, family=self.family)

    def font_properties(self, size: float, *, bold: bool = False) -> Any:
        """Give matplotlib the page's font."""
        return font_properties(size, bold=bold, family=self.family)

    def tile(self, wanted: float, across: int) -> float:
        """Return the width of one of so many tiles in a row; the requested one if the page has no fixed width."""
        if self.inner is None:
            return wanted
        return max(1.0, (self.inner - (across - 1) * self.gap) / across)

    def pixels(self, length: float) -> int:
        """How many pixels a picture of this length in units has at least."""
        return max(1, math.ceil(length / UNITS_PER_INCH * self.dpi))


def page_style(look: Look) -> PageStyle:
    """Find the sizes of a page: large for the screen, those of print where a width is given.

    Raises:
        InputError: The width, the resolution or the font cannot be used.
    """
    dpi = check_dpi(look.dpi)
    font_file(look.font)  # refuse an unknown font before anything is drawn
    if look.width is None:
        return PageStyle(dpi=dpi, family=look.font)
    return PageStyle(
        margin=1,
        gap=5,
        title=9 * _POINT,
        label=8 * _POINT,
        caption=7 * _POINT,
        note=6 * _POINT,
        bar=4,
        line=1.2,
        width=UNITS_PER_INCH * inches(look.width),
        dpi=dpi,
        family=look.font,
        notes=False,
    )


def inches(width: str | float) -> float:
    """Read a length such as ``3.25in``, ``8.5cm``, ``82mm`` or ``240pt``; a number alone is in inches.

    Raises:
        InputError: It is none, or no page is that wide.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(in|cm|mm|pt|px)?\s*", str(width).lower())
    if match is None or isinstance(width, bool):
        raise InputError(f"a width is a length such as 3.25in, 8.5cm or 240pt, not {short_repr(width)}")
    length = float(match[1]) * _INCHES[match[2] or "in"]
    if not _NARROWEST <= length <= _WIDEST:
        raise InputError(
            f"a figure is {_NARROWEST:g} to {_WIDEST:g} inches wide, not {length:.3g} ({short_repr(width)})"
        )
    return length


def check_dpi(dpi: int | None) -> int:
    """Return the resolution, 300 by default.

    Raises:
        InputError: No file has that resolution.
    """
    if dpi is None:
        return DEFAULT_DPI
    if isinstance(dpi, bool) or not isinstance(dpi, int) or not _LEAST_DPI <= dpi <= _MOST_DPI:
        raise InputError(f"dpi must be a whole number from {_LEAST_DPI} to {_MOST_DPI}, not {short_repr(dpi)}")
    return dpi


@cache
def font(size: float, *, bold: bool = False, family: str | None = None) -> Font:
    """Load a font by its family or file; DejaVu Sans by default, which comes with matplotlib."""
    return ImageFont.truetype(font_file(family, bold=bold), size)


@cache
def font_file(family: str | None = None, *, bold: bool = False) -> Path:
    """Find the TrueType file of a font family; a path to a file is taken as it is, also for bold text.

    Raises:
        InputError: There is no such font, or it is not a TrueType font, which PDF checkers ask for.
    """
    from matplotlib import get_data_path  # noqa: PLC0415  # slow to import, and scores can be had without pictures

    if family is None or family == _DEFAULT_FAMILY:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        return Path(get_data_path()) / "fonts" / "ttf" / name
    from matplotlib.font_manager import FontProperties, findfont, fontManager  # noqa: PLC0415

    if not isinstance(family, str) or not family.strip():
        raise InputError(f"a font is the name of a family or a .ttf file, not {short_repr(family)}")
    path = Path(family).expanduser()
    if path.suffix.lower() not in {".ttf", ".otf", ".ttc"}:
        try:
            wanted = FontProperties(family=[family], weight="bold" if bold else "normal")
            path = Path(findfont(wanted, fallback_to_default=False))
        except ValueError:
            known = sorted({entry.name for entry in fontManager.ttflist})
            hint = close_match(family, known) or f"; there are {len(known)} families, such as DejaVu Serif"
            raise InputError(f"there is no font {family!r}{hint}") from None
    try:
        with path.open("rb") as stream:
            first = stream.read(4)
    except OSError as error:
        raise InputError(f"the font {family!r} cannot be read: {error.strerror}") from None
    if first not in {b"\x00\x01\x00\x00", b"true"}:
        raise InputError(f"the font {family!r} is not a TrueType font: give a .ttf file or another family")
    return path


def font_properties(size: float, *, bold: bool = False, family: str | None = None) -> Any:
    """Give matplotlib the font file that widths are measured with, whatever its own settings are.

    The names of the family go into SVG files, whose text stays text.
    """
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415

    file = font_file(family, bold=bold)
    name = str(font(12, bold=bold, family=family).getname()[0])
    return FontProperties(
        family=[name, *_SUBSTITUTES],
        weight="bold" if bold else "normal",
        fname=str(file),
        size=size * 72 / UNITS_PER_INCH,
    )


RGB = tuple[int, int, int]

_BAND = 256  # rows that are blended at once: a photo of 80 million pixels would take gigabytes in floating point

_SEQUENTIAL = "inferno"
_DARKEST = 0.12  # where inferno starts: its lowest colours are black, which would only darken the photo
# Blue to red, vivid on both sides of a middle that is transparent.
_DIVERGING = ("#2457e6", "#3f8cff", "#63b3ff", "#ffffff", "#ff9a5c", "#ff5a36", "#e3122a")
# Alpha is the strength to this power: heavy tails would leave all but a few patches invisible.
_SIGNED_POWER, _UNSIGNED_POWER = 0.6, 0.7
# The diverging maps of matplotlib, without their reversed forms.
_DIVERGING_NAMES = frozenset({
    *("PiYG", "PRGn", "BrBG", "PuOr", "RdGy", "RdBu", "RdYlBu", "RdYlGn", "Spectral"),
    *("coolwarm", "bwr", "seismic", "berlin", "managua", "vanimo"),
})  # fmt: skip

# Words on a white page: red for the class, blue against it, orange for methods without a sign.
_WORD_FOR: RGB = (226, 74, 51)
_WORD_AGAINST: RGB = (52, 120, 214)
_WORD_UNSIGNED: RGB = (242, 158, 22)


def colour(heatmap: NDArray[np.floating], *, signed: bool, cmap: str | None = None) -> NDArray[np.uint8]:
    """Colour a heatmap that is scaled for display.

    Args:
        heatmap: Values (height, width) in [0, 1], or in [-1, 1] when signed.
        signed: Blue against, red for the class, darker where stronger; otherwise dark (low) to light (high).
        cmap: See ``Look``.

    Returns:
        RGBA bytes (height, width, 4). The alpha grows with the strength from 0, so that the photo shows where there is
        no evidence, for signed maps as for others.
    """
    colours: NDArray[np.float64] = colour_map(signed=signed, cmap=cmap)((heatmap + 1) / 2 if signed else heatmap)
    power = _SIGNED_POWER if signed else _UNSIGNED_POWER
    colours[..., 3] = np.clip(np.abs(heatmap), 0, 1) ** power
    return np.rint(colours * 255).astype(np.uint8)


def ramp(length: int, height: int = 1, *, signed: bool, cmap: str | None = None) -> Image.Image:
    """Draw the colours from the lowest to the highest value, left to right, as they are on white."""
    values = np.broadcast_to(np.linspace(-1.0 if signed else 0.0, 1.0, length), (height, length))
    return overlay(Image.new("RGB", (length, height), "white"), values, signed=signed, opacity=1.0, cmap=cmap)


@cache
def colour_map(*, signed: bool, cmap: str | None = None) -> Colormap:
    """Find a colour map by its name, see ``Look``; one that is for the other kind of maps leaves the default.

    Raises:
        InputError: matplotlib has no such map.
    """
    # Only the colour tables are needed: no pyplot, hence no backend and no global state. Slow to import.
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap  # noqa: PLC0415

    names = [name.strip() for name in cmap.split(",")] if cmap else []
    for name in names:
        if name not in colormaps:
            raise InputError(
                f"there is no colour map {name!r}{close_match(name, colormaps) or '; matplotlib lists them'}"
            )
    if len(names) > 2:
        raise InputError(f"one colour map for unsigned and one for signed maps are enough, not {len(names)}")
    if len(names) == 1:
        names = ["", names[0]] if names[0].removesuffix("_r") in _DIVERGING_NAMES else [names[0], ""]
    chosen = (names[1] if signed else names[0]) if names else ""
    if chosen:
        return colormaps[chosen]
    if signed:
        return LinearSegmentedColormap.from_list("evidence", _DIVERGING)
    return ListedColormap(colormaps[_SEQUENTIAL](np.linspace(_DARKEST, 1, 256)))


def overlay(
    image: Image.Image,
    heatmap: NDArray[np.floating],
    *,
    signed: bool,
    opacity: float = DEFAULT_OPACITY,
    cmap: str | None = None,
) -> Image.Image:
    """Lay a heatmap over an image, which keeps its colours where there is no evidence.

    Args:
        image: The image, of the heatmap's size.
        heatmap: Values (height, width) scaled for display, see ``colour``.
        signed: Whether the sign of the heatmap carries meaning.
        opacity: Of the strongest value, from 0 (the image alone) to 1.
        cmap: See ``Look``.
    """
    if not 0 <= opacity <= 1:
        raise InputError(f"opacity must be between 0 and 1, not {opacity}")
    if heatmap.shape != (image.height, image.width):
        raise InputError(f"a heatmap of {heatmap.shape} does not fit a picture of {(image.height, image.width)}")
    photo = np.asarray(image.convert("RGB"))
    blended = np.empty_like(photo)
    for top in range(0, image.height, _BAND):
        band = slice(top, top + _BAND)
        colours = colour(heatmap[band], signed=signed, cmap=cmap).astype(np.float64)
        alpha = colours[..., 3:] / 255 * opacity
        blended[band] = np.rint(photo[band] * (1 - alpha) + colours[..., :3] * alpha)
    return Image.fromarray(blended)


def strongest_word_colour(strength: float, *, signed: bool) -> RGB:
    """Return the colour of the strongest word score of the same sign."""
    return _WORD_UNSIGNED if not signed else _WORD_FOR if strength > 0 else _WORD_AGAINST


def word_colour(strength: float, *, signed: bool) -> str:
    """Return the CSS colour behind a word whose score is scaled for display: the strongest colour mixed with white."""
    part = min(1.0, abs(strength))
    mixed = (round(255 + (channel - 255) * part) for channel in strongest_word_colour(strength, signed=signed))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def line_style(number: int, colours: Sequence[str], dashes: Sequence[str]) -> tuple[str, str]:
    """Return the colour and the dashes of a chart line; where colours repeat, the dashes differ."""
    turn, place = divmod(number, len(colours))
    return colours[place], dashes[(turn + place) % len(dashes)]
