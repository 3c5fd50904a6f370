"""The canvas of a figure: laid out from the top left, written as PNG, SVG or PDF, without pyplot.

Lengths are in units of 1/100 inch, which are pixels at scale 1.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitreous._utils.storage import atomic_file
from vitreous.errors import InputError
from vitreous.pictures.captions import FAINT, INK, font, line_height, wrap
from vitreous.pictures.colours import ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

_PER_INCH = 100
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
        scale: Pixels per unit of a PNG, so that large photos can keep all their pixels.

    Examples:
        >>> canvas = explanation.figure("comparison")
        >>> canvas.save("figure.pdf").name
        'figure.pdf'
        >>> canvas.image().width == canvas.width
        True
    """

    def __init__(self, width: float, height: float, scale: float = 1.0) -> None:
        from matplotlib.figure import Figure  # noqa: PLC0415  # slow to import, and scores can be had without pictures

        self.width, self.height, self.scale = math.ceil(width), math.ceil(height), scale
        self.figure: Figure = Figure(
            figsize=(self.width / _PER_INCH, self.height / _PER_INCH), dpi=_PER_INCH, facecolor="white"
        )

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add matplotlib axes."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes: Axes = self.figure.add_axes(place)
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
        size: int = 15,
        bold: bool = False,
        ink: str = INK,
        lines: int = 1,
        align: str = "left",
    ) -> float:
        """Write a text, broken into lines, and return the height it takes.

        ``align`` places the lines at the left, center or right of the rectangle that starts at ``left``.
        """
        style = font(size, bold=bold)
        broken = wrap(text, style, int(width), lines=lines)
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
                fontproperties=font_properties(size, bold=bold),
            )
        return float(len(broken) * line_height(style))

    def bar(self, left: float, top: float, width: float, *, signed: bool, marks: tuple[str, ...]) -> float:
        """Draw a colour bar with marks from its left to its right end, and return the height it takes."""
        self.picture(left, top, width, 10, ramp(256, signed=signed))
        aligned = ("left", "right") if len(marks) == 2 else ("left", "center", "right")
        for mark, align in zip(marks, aligned, strict=True):
            self.write(left, top + 12, mark, width=width, size=12, ink=FAINT, align=align)
        return 12.0 + line_height(font(12))

    def image(self, scale: float | None = None) -> Image.Image:
        """Render the page as an image."""
        stream = io.BytesIO()
        self._print(stream, "png", self.scale if scale is None else scale)
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

    def _print(self, stream: Any, kind: str, scale: float) -> None:
        with warnings.catch_warnings():
            # An empty box is drawn instead, which is enough.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            self.figure.savefig(stream, format=kind, dpi=_PER_INCH * scale, metadata=_METADATA[kind])


def check_format(path: Path) -> str:
    """Read the format from the suffix of a file name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise InputError(f"figures are written as .png, .svg or .pdf, and {path.name!r} ends in none of them")
    return kind


def font_properties(size: float, *, bold: bool = False) -> Any:
    """Give matplotlib the font file that widths are measured with, whatever its own settings are."""
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415

    return FontProperties(fname=str(font(12, bold=bold).path), size=size * 72 / _PER_INCH)
