"""The overlay figure: maps over a photo with all its pixels, each with a colour bar that tells its raw values."""

from __future__ import annotations

from collections.abc import Sequence

from vitreous.explanation import Explanation
from vitreous.pictures.backdrop import Backdrop, Look, Photo
from vitreous.pictures.captions import class_caption, font, line_height, wrap
from vitreous.pictures.figures.maps import bar_marks, map_picture
from vitreous.pictures.sheet import Sheet
from vitreous.pictures.tiles import GAP, MARGIN, note_height, write_note

_ALONE = 560
_AMONG_OTHERS = 380
_MOST_PIXELS = 4096  # across one map; a page of several such is all that fits into memory
_BAR = 28


def overlay_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
) -> Sheet:
    """Draw every method's map over a photo, one row for each explained class.

    A map with NaN or infinity in it is left out, and its place says why.

    Args:
        explanation: What to draw.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        photo: The photo before preprocessing; without it the picture as the model saw it is drawn on.
        look: How maps are drawn.
    """
    shown = tuple(methods or explanation.methods)
    backdrop = Backdrop.of(explanation, index, photo)
    width = _ALONE if len(shown) == 1 else _AMONG_OTHERS
    pixels = max(width, min(backdrop.photo.width, _MOST_PIXELS))
    if pixels != backdrop.photo.width:
        backdrop = backdrop.fitted(pixels, 3 * pixels)
    slimmer = min(1, 1.2 * backdrop.photo.width / backdrop.photo.height)  # tall photos fit on a screen too
    width = max(1, round(width * slimmer))
    height = width * backdrop.photo.height / backdrop.photo.width
    title_lines = max(len(wrap(method, font(15, bold=True), width, lines=3)) for method in shown)
    titles = title_lines * line_height(font(15, bold=True)) + 4
    caption = line_height(font(15)) + 6
    row = caption + height + 8 + _BAR + GAP
    across = len(shown) * width + (len(shown) - 1) * GAP
    sheet = Sheet(
        2 * MARGIN + across,
        2 * MARGIN + titles + explanation.classes_per_image * row - GAP + note_height(backdrop.note, across),
        scale=backdrop.photo.width / width,
    )
    for column, method in enumerate(shown):
        left = MARGIN + column * (width + GAP)
        sheet.write(left, MARGIN, method, width=width, bold=True, lines=3)
        for target in range(explanation.classes_per_image):
            top = MARGIN + titles + target * row
            if column == 0:
                sheet.write(left, top, class_caption(explanation, index, target), width=sheet.width - 2 * MARGIN)
            scores = explanation.scores_of(method, index, target)
            signed = explanation.signed[method]
            grid = explanation.grid_of(method)
            picture = map_picture(scores, grid, backdrop, signed=signed, look=look, scale=sheet.scale)
            sheet.picture(left, top + caption, width, height, picture)
            if explanation.shows(method, index, target):
                marks = bar_marks(scores, signed=signed)
                sheet.bar(left, top + caption + height + 8, width, signed=signed, marks=marks)
    write_note(sheet, backdrop.note)
    return sheet
