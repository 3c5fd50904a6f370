"""Text in pictures: the font, line breaking, class captions, and the placeholder of a map that cannot be shown."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from vitreous._utils.messages import printable

if TYPE_CHECKING:
    from vitreous.explanation.explanation import Explanation

Font = ImageFont.FreeTypeFont

INK = "#1a1a1a"
FAINT = "#5f5f5f"
NOT_SHOWN = "not shown: the scores contain NaN or infinity"
_PLACEHOLDER_MARGIN = 4


@cache
def font(size: int, *, bold: bool = False) -> Font:
    """Load the DejaVu font that comes with matplotlib: it is on every machine and covers more than Latin."""
    from matplotlib import get_data_path  # noqa: PLC0415  # slow to import, and scores can be had without pictures

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / name, size)


def wrap(text: str, style: Font, width: int, *, lines: int) -> list[str]:
    """Break a text into at most ``lines`` lines of ``width`` pixels; what does not fit ends in an ellipsis.

    Method spellings have no spaces, so a line may also end after a comma or colon, or inside a word that is too long.
    """
    wrapped = [""]
    for piece in _pieces(" ".join(printable(text).split()), style, width):
        if wrapped[-1] and style.getlength((wrapped[-1] + piece).rstrip()) > width:
            wrapped.append("")
        wrapped[-1] += piece
    if len(wrapped) > lines:
        wrapped[lines - 1 :] = ["".join(wrapped[lines - 1 :])]
    return [_shorten(line.rstrip(), style, width) for line in wrapped]


def class_caption(explanation: Explanation, index: int = 0, target_index: int = 0) -> str:
    """Name an explained class with its probability, or another target (or a regression) with its value."""
    output = explanation.format_output(explanation.class_index(index, target_index), index)
    return f"{explanation.target_name(index, target_index)} · {output}"


def draw_lines(draw: ImageDraw.ImageDraw, position: tuple[int, int], lines: list[str], style: Font, fill: str) -> None:
    """Draw lines of text below each other, starting at the top left ``position``."""
    left, top = position
    for number, line in enumerate(lines):
        draw.text((left, top + number * line_height(style)), line, fill=fill, font=style)


def line_height(style: Font) -> int:
    """Give the distance between two lines of text."""
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


def _pieces(text: str, style: Font, width: int) -> list[str]:
    """Split a text where a line may end: after spaces, commas and colons; in long words after other marks as well."""
    pieces = re.findall(r"[^\s,:]*[\s,:]+|[^\s,:]+", text)
    return [
        part
        for piece in pieces
        for part in (re.findall(r"[^=._-]*[=._-]+|[^=._-]+", piece) if style.getlength(piece) > width else [piece])
    ]


def _shorten(line: str, style: Font, width: int) -> str:
    if style.getlength(line) <= width:
        return line
    while line and style.getlength(line + "…") > width:
        line = line[:-1]
    return line + "…"
