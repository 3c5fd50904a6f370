"""The comparison figure: methods side by side, one row for each photo and class, as the papers show their maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitreous.errors import InputError
from vitreous.explanation import Explanation
from vitreous.pictures.backdrop import Backdrop, Look, Photo
from vitreous.pictures.captions import class_caption
from vitreous.pictures.figures.maps import map_tile
from vitreous.pictures.sheet import Sheet
from vitreous.pictures.tiles import SHARPNESS, Row, Tile, tiled

_TILE = 210


@dataclass(frozen=True)
class Shown:
    """One photo of a comparison: its explanation, and the photo before preprocessing where it is at hand."""

    explanation: Explanation
    index: int = 0
    photo: Photo | None = None


def comparison_figure(
    shown: Sequence[Shown], *, methods: Sequence[str] | None = None, look: Look | None = None, tile: int = _TILE
) -> Sheet:
    """Draw the photos and every method's maps of them.

    A map with NaN or infinity in it is left out, and its place says why.

    Args:
        shown: The photos with their explanations.
        methods: The methods to show, in this order; all by default.
        look: How maps are drawn.
        tile: The width of a column.
    """
    if not shown:
        raise InputError("there is nothing to compare: no photo was given")
    columns = tuple(methods or shown[0].explanation.methods)
    backdrops = [Backdrop.of(one.explanation, one.index, one.photo) for one in shown]
    rows = [
        _row(one, target, columns, whole.fitted(tile * SHARPNESS, tile * SHARPNESS * 4 // 3), look)
        for one, whole in zip(shown, backdrops, strict=True)
        for target in range(one.explanation.classes_per_image)
    ]
    kinds = sorted({shown[0].explanation.signed[method] for method in columns})
    note = " ".join(dict.fromkeys(whole.note for whole in backdrops if whole.note))
    return tiled(rows, tile=tile, headings=(backdrops[0].name, *columns), legend=kinds, note=note)


def _row(one: Shown, target: int, methods: Sequence[str], backdrop: Backdrop, look: Look | None) -> Row:
    explanation = one.explanation
    maps = [map_tile(explanation, method, (one.index, target), backdrop, look) for method in methods]
    return Row([Tile(backdrop.photo, class_caption(explanation, one.index, target)), *maps])
