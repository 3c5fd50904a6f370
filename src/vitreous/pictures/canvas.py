"""The canvas of a figure: laid out from the top left, written as PNG, SVG or PDF, without pyplot; and text on it.

Lengths are in units of 1/100 inch, which are pixels at scale 1.
"""

from __future__ import annotations

import io
import math
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from vitreous._utils.messages import printable
from vitreous._utils.storage import PNG_LEVEL, atomic_file
from vitreous.errors import InputError
from vitreous.pictures.style import UNITS_PER_INCH, Font, PageStyle, font, ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitreous.explanation.explanation import Explanation


INK = "#1a1a1a"
FAINT = "#5f5f5f"
SEPARATOR = " · "  # between a name and its number
NOT_SHOWN = "not shown: the scores contain NaN or infinity"
_JOINT = r"(?<=[=_-])(?!$)|(?<=\.)(?![\d]|$)"  # where a long word may be broken; numbers are not
_PLACEHOLDER_MARGIN = 4


def wrap(text: str, style: Font, width: float, *, lines: int) -> list[str]:
    """Break a text into at most ``lines`` lines of ``width`` pixels; what does not fit ends in an ellipsis.

    Method spellings have no spaces, so a line may also end after a comma or colon, or inside a word that is too long.
    A number at the end, such as a probability, is never cut: what is before it is.
    """
    tidy = " ".join(printable(text).split())
    wrapped = _broken(tidy, style, width)
    before, mark, number = tidy.rpartition(SEPARATOR)
    if mark and len(wrapped) > lines:
        while before and len(_broken(f"{before}…{mark}{number}", style, width)) > lines:
            before = before[:-1].rstrip()
        wrapped = _broken(f"{before}…{mark}{number}" if before else number, style, width)
    if len(wrapped) > lines:
        wrapped[lines - 1 :] = ["".join(wrapped[lines - 1 :])]
    ends = [line.rstrip().removesuffix(SEPARATOR.rstrip()) for line in wrapped[:-1]]
    return [_shorten(line.removeprefix(SEPARATOR.lstrip()).strip(), style, width) for line in (*ends, wrapped[-1])]


def _broken(text: str, style: Font, width: float) -> list[str]:
    wrapped = [""]
    for piece in _pieces(text, style, width):
        if wrapped[-1] and style.getlength((wrapped[-1] + piece).rstrip()) > width:
            wrapped.append("")
        wrapped[-1] += piece
    return wrapped


def class_caption(explanation: Explanation, index: int = 0, target_index: int = 0) -> str:
    """Name an explained class with its probability, or another target (or a regression) with its value."""
    output = explanation.format_output(explanation.class_index(index, target_index), index)
    return f"{target_caption(explanation, index, target_index)}{SEPARATOR}{output}"


def target_caption(explanation: Explanation, index: int = 0, target_index: int = 0) -> str:
    """Name an explained class or another target; of a class with several names the first."""
    names = explanation.class_names
    if names is None or not any("," in name for name in names):
        return explanation.target_name(index, target_index)
    return replace(explanation, class_names=short_names(names)).target_name(index, target_index)


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten class names to what is before the first comma, ``tabby`` of ``tabby, tabby cat``, unless two share it."""
    first = [name.split(",")[0].strip() for name in names]
    count = Counter(first)
    return tuple(short if short and count[short] == 1 else name for short, name in zip(first, names, strict=True))


def draw_lines(draw: ImageDraw.ImageDraw, position: tuple[int, int], lines: list[str], style: Font, fill: str) -> None:
    """Draw lines of text below each other, starting at the top left ``position``."""
    left, top = position
    for number, line in enumerate(lines):
        draw.text((left, top + number * line_height(style)), line, fill=fill, font=style)


def line_height(style: Font) -> int:
    """Return the distance between two lines of text."""
    return round(style.size * 1.3)


def placeholder(size: tuple[int, int], letters: int = 12) -> Image.Image:
    """Draw a grey tile that says why there is no map.

    Args:
        size: Width and height.
        letters: Font size.
    """
    tile = Image.new("RGB", size, "#f0f0f0")
    style = font(letters)
    width, height = (max(1, side - 2 * _PLACEHOLDER_MARGIN) for side in size)
    lines = wrap(NOT_SHOWN, style, width, lines=max(1, height // line_height(style)))
    draw_lines(ImageDraw.Draw(tile), (_PLACEHOLDER_MARGIN, _PLACEHOLDER_MARGIN), lines, style, INK)
    return tile


def _pieces(text: str, style: Font, width: float) -> list[str]:
    """Split a text where a line may end: after spaces, commas and colons; in long words after other marks as well."""
    pieces = re.findall(r"[^\s,:]*[\s,:]+|[^\s,:]+", text)
    return [
        part for piece in pieces for part in (re.split(_JOINT, piece) if style.getlength(piece) > width else [piece])
    ]


def _shorten(line: str, style: Font, width: float) -> str:
    if style.getlength(line) <= width:
        return line
    if re.fullmatch(r"\d+\.\d+%", line):  # rather less precise than cut
        return f"{float(line[:-1]):.0f}%"
    while line and style.getlength(line + "…") > width:
        line = line[:-1]
    return line + "…"


FORMATS = ("png", "svg", "pdf")

_MOST_PIXELS = 150_000_000  # of a PNG; a larger page has fewer pixels per inch
# Text stays text: TrueType fonts in PDF, which publishers ask for, and letters rather than outlines in SVG.
_SETTINGS: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "vitreous"}
_PRINTING = threading.Lock()  # the settings of matplotlib are global
# Dates and program names would make the same figure a different file every time.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


class Canvas:
    """A blank page of a given width and height.

    Args:
        width: In units.
        height: In units.
        scale: Pixels per unit of a PNG; by default those of the style's resolution.
        style: Sizes and fonts; those of the screen by default.

    Examples:
        >>> canvas = explanation.figure("comparison")
        >>> canvas.save("figure.pdf").name
        'figure.pdf'
        >>> canvas.image(scale=1).width == canvas.width
        True
    """

    def __init__(
        self, width: float, height: float, scale: float | None = None, *, style: PageStyle | None = None
    ) -> None:
        from matplotlib.figure import Figure  # noqa: PLC0415  # slow to import, and scores can be had without pictures

        self.style = style or PageStyle()
        # A page with a requested width has exactly that; others have whole pixels at scale 1.
        self.width = math.ceil(width) if self.style.width is None else width
        self.height = math.ceil(height)
        most = math.sqrt(_MOST_PIXELS / (self.width * self.height))
        self.scale = min(self.style.dpi / UNITS_PER_INCH if scale is None else scale, most)
        self.figure: Figure = Figure(
            figsize=(self.width / UNITS_PER_INCH, self.height / UNITS_PER_INCH), dpi=UNITS_PER_INCH, facecolor="white"
        )

    def axes(self, left: float, top: float, width: float, height: float, *, projection: str | None = None) -> Axes:
        """Add matplotlib axes."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes: Axes = self.figure.add_axes(place, projection=projection)
        return axes

    def picture(self, left: float, top: float, width: float, height: float, image: Image.Image) -> None:
        """Draw an image that fills a rectangle."""
        axes = self.axes(left, top, width, height)
        axes.set_axis_off()
        axes.imshow(np.asarray(image.convert("RGB")), aspect="auto", interpolation="antialiased")

    def write(
        self,
        left: float,
        top: float,
        text: str,
        *,
        width: float,
        size: float = 15,
        bold: bool = False,
        ink: str = INK,
        lines: int = 1,
        align: str = "left",
    ) -> float:
        """Write a text, broken into lines, and return the height it takes.

        ``align`` places the lines at the left, center or right of the rectangle that starts at ``left``.
        """
        style = self.style.font(size, bold=bold)
        broken = wrap(text, style, width, lines=lines)
        anchor = left + {"left": 0.0, "center": width / 2, "right": width}[align]
        for number, line in enumerate(broken):
            baseline = top + number * line_height(style) + style.size
            self.figure.text(
                anchor / self.width,
                1 - baseline / self.height,
                line,
                color=ink,
                ha=align,
                va="baseline",
                parse_math=False,  # a class may be called "$100 bill"
                fontproperties=self.style.font_properties(size, bold=bold),
            )
        return float(len(broken) * line_height(style))

    def bar(self, left: float, top: float, width: float, bar: Bar) -> float:
        """Draw a colour bar with marks from its left to its right end, and return the height it takes."""
        style = self.style
        self.picture(left, top, width, style.bar, ramp(512, 4, signed=bar.signed, cmap=bar.cmap))
        letters = style.font(style.note)
        marks = list(bar.marks)
        aligned = ["left", "right"] if len(marks) == 2 else ["left", "center", "right"]
        wide = max((letters.getlength(mark) for mark in marks), default=0.0)
        if len(marks) == 3 and 2 * wide + letters.getlength(marks[1]) + style.note > width:
            del marks[1], aligned[1]  # no room for the zero in the middle
        for mark, align in zip(marks, aligned, strict=True):
            self.write(left, top + style.bar + 1, mark, width=width, size=style.note, ink=FAINT, align=align)
        return bar_height(style)

    def image(self, scale: float | None = None) -> Image.Image:
        """Render the page as an image."""
        stream = io.BytesIO()
        self._print(stream, "png", self.scale if scale is None else scale, level=0)  # read again at once
        with Image.open(stream) as drawn:
            return drawn.convert("RGB")

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write the page as .png, .svg or .pdf; the file appears complete or not at all.

        Raises:
            InputError: The suffix is another.
            StorageError: The file cannot be written.
        """
        path = Path(file)
        kind = check_format(path)
        with atomic_file(path) as draft, draft.open("wb") as stream:
            self._print(stream, kind, self.scale)
        return path

    def _repr_png_(self) -> bytes:
        """Show the page in a notebook."""
        stream = io.BytesIO()
        self._print(stream, "png", min(self.scale, 2.0))
        return stream.getvalue()

    def _print(self, stream: Any, kind: str, scale: float, level: int = PNG_LEVEL) -> None:
        from matplotlib import rc_context  # noqa: PLC0415

        with warnings.catch_warnings():
            # An empty box is drawn instead, which is enough.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            for axes in self.figure.axes:
                for image in axes.get_images():
                    # Vector files hold all pixels of a picture; in a PNG they are averaged.
                    image.set_interpolation("antialiased" if kind == "png" else "none")
            options: dict[str, Any] = {"pil_kwargs": {"compress_level": level}} if kind == "png" else {}
            with _PRINTING, rc_context(_SETTINGS):
                dpi = UNITS_PER_INCH * scale
                self.figure.savefig(stream, format=kind, dpi=dpi, metadata=_METADATA[kind], **options)


def check_format(path: Path) -> str:
    """Read the format from the suffix of a file name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise InputError(f"figures are written as .png, .svg or .pdf, and {path.name!r} ends in none of them")
    return kind


@dataclass(frozen=True)
class Bar:
    """A colour bar.

    Attributes:
        signed: Whether it is that of signed maps.
        marks: Texts at its ends, and in its middle if there are three.
        cmap: See ``Look``.
    """

    signed: bool
    marks: tuple[str, ...]
    cmap: str | None = None


def bar_height(style: PageStyle) -> float:
    """Return the height of a colour bar with its marks."""
    return style.bar + 1 + line_height(style.font(style.note))
