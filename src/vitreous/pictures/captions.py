"""Text in pictures: line breaking, class captions, and the placeholder of a map that cannot be shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from vitreous._utils.messages import printable
from vitreous.pictures.style import Font, font

if TYPE_CHECKING:
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
