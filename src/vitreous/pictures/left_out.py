"""What stands in the place of a map that cannot be shown."""

from __future__ import annotations

from PIL import Image, ImageDraw

from vitreous.pictures.captions import draw_lines, font, line_height, wrap

WHY = "not shown: the scores contain NaN or infinity"
_MARGIN = 4
_INK = "#1a1a1a"


def left_out(size: tuple[int, int], letters: int = 12) -> Image.Image:
    """Draw a grey place of this width and height, which says in letters of this size why it is empty."""
    place = Image.new("RGB", size, "#f0f0f0")
    style = font(letters)
    width, height = (max(1, side - 2 * _MARGIN) for side in size)
    room = max(1, height // line_height(style))
    lines = wrap(WHY, style, width, lines=room)
    draw_lines(ImageDraw.Draw(place), (_MARGIN, _MARGIN), lines, style, _INK)
    return place
