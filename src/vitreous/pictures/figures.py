"""Figures: each draws what it is given and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from vitreous.errors import InputError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import Look, register_figure
from vitreous.models.display_images import Photo
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import Canvas, font_properties
from vitreous.pictures.captions import FAINT, INK, class_caption, font, line_height, wrap
from vitreous.pictures.colours import line_style
from vitreous.pictures.tiles import (
    GAP,
    MARGIN,
    SHARPNESS,
    Row,
    Tile,
    bar_marks,
    fit,
    map_picture,
    map_tile,
    note_height,
    tiled,
    write_note,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitreous.pictures.curves import Curves
    from vitreous.pictures.strips import Strip, Transformation

_OVERLAY_ALONE = 560
_OVERLAY_AMONG_OTHERS = 380
_OVERLAY_MOST_PIXELS = 4096  # across one map; a page of several such is all that fits into memory
_BAR = 28
_COMPARISON_TILE = 210
_CLASSES_TILE = 230
_STRIP_TILE = 170
_STRIP_COLUMNS = 7
_TRANSFORMATION_TILE = 220


@register_figure(Explanation, "overlay")
def overlay_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
) -> Canvas:
    """Draw every method's map over the photo at full resolution, with colour bars; one row per explained class.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        explanation: The explanation to draw.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How maps are drawn.

    Examples:
        >>> from vitreous.pictures import overlay_figure
        >>> overlay_figure(explanation, methods=["gae"], photo="demo.jpg").save("overlay.png").name
        'overlay.png'
    """
    shown = tuple(methods or explanation.methods)
    base = BaseImage.of(explanation, index, photo)
    width = _OVERLAY_ALONE if len(shown) == 1 else _OVERLAY_AMONG_OTHERS
    pixels = max(width, min(base.photo.width, _OVERLAY_MOST_PIXELS))
    if pixels != base.photo.width:
        base = base.fitted(pixels, 3 * pixels)
    slimmer = min(1, 1.2 * base.photo.width / base.photo.height)  # tall photos fit on a screen too
    width = max(1, round(width * slimmer))
    height = width * base.photo.height / base.photo.width
    title_lines = max(len(wrap(method, font(15, bold=True), width, lines=3)) for method in shown)
    titles = title_lines * line_height(font(15, bold=True)) + 4
    caption = line_height(font(15)) + 6
    row = caption + height + 8 + _BAR + GAP
    across = len(shown) * width + (len(shown) - 1) * GAP
    canvas = Canvas(
        2 * MARGIN + across,
        2 * MARGIN + titles + explanation.classes_per_image * row - GAP + note_height(base.note, across),
        scale=base.photo.width / width,
    )
    for column, method in enumerate(shown):
        left = MARGIN + column * (width + GAP)
        canvas.write(left, MARGIN, method, width=width, bold=True, lines=3)
        for target in range(explanation.classes_per_image):
            top = MARGIN + titles + target * row
            if column == 0:
                canvas.write(left, top, class_caption(explanation, index, target), width=canvas.width - 2 * MARGIN)
            scores = explanation.scores_of(method, index, target)
            signed = explanation.signed[method]
            grid = explanation.grid_of(method)
            picture = map_picture(scores, grid, base, signed=signed, look=look, scale=canvas.scale)
            canvas.picture(left, top + caption, width, height, picture)
            if explanation.shows(method, index, target):
                marks = bar_marks(scores, signed=signed)
                canvas.bar(left, top + caption + height + 8, width, signed=signed, marks=marks)
    write_note(canvas, base.note)
    return canvas


@dataclass(frozen=True)
class Shown:
    """One image of a comparison.

    Attributes:
        explanation: Its explanation.
        index: Which image of the batch.
        photo: The photo before preprocessing, if available.

    Examples:
        >>> from vitreous.pictures import Shown, comparison_figure
        >>> canvas = comparison_figure([Shown(explanation, 0, "demo.jpg")])
    """

    explanation: Explanation
    index: int = 0
    photo: Photo | None = None


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
    tile: int = _COMPARISON_TILE,
) -> Canvas:
    """Draw methods side by side, one row per image and explained class.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        shown: The images with their explanations.
        methods: The methods to show, in this order; all by default.
        look: How maps are drawn.
        tile: Width of a column.

    Examples:
        >>> from vitreous.pictures import Shown, comparison_figure
        >>> comparison_figure([Shown(explanation)], methods=["gae", "rollout"]).save("comparison.svg").name
        'comparison.svg'
    """
    if not shown:
        raise InputError("there is nothing to compare: no photo was given")
    columns = tuple(methods or shown[0].explanation.methods)
    bases = [BaseImage.of(one.explanation, one.index, one.photo) for one in shown]
    rows = [
        _comparison_row(one, target, columns, _fitted(base, tile), look)
        for one, base in zip(shown, bases, strict=True)
        for target in range(one.explanation.classes_per_image)
    ]
    legend = sorted({shown[0].explanation.signed[method] for method in columns})
    note = " ".join(dict.fromkeys(base.note for base in bases if base.note))
    return tiled(rows, tile=tile, headings=(bases[0].name, *columns), legend=legend, note=note)


def _comparison_row(one: Shown, target: int, methods: Sequence[str], base: BaseImage, look: Look | None) -> Row:
    explanation = one.explanation
    maps = [map_tile(explanation, method, (one.index, target), base, look) for method in methods]
    return Row([Tile(base.photo, class_caption(explanation, one.index, target)), *maps])


@register_figure(Explanation, "classes")
def classes_figure(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: int = _CLASSES_TILE,
) -> Canvas:
    """Draw the maps of one image for several classes, one column per class and one row per method.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        explanation: An explanation of several targets.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How maps are drawn.
        tile: Width of a column.

    Examples:
        >>> import vitreous
        >>> from vitreous.pictures import classes_figure
        >>> both = vitreous.explain(model, "demo.jpg", "gae", topk=2)
        >>> canvas = classes_figure(both, photo="demo.jpg")
    """
    shown = tuple(methods or explanation.methods)
    base = _fitted(BaseImage.of(explanation, index, photo), tile)
    targets = range(explanation.classes_per_image)
    rows = []
    for method in shown:
        maps = [map_tile(explanation, method, (index, target), base, look) for target in targets]
        rows.append(Row([Tile(base.photo), *maps], label=method))
    headings = (base.name, *(class_caption(explanation, index, target) for target in targets))
    legend = sorted({explanation.signed[method] for method in shown})
    return tiled(rows, tile=tile, headings=headings, legend=legend, note=base.note)


def strips_figure(
    strips: Sequence[Strip],
    *,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: int = _STRIP_TILE,
    columns: int = _STRIP_COLUMNS,
) -> Canvas:
    """Draw strips of one image below each other: maps that differ in depth, head or start layer.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        strips: The strips to draw, see ``depth_strip``, ``heads_strip`` and ``start_layer_strip``.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How maps are drawn.
        tile: Width of a map.
        columns: How many maps fit side by side before a strip continues below.

    Examples:
        >>> from vitreous.pictures import depth_strip, strips_figure
        >>> strips = [depth_strip(model, "demo.jpg", method) for method in ("tokentm", "rollout")]
        >>> canvas = strips_figure(strips, photo="demo.jpg")
    """
    if not strips:
        raise InputError("there is no strip to draw")
    base = _fitted(BaseImage.of(strips[0].explanation, 0, photo), tile)
    rows = [_strip_row(strip, base, look) for strip in strips]
    shared = any(strip.shared for strip in strips)
    note = "All maps of a row share one scale." if shared else "Every map is scaled by itself."
    note = f"{note} {base.note}".strip()
    return tiled(rows, tile=tile, legend=sorted({strip.signed for strip in strips}), columns=columns, note=note)


def _strip_row(strip: Strip, base: BaseImage, look: Look | None) -> Row:
    grid = strip.explanation.grid
    maps = [
        Tile(map_picture(scores, grid, base, signed=strip.signed, look=look, span=strip.span), caption)
        for scores, caption in zip(strip.maps, strip.captions, strict=True)
    ]
    return Row([Tile(base.photo, class_caption(strip.explanation)), *maps], label=strip.method)


def transformation_figure(
    transformation: Transformation,
    *,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: int = _TRANSFORMATION_TILE,
) -> Canvas:
    """Draw what a block does to its tokens, as TokenTM measures it: attention, length, direction, and their product.

    After figures 1 and 2 of [wu2024token][]. Each map has its own scale.

    Args:
        transformation: What to draw, see ``token_transformation``.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How maps are drawn.
        tile: Width of a map.

    Examples:
        >>> from vitreous.pictures import token_transformation, transformation_figure
        >>> canvas = transformation_figure(token_transformation(model, "demo.jpg", block=1), photo="demo.jpg")
    """
    explanation = transformation.explanation
    base = _fitted(BaseImage.of(explanation, 0, photo), tile)
    wide, height = fit(base.photo, tile)
    panels = _panels(transformation)
    title, heading = line_height(font(18, bold=True)) + 6, line_height(font(15, bold=True)) + 2
    texts = [class_caption(explanation), *(meaning for _, meaning, _ in panels)]
    about = max(len(wrap(text, font(12), tile, lines=3)) for text in texts) * line_height(font(12)) + 6
    width = 2 * MARGIN + 5 * tile + 4 * GAP
    below = note_height(base.note, width - 2 * MARGIN)
    canvas = Canvas(width, 2 * MARGIN + title + heading + about + height + 8 + _BAR + below)
    block = f"Block {transformation.block}, mean over heads"
    canvas.write(MARGIN, MARGIN, block, width=width - 2 * MARGIN, size=18, bold=True)
    top = MARGIN + title
    canvas.write(MARGIN, top, base.name, width=tile, bold=True)
    canvas.write(MARGIN, top + heading, class_caption(explanation), width=tile, size=12, ink=FAINT, lines=3)
    pictures = top + heading + about
    canvas.picture(MARGIN, pictures, wide, height, base.photo)
    for number, (name, meaning, values) in enumerate(panels, start=1):
        left = MARGIN + number * (tile + GAP)
        canvas.write(left, top, name, width=tile, bold=True)
        canvas.write(left, top + heading, meaning, width=tile, size=12, ink=FAINT, lines=3)
        picture = base.lay(values, explanation.grid, signed=False, look=look)
        canvas.picture(left, pictures, wide, height, picture)
        canvas.bar(left, pictures + height + 8, tile, signed=False, marks=bar_marks(values, signed=False))
    write_note(canvas, base.note)
    return canvas


def _panels(transformation: Transformation) -> tuple[tuple[str, str, Tensor], ...]:
    return (
        ("attention", "from the class token to each patch: A", transformation.attention),
        ("length", "transformed by original token norm: L", transformation.length),
        ("direction", "alignment of the two, 1 on average: NECC", transformation.direction),
        ("combined", "contribution of the patch: A · L · NECC", transformation.combined),
    )


def _fitted(base: BaseImage, tile: int) -> BaseImage:
    return base.fitted(tile * SHARPNESS, tile * SHARPNESS * 4 // 3)


# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; lines differ by dashes as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1a1a1a")
_DASHES = ("-", "--", "-.", ":")
_CHART_WIDTH = 400
_CHART_HEIGHT = 270
_CHART_LEFT = 52
_CHART_GAP = 62
_CHART_TITLE = 30
_CHART_BELOW = 52
_SWATCH = 34
_BETTER = {"deletion": "low", "insertion": "high"}


def curves_figure(curves: Sequence[Curves], *, caption: str = "", what: str = "patches") -> Canvas:
    """Draw deletion curves on the left and insertion curves on the right, with the areas under them.

    Args:
        curves: One for each method, see ``perturbation_curves``.
        caption: The class whose probability they follow.
        what: What is deleted and inserted: patches or pixels.

    Examples:
        >>> from vitreous.pictures import curves_figure, perturbation_curves
        >>> curves = perturbation_curves(model, "demo.jpg", explanation, steps=2)
        >>> curves_figure(curves, caption=explanation.label()).save("curves.pdf").name
        'curves.pdf'
    """
    if not curves:
        raise InputError("there is no curve to draw")
    inner = _CHART_LEFT + 2 * _CHART_WIDTH + _CHART_GAP
    names = inner - _SWATCH - 240
    entries = [wrap(one.method, font(13), names, lines=2) for one in curves]
    heading = line_height(font(18, bold=True)) + 8 if caption else 0
    legend = sum(len(lines) for lines in entries) * line_height(font(13)) + line_height(font(13)) + 6
    height = 2 * MARGIN + heading + _CHART_TITLE + _CHART_HEIGHT + _CHART_BELOW + legend
    canvas = Canvas(2 * MARGIN + inner, height)
    if caption:
        canvas.write(MARGIN, MARGIN, caption, width=inner, size=18, bold=True)
    top = MARGIN + heading
    for number, kind in enumerate(("deletion", "insertion")):
        left = MARGIN + _CHART_LEFT + number * (_CHART_WIDTH + _CHART_GAP)
        canvas.write(left, top, f"{kind}: {_BETTER[kind]} is better", width=_CHART_WIDTH, bold=True)
        axes = canvas.axes(left, top + _CHART_TITLE, _CHART_WIDTH, _CHART_HEIGHT)
        for position, one in enumerate(curves):
            values = one.deletion if kind == "deletion" else one.insertion
            colour, dash = line_style(position, _COLOURS, _DASHES)
            axes.plot(100 * one.fractions, 100 * values, dash, color=colour, linewidth=2)
        _style_axes(axes, f"{what} {'deleted' if kind == 'deletion' else 'inserted'}, most relevant first (%)")
    _chart_legend(canvas, curves, top + _CHART_TITLE + _CHART_HEIGHT + _CHART_BELOW, names)
    return canvas


def _style_axes(axes: Axes, below: str) -> None:
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 102)
    axes.set_xlabel(below, fontproperties=font_properties(13), color=INK)
    axes.set_ylabel("probability of the class (%)", fontproperties=font_properties(13), color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e0e0e0", linewidth=0.8)
    axes.set_axisbelow(True)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font_properties(12))


def _chart_legend(canvas: Canvas, curves: Sequence[Curves], top: float, names: int) -> None:
    """Draw one line per method: a sample of its curve, its name and its areas."""
    right = MARGIN + _SWATCH + names
    step = line_height(font(13))
    canvas.write(MARGIN + _SWATCH, top, "area under the curve", width=names, size=12, ink=FAINT)
    for column, kind in enumerate(("deletion", "insertion")):
        canvas.write(right + 120 * column, top, kind, width=110, size=12, ink=FAINT, align="right")
    top += step
    for number, one in enumerate(curves):
        colour, dash = line_style(number, _COLOURS, _DASHES)
        axes = canvas.axes(MARGIN, top + 2, _SWATCH - 8, step - 4)
        axes.set_axis_off()
        axes.plot([0, 1], [0, 0], dash, color=colour, linewidth=2)
        used = canvas.write(MARGIN + _SWATCH, top, one.method, width=names, size=13, lines=2)
        for column, value in enumerate((one.deletion_area, one.insertion_area)):
            canvas.write(right + 120 * column, top, f"{100 * value:.1f}", width=110, size=13, align="right")
        top += used
