"""Sizes, fonts and lengths of a page: for the screen, or for a column in print.

Lengths on a page are in units of 1/100 inch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import ImageFont

from vitreous._utils.messages import close_match, short_repr
from vitreous.errors import InputError

if TYPE_CHECKING:
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
        """Width of a tile when so many stand side by side; the wanted width where the page may be as wide as that."""
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
    """Give the resolution, 300 by default.

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
