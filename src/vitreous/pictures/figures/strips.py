"""The strip figures: maps that differ in depth, head or start layer, one row for each method."""

from __future__ import annotations

from collections.abc import Sequence

from vitreous.errors import InputError
from vitreous.pictures.backdrop import Backdrop, Look, Photo
from vitreous.pictures.captions import class_caption
from vitreous.pictures.data.strip import Strip
from vitreous.pictures.figures.maps import map_picture
from vitreous.pictures.sheet import Sheet
from vitreous.pictures.tiles import SHARPNESS, Row, Tile, tiled

_TILE = 170
_COLUMNS = 7


def strips_figure(
    strips: Sequence[Strip],
    *,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: int = _TILE,
    columns: int = _COLUMNS,
) -> Sheet:
    """Draw strips of one photo below each other.

    A map with NaN or infinity in it is left out, and its place says why.

    Args:
        strips: What to draw.
        photo: The photo before preprocessing; without it the picture as the model saw it is drawn on.
        look: How maps are drawn.
        tile: The width of a map.
        columns: How many maps are side by side before a strip is continued below.
    """
    if not strips:
        raise InputError("there is no strip to draw")
    backdrop = Backdrop.of(strips[0].explanation, 0, photo).fitted(tile * SHARPNESS, tile * SHARPNESS * 4 // 3)
    rows = [_row(strip, backdrop, look) for strip in strips]
    shared = any(strip.shared for strip in strips)
    note = "All maps of a row share one scale." if shared else "Every map fills the colours by itself."
    note = f"{note} {backdrop.note}".strip()
    return tiled(rows, tile=tile, legend=sorted({strip.signed for strip in strips}), columns=columns, note=note)


def _row(strip: Strip, backdrop: Backdrop, look: Look | None) -> Row:
    grid = strip.explanation.grid
    maps = [
        Tile(map_picture(scores, grid, backdrop, signed=strip.signed, look=look, span=strip.span), caption)
        for scores, caption in zip(strip.maps, strip.captions, strict=True)
    ]
    return Row([Tile(backdrop.photo, class_caption(strip.explanation)), *maps], label=strip.method)
