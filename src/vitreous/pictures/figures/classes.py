"""The class figure: maps of one photo for several classes, side by side, so that one sees whether they differ."""

from __future__ import annotations

from collections.abc import Sequence

from vitreous.explanation import Explanation
from vitreous.pictures.backdrop import Backdrop, Look, Photo
from vitreous.pictures.captions import class_caption
from vitreous.pictures.figures.maps import map_tile
from vitreous.pictures.sheet import Sheet
from vitreous.pictures.tiles import SHARPNESS, Row, Tile, tiled

_TILE = 230


def classes_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: int = _TILE,
) -> Sheet:
    """Draw a column for each explained class and a row for each method.

    A map with NaN or infinity in it is left out, and its place says why.

    Args:
        explanation: What to draw, made with several targets.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        photo: The photo before preprocessing; without it the picture as the model saw it is drawn on.
        look: How maps are drawn.
        tile: The width of a column.
    """
    shown = tuple(methods or explanation.methods)
    backdrop = Backdrop.of(explanation, index, photo).fitted(tile * SHARPNESS, tile * SHARPNESS * 4 // 3)
    targets = range(explanation.classes_per_image)
    rows = []
    for method in shown:
        maps = [map_tile(explanation, method, (index, target), backdrop, look) for target in targets]
        rows.append(Row([Tile(backdrop.photo), *maps], label=method))
    headings = (backdrop.name, *(class_caption(explanation, index, target) for target in targets))
    legend = sorted({explanation.signed[method] for method in shown})
    return tiled(rows, tile=tile, headings=headings, legend=legend, note=backdrop.note)
