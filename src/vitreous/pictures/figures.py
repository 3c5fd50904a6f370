"""Figures of maps: each draws what it is given and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from PIL import Image
from torch import Tensor

from vitreous.errors import InputError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import FigureOptions, Look, look_with, register_figure
from vitreous.models.pixels import Photo
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import Bar, Canvas, class_caption
from vitreous.pictures.style import PageStyle, page_style
from vitreous.pictures.tiles import MapPainter, Row, Tile, own_pixels, prepare, tiled

if TYPE_CHECKING:
    from vitreous.api.similarity import SimilarImages
    from vitreous.pictures.strips import Strip, Transformation

_OVERLAY_ALONE = 560
_OVERLAY_AMONG_OTHERS = 380
_COMPARISON_TILE = 210
_CLASSES_TILE = 230
STRIP_TILE = 170
_STRIP_COLUMNS = 7
NARROW_STRIP_COLUMNS = 4  # in a column of print
_NARROW_PANELS = 3  # whose captions are sentences
NARROW = 450  # units
_TRANSFORMATION_TILE = 220


@register_figure(Explanation, "overlay")
def overlay_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw every method's map over the photo at full resolution, with colour bars; one row per explained class.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        explanation: The explanation to draw.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How it is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import overlay_figure
        >>> overlay_figure(explanation, methods=["gae"], photo="demo.jpg", width="3.25in").save("overlay.pdf").name
        'overlay.pdf'
    """
    look = look_with(look, options)
    style = page_style(look)
    shown = tuple(methods or explanation.methods)
    columns = min(look.columns or len(shown), len(shown))
    tile = style.tile(_OVERLAY_ALONE if len(shown) == 1 else _OVERLAY_AMONG_OTHERS, columns)
    base = prepare(BaseImage.of(explanation, index, photo), look, style, tile)
    targets = range(explanation.classes_per_image)
    painter = _painter(explanation, index, shown, look, style, tile)
    rows = [
        Row([_map_tile(painter, explanation, method, (index, target), base) for method in shown],
            label=class_caption(explanation, index, target))
        for target in targets
    ]  # fmt: skip
    return tiled(
        rows,
        tile=tile,
        headings=look.labelled(shown),
        legend=painter.legend(),
        columns=columns,
        note=_joined(painter.note(), base.note),
        style=style,
        scale=own_pixels(base, tile, look),
    )


def _painter(
    explanation: Explanation, index: int, methods: Sequence[str], look: Look, style: PageStyle, tile: float
) -> MapPainter:
    maps = (
        (explanation.scores_of(method, index, target), explanation.signed[method])
        for method in methods
        for target in range(explanation.classes_per_image)
    )
    return MapPainter(look, style, tile, maps)


def _map_tile(
    painter: MapPainter, explanation: Explanation, method: str, position: tuple[int, int], base: BaseImage
) -> Tile:
    scores, grid = explanation.scores_of(method, *position), explanation.grid_of(method)
    return painter.map_tile(scores, grid, base, signed=explanation.signed[method])


def _joined(*sentences: str) -> str:
    return " ".join(dict.fromkeys(sentence for sentence in sentences if sentence))


@dataclass(frozen=True)
class Shown:
    """One image of a comparison.

    Attributes:
        explanation: Its explanation.
        index: Which image of the batch.
        photo: The photo before preprocessing, if available.
        mask: Regions whose outline is drawn, see ``Look``.

    Examples:
        >>> from vitreous.pictures import Shown, comparison_figure
        >>> canvas = comparison_figure([Shown(explanation, 0, "demo.jpg")])
    """

    explanation: Explanation
    index: int = 0
    photo: Photo | None = None
    mask: Any = None


@register_figure(Explanation, "comparison")
def _comparison_of_one(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
) -> Canvas:
    return comparison_figure([Shown(explanation, index, photo)], methods=methods, look=look)


def comparison_figure(
    shown: Sequence[Shown],
    *,
    methods: Sequence[str] | None = None,
    look: Look | None = None,
    tile: float = _COMPARISON_TILE,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw methods side by side, one row per image and explained class.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        shown: The images with their explanations.
        methods: The methods to show, in this order; all by default.
        look: How it is drawn.
        tile: Width of a column where the page has no given width, in units of 1/100 inch.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import Shown, comparison_figure
        >>> comparison_figure([Shown(explanation)], methods=["gae", "rollout"], width="6.9in").save("maps.svg").name
        'maps.svg'
    """
    if not shown:
        raise InputError("there is nothing to compare: no photo was given")
    look = look_with(look, options)
    style = page_style(look)
    methods = tuple(methods or shown[0].explanation.methods)
    columns = min(look.columns or len(methods) + 1, len(methods) + 1)
    tile = style.tile(tile, columns)
    maps = (
        (one.explanation.scores_of(method, one.index, target), one.explanation.signed[method])
        for one in shown
        for method in methods
        for target in range(one.explanation.classes_per_image)
    )
    painter = MapPainter(look, style, tile, maps)
    rows, bases = [], []
    for one in shown:
        own = look if one.mask is None else replace(look, mask=one.mask)
        base = prepare(BaseImage.of(one.explanation, one.index, one.photo), own, style, tile)
        bases.append(base)
        for target in range(one.explanation.classes_per_image):
            drawn = [_map_tile(painter, one.explanation, method, (one.index, target), base) for method in methods]
            caption = class_caption(one.explanation, one.index, target)
            rows.append(Row([Tile(_plain(base), caption), *drawn]))
    return tiled(
        rows,
        tile=tile,
        headings=(bases[0].name, *look.labelled(methods)),
        legend=painter.legend(),
        columns=columns,
        note=_joined(painter.note(), *(base.note for base in bases)),
        style=style,
    )


def _plain(base: BaseImage) -> Image.Image:
    """The photo without a map: with the outline of its mask, and dimmed where the model saw nothing."""
    if base.cropped() is base:
        return base.outlined(base.photo)
    page, rows, columns = base.dimmed(), base.frame.rows, base.frame.columns
    page.paste(base.cropped().photo, (columns.start, rows.start))
    return base.outlined(page)


@register_figure(Explanation, "classes")
def classes_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: float = _CLASSES_TILE,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw the maps of one image for several classes or other targets, one column each and one row per method.

    A contrast is drawn by the targets ``[[a, b, Contrast(a, b)]]``, prompts by several ``Prompt``. A map with NaN or
    infinity becomes a placeholder that says so.

    Args:
        explanation: An explanation of several targets.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How it is drawn.
        tile: Width of a column where the page has no given width, in units of 1/100 inch.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> import vitreous
        >>> from vitreous.pictures import classes_figure
        >>> both = vitreous.explain(model, "demo.jpg", "gae", topk=2)
        >>> canvas = classes_figure(both, photo="demo.jpg")
    """
    look = look_with(look, options)
    style = page_style(look)
    shown = tuple(methods or explanation.methods)
    targets = range(explanation.classes_per_image)
    columns = min(look.columns or len(targets) + 1, len(targets) + 1)
    tile = style.tile(tile, columns)
    base = prepare(BaseImage.of(explanation, index, photo), look, style, tile)
    painter = _painter(explanation, index, shown, look, style, tile)
    rows = []
    for method, label in zip(shown, look.labelled(shown), strict=True):
        drawn = [_map_tile(painter, explanation, method, (index, target), base) for target in targets]
        rows.append(Row([Tile(_plain(base)), *drawn], label=label))
    headings = (base.name, *(class_caption(explanation, index, target) for target in targets))
    return tiled(
        rows,
        tile=tile,
        headings=headings,
        legend=painter.legend(),
        columns=columns,
        note=_joined(painter.note(), base.note),
        style=style,
    )


def similar_figure(
    found: SimilarImages,
    query: Photo,
    *,
    methods: Sequence[str] | None = None,
    look: Look | None = None,
    tile: float = _COMPARISON_TILE,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw why an image is similar to others: maps on both sides, one row per method and neighbour.

    Args:
        found: What ``vitreous.similar`` returns.
        query: The photo whose neighbours they are.
        methods: The methods to show, in this order; all by default.
        look: How it is drawn.
        tile: Width of a column where the page has no given width, in units of 1/100 inch.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> import vitreous
        >>> from vitreous.pictures import similar_figure
        >>> found = vitreous.similar(model, "demo.jpg", ".", "gae", k=1)
        >>> canvas = similar_figure(found, "demo.jpg", width="6.9in")
    """
    look = look_with(look, options)
    style = page_style(look)
    shown = tuple(methods or found.query.methods)
    across = 2 + 2 * len(shown)
    columns = min(look.columns or across, across)
    tile = style.tile(tile, columns)
    first = prepare(BaseImage.of(found.query, 0, query), look, style, tile)
    maps = (
        (explanation.scores_of(method, *place), explanation.signed[method])
        for method in shown
        for number in range(len(found.files))
        for explanation, place in ((found.query, (0, number)), (found.neighbours, (number, 0)))
    )
    painter = MapPainter(look, style, tile, maps)
    rows = []
    for number, (file, similarity) in enumerate(zip(found.files, found.similarities, strict=True)):
        second = prepare(BaseImage.of(found.neighbours, number, file), look, style, tile)
        here = [_map_tile(painter, found.query, method, (0, number), first) for method in shown]
        there = [_map_tile(painter, found.neighbours, method, (number, 0), second) for method in shown]
        rows.append(
            Row([Tile(_plain(first)), *here, Tile(_plain(second), f"{file.name} · cosine {similarity:.2f}"), *there])
        )
    names = look.labelled(shown)
    return tiled(
        rows,
        tile=tile,
        headings=("image", *names, "similar image", *names),
        legend=painter.legend(),
        columns=columns,
        note=painter.note().replace("the class", "the similarity"),
        style=style,
    )


def strips_figure(
    strips: Sequence[Strip],
    *,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: float = STRIP_TILE,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw strips of one image below each other: maps that differ in depth, head or start layer.

    Maps of one sum, such as heads, share a scale in their strip unless ``shared_scale`` is ``False``. A map with NaN or
    infinity becomes a placeholder that says so.

    Args:
        strips: The strips to draw, see ``depth_strip``, ``heads_strip`` and ``start_layer_strip``.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How it is drawn.
        tile: Width of a map where the page has no given width, in units of 1/100 inch.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import depth_strip, strips_figure
        >>> strips = [depth_strip(model, "demo.jpg", method) for method in ("tokentm", "rollout")]
        >>> canvas = strips_figure(strips, photo="demo.jpg")
    """
    if not strips:
        raise InputError("there is no strip to draw")
    look = look_with(look, options)
    style = page_style(look)
    narrow = style.inner is not None and style.inner < NARROW
    columns = look.columns or (NARROW_STRIP_COLUMNS if narrow else _STRIP_COLUMNS)
    columns = min(columns, 1 + max(len(strip.maps) for strip in strips))
    tile = style.tile(tile, columns)
    base = prepare(BaseImage.of(strips[0].explanation, 0, photo), look, style, tile)
    rows, notes = [], []
    legend: list[Bar] = []
    together = len(strips) == 1 or look.shared_scale is True
    for strip, label in zip(strips, look.labelled([strip.method for strip in strips]), strict=True):
        maps = strip.maps if look.shared_scale is not True else [one for each in strips for one in each.maps]
        painter = MapPainter(
            look, style, tile, ((one, strip.signed) for one in maps), shared=strip.shared, bars=not together
        )
        grid = strip.explanation.grid
        drawn = [
            painter.map_tile(scores, grid, base, signed=strip.signed, caption=caption)
            for scores, caption in zip(strip.maps, strip.captions, strict=True)
        ]
        legend = painter.legend() or legend
        notes.append(painter.note())
        rows.append(Row([Tile(_plain(base), class_caption(strip.explanation)), *drawn], label=label))
    shared = any(strip.shared for strip in strips) and look.shared_scale is not False
    note = "All maps of a row share one scale." if (shared or look.shared_scale) and style.notes else ""
    return tiled(rows, tile=tile, columns=columns, legend=legend, note=_joined(note, *notes, base.note), style=style)


def transformation_figure(
    transformation: Transformation,
    *,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: float = _TRANSFORMATION_TILE,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw what a block does to its tokens, as TokenTM measures it: attention, length, direction, and their product.

    After figures 1 and 2 of [wu2024token][]. Each map has its own scale.

    Args:
        transformation: What to draw, see ``token_transformation``.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How it is drawn.
        tile: Width of a map where the page has no given width, in units of 1/100 inch.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import token_transformation, transformation_figure
        >>> canvas = transformation_figure(token_transformation(model, "demo.jpg", block=1), photo="demo.jpg")
    """
    look = look_with(look, options)
    style = page_style(look)
    explanation = transformation.explanation
    panels = _panels(transformation)
    narrow = style.inner is not None and style.inner < NARROW
    columns = min(look.columns or (_NARROW_PANELS if narrow else len(panels) + 1), len(panels) + 1)
    tile = style.tile(tile, columns)
    base = prepare(BaseImage.of(explanation, 0, photo), look, style, tile)
    # Length and direction vary around a value far from zero.
    stretched = MapPainter(replace(look, from_zero=False), style, tile)
    tiles = [
        stretched.map_tile(values, explanation.grid, base, signed=False, caption=meaning)
        for _, meaning, values in panels
    ]
    return tiled(
        [Row([Tile(_plain(base), class_caption(explanation)), *tiles])],
        tile=tile,
        headings=(base.name, *look.labelled([name for name, _, _ in panels])),
        columns=columns,
        note=base.note,
        title=f"Block {transformation.block}, mean over heads",
        style=style,
    )


def _panels(transformation: Transformation) -> tuple[tuple[str, str, Tensor], ...]:
    return (
        ("attention", "from the class token to each patch: A", transformation.attention),
        ("length", "transformed by original token norm: L", transformation.length),
        ("direction", "alignment of the two, 1 on average: NECC", transformation.direction),
        ("combined", "contribution of the patch: A · L · NECC", transformation.combined),
    )
