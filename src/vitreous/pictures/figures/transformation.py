"""The transformation figure: what a block does with the tokens that its attention carries (TokenTM Figs. 1-2)."""

from __future__ import annotations

from torch import Tensor

from vitreous.pictures.backdrop import Backdrop, Look, Photo
from vitreous.pictures.captions import class_caption, font, line_height, wrap
from vitreous.pictures.data.transformation import Transformation
from vitreous.pictures.figures.maps import bar_marks
from vitreous.pictures.sheet import FAINT, Sheet
from vitreous.pictures.tiles import GAP, MARGIN, SHARPNESS, fit, note_height, write_note

_TILE = 220


def transformation_figure(
    seen: Transformation, *, photo: Photo | None = None, look: Look | None = None, tile: int = _TILE
) -> Sheet:
    """Draw attention, length, direction and all three together, each with its own scale.

    Args:
        seen: What to draw.
        photo: The photo before preprocessing; without it the picture as the model saw it is drawn on.
        look: How maps are drawn.
        tile: The width of a map.
    """
    backdrop = Backdrop.of(seen.explanation, 0, photo).fitted(tile * SHARPNESS, tile * SHARPNESS * 4 // 3)
    wide, height = fit(backdrop.photo, tile)
    panels = _panels(seen)
    title, heading = line_height(font(18, bold=True)) + 6, line_height(font(15, bold=True)) + 2
    texts = [class_caption(seen.explanation), *(meaning for _, meaning, _ in panels)]
    about = max(len(wrap(text, font(12), tile, lines=3)) for text in texts) * line_height(font(12)) + 6
    width = 2 * MARGIN + 5 * tile + 4 * GAP
    below = note_height(backdrop.note, width - 2 * MARGIN)
    sheet = Sheet(width, 2 * MARGIN + title + heading + about + height + 8 + 28 + below)
    sheet.write(MARGIN, MARGIN, f"Block {seen.block}, mean over heads", width=width - 2 * MARGIN, size=18, bold=True)
    top = MARGIN + title
    sheet.write(MARGIN, top, backdrop.name, width=tile, bold=True)
    sheet.write(MARGIN, top + heading, class_caption(seen.explanation), width=tile, size=12, ink=FAINT, lines=3)
    pictures = top + heading + about
    sheet.picture(MARGIN, pictures, wide, height, backdrop.photo)
    for number, (name, meaning, values) in enumerate(panels, start=1):
        left = MARGIN + number * (tile + GAP)
        sheet.write(left, top, name, width=tile, bold=True)
        sheet.write(left, top + heading, meaning, width=tile, size=12, ink=FAINT, lines=3)
        picture = backdrop.lay(values, seen.explanation.grid, signed=False, look=look)
        sheet.picture(left, pictures, wide, height, picture)
        sheet.bar(left, pictures + height + 8, tile, signed=False, marks=bar_marks(values, signed=False))
    write_note(sheet, backdrop.note)
    return sheet


def _panels(seen: Transformation) -> tuple[tuple[str, str, Tensor], ...]:
    return (
        ("attention", "how much the class token looks at each patch: A", seen.attention),
        ("length", "of what a patch hands on, by the patch's own: L", seen.length),
        ("direction", "how well both point the same way, 1 on average: NECC", seen.direction),
        ("combined", "the patch's real part in the class token: A · L · NECC", seen.combined),
    )
