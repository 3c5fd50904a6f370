"""Charts of an evaluation: dots with intervals and radar plots; each draws what it is given and computes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import numpy as np

from vitreous.errors import InputError
from vitreous.explanation.views import FigureOptions, Look, look_with
from vitreous.pictures.canvas import FAINT, INK, Canvas, line_height, wrap
from vitreous.pictures.charts import COLOURS, CONTROL, DASHES, GRID, Legend, heading_height, plain_axes
from vitreous.pictures.style import PageStyle, line_style, page_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POLYGONS = 8
_FEWEST_AXES = 3


@dataclass(frozen=True)
class MetricValues:
    """What an evaluation found by one metric.

    Attributes:
        name: Heading of the metric, with its unit.
        direction: ``higher`` or ``lower``, whichever is better; ``None`` where neither is.
        values: By method, the mean and the ends of its interval, which may be NaN.
        controls: Methods that explain nothing, such as ``random``.

    Examples:
        >>> from vitreous.pictures import MetricValues, dots_figure
        >>> metric = MetricValues("mIoU (%)", "higher", {"gae": (31.0, 29.5, 32.4), "ixg": (24.0, 23.0, 25.1)})
        >>> dots_figure([metric], width="3.25in").save("dots.pdf").name
        'dots.pdf'
    """

    name: str
    direction: str | None
    values: Mapping[str, tuple[float, float, float]]
    controls: frozenset[str] = field(default_factory=frozenset)

    @property
    def heading(self) -> str:
        """The name with an arrow to where it is better."""
        return f"{self.name} {'' if self.direction is None else '↑' if self.direction == 'higher' else '↓'}".rstrip()

    def merit(self, method: str) -> float:
        """The mean, turned so that higher is better; NaN where it was not measured."""
        mean = self.values.get(method, (math.nan,))[0]
        return -mean if self.direction == "lower" else mean


def _ordered(metrics: Sequence[MetricValues]) -> list[str]:
    """All methods from the best mean rank to the worst; controls at the end."""
    controls = frozenset().union(*(metric.controls for metric in metrics))
    methods = list(dict.fromkeys(method for metric in metrics for method in metric.values))
    ranks: dict[str, list[float]] = {method: [] for method in methods}
    for metric in metrics:
        merits = {method: metric.merit(method) for method in methods}
        known = sorted((method for method in methods if math.isfinite(merits[method])), key=lambda one: -merits[one])
        for place, method in enumerate(known):
            ranks[method].append(place)
    mean = {method: float(np.mean(found)) if found else math.inf for method, found in ranks.items()}
    return sorted(methods, key=lambda method: (method in controls, mean[method]))


def dots_figure(
    metrics: Sequence[MetricValues],
    *,
    caption: str = "",
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw the mean of every method with its interval, one panel per metric; ``random`` is a line through all.

    Methods stand in one order in all panels, the best mean rank first; controls are below and grey.

    Args:
        metrics: What was measured; ``Results.figure("dots")`` reads it from an evaluation.
        caption: Heading of the page.
        look: How the page is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import MetricValues, dots_figure
        >>> canvas = dots_figure([MetricValues("AOPC", "higher", {"gae": (0.4, 0.3, 0.5), "random": (0.1, 0.0, 0.2)})])
    """
    if not metrics or not any(metric.values for metric in metrics):
        raise InputError("there is no metric to draw")
    look = look_with(look, options)
    style = page_style(look)
    methods = _ordered(metrics)
    names = dict(zip(methods, look.labelled(methods), strict=True))
    columns = min(look.columns or (2 if style.inner and style.inner < 450 else 4), len(metrics))
    letters = style.font(style.caption)
    inner = style.inner or 240 + columns * 200
    labels = min(0.4 * inner, max(letters.getlength(name) for name in names.values()) + 0.6 * style.caption)
    gap = 1.4 * style.caption
    width = (inner - labels - (columns - 1) * gap) / columns
    row = 1.55 * style.caption
    height = row * len(methods)
    titles = [wrap(metric.heading, style.font(style.label, bold=True), int(width), lines=3) for metric in metrics]
    title = max(map(len, titles)) * line_height(style.font(style.label, bold=True)) + 0.3 * style.label
    below = 1.9 * style.caption
    heading = heading_height(caption, style, inner)
    bands = math.ceil(len(metrics) / columns)
    canvas = Canvas(
        inner + 2 * style.margin, 2 * style.margin + heading + bands * (title + height + below), style=style
    )
    if caption:
        canvas.write(style.margin, style.margin, caption, width=inner, size=style.title, bold=True, lines=2)
    for number, metric in enumerate(metrics):
        band, column = divmod(number, columns)
        top = style.margin + heading + band * (title + height + below)
        left = style.margin + labels + column * (width + gap)
        if column == 0:
            for place, method in enumerate(methods):
                ink = FAINT if method in metric.controls else INK
                at = top + title + place * row + (row - 1.25 * style.caption) / 2
                canvas.write(
                    style.margin, at, names[method], width=labels - 0.5 * style.caption, ink=ink, size=style.caption
                )
        written = len(titles[number]) * line_height(style.font(style.label, bold=True))
        canvas.write(
            left,
            top + title - written - 0.3 * style.label,
            metric.heading,
            width=width,
            size=style.label,
            bold=True,
            lines=3,
        )
        _draw_dots(canvas.axes(left, top + title, width, height), metric, methods, style)
    return canvas


def _draw_dots(axes: Axes, metric: MetricValues, methods: Sequence[str], style: PageStyle) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    if "random" in metric.values:
        axes.axvline(metric.values["random"][0], color=CONTROL, linewidth=0.6 * style.line, linestyle="--", zorder=1)
    best = max((metric.merit(method) for method in metric.values if method not in metric.controls), default=math.nan)
    for place, method in enumerate(methods):
        mean, low, high = metric.values.get(method, (math.nan,) * 3)
        colour = CONTROL if method in metric.controls else COLOURS[0]
        if metric.direction is not None and metric.merit(method) == best:
            colour = COLOURS[1]
        if math.isfinite(low) and math.isfinite(high):
            axes.plot([low, high], [place, place], color=colour, linewidth=0.8 * style.line, zorder=2)
        axes.plot([mean], [place], "o", color=colour, markersize=2.6 * style.line, markeredgewidth=0, zorder=3)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    plain_axes(axes, style)
    axes.set_yticks(range(len(methods)), labels=[""] * len(methods))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(x=0.06)
    for label in axes.get_xticklabels():
        label.set_fontproperties(style.font_properties(style.note))


def radar_figure(
    metrics: Sequence[MetricValues],
    *,
    caption: str = "",
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw methods as polygons over the metrics of an evaluation: the rim is the best mean, the centre ``random``.

    Where ``random`` was not measured, or is better than a method, the centre is the worst mean. Controls are left out.

    Args:
        metrics: At least three that have a better direction; ``Results.figure("radar")`` reads them from an evaluation.
        caption: Heading of the page.
        look: How the page is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import MetricValues, radar_figure
        >>> values = {"gae": (0.4, 0.3, 0.5), "ixg": (0.1, 0.0, 0.2)}
        >>> canvas = radar_figure([MetricValues(name, "higher", values) for name in ("one", "two", "three")])
    """
    axes_of = [metric for metric in metrics if metric.direction is not None]
    if len(axes_of) < _FEWEST_AXES:
        raise InputError(f"a radar plot needs at least three metrics that have a better direction, not {len(axes_of)}")
    look = look_with(look, options)
    style = page_style(look)
    controls = frozenset().union(*(metric.controls for metric in axes_of))
    measured = [
        method
        for method in _ordered(axes_of)
        if method not in controls and all(math.isfinite(metric.merit(method)) for metric in axes_of)
    ]
    if not measured:
        raise InputError("no method was measured by all of these metrics")
    methods = measured[:_MOST_POLYGONS]
    names = dict(zip(methods, look.labelled(methods), strict=True))
    inner = style.inner or 560
    side = 0.62 * inner
    around = 3.4 * line_height(style.font(style.note))
    legend = Legend(names, {}, (), style, inner)
    heading = heading_height(caption, style, inner)
    note = f"The best {_MOST_POLYGONS} of {len(measured)} methods." if len(measured) > len(methods) else ""
    below = line_height(style.font(style.note)) if note else 0
    canvas = Canvas(
        inner + 2 * style.margin, 2 * style.margin + heading + side + 2 * around + legend.height + below, style=style
    )
    if caption:
        canvas.write(style.margin, style.margin, caption, width=inner, size=style.title, bold=True, lines=2)
    left, top = style.margin + (inner - side) / 2, style.margin + heading + around
    _draw_radar(canvas.axes(left, top, side, side, projection="polar"), axes_of, methods, style)
    _name_spokes(canvas, axes_of, (left + side / 2, top + side / 2), side / 2, methods)
    legend.draw(canvas, canvas.height - style.margin - legend.height - below)
    if note:
        at = canvas.height - style.margin - below
        canvas.write(style.margin, at, note, width=inner, size=style.note, ink=FAINT)
    return canvas


def _ends(metric: MetricValues, methods: Sequence[str]) -> tuple[float, float]:
    """The merit at the centre and at the rim."""
    merits = [metric.merit(method) for method in methods]
    random = metric.merit("random")
    worst, best = min(merits), max(merits)
    return (min(worst, random)), best


def _draw_radar(axes: Axes, metrics: Sequence[MetricValues], methods: Sequence[str], style: PageStyle) -> None:
    angles = [math.pi / 2 - 2 * math.pi * number / len(metrics) for number in range(len(metrics))]
    for number, method in enumerate(methods):
        colour, dash = line_style(number, COLOURS, DASHES)
        radii = []
        for metric in metrics:
            centre, rim = _ends(metric, methods)
            radii.append(1.0 if rim == centre else (metric.merit(method) - centre) / (rim - centre))
        closed = [*radii, radii[0]]
        axes.plot([*angles, angles[0]], closed, dash, color=colour, linewidth=style.line)
        axes.fill([*angles, angles[0]], closed, color=colour, alpha=0.06, linewidth=0)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0.25, 0.5, 0.75, 1.0], labels=[""] * 4)
    axes.set_xticks([angle % (2 * math.pi) for angle in angles], labels=[""] * len(angles))
    axes.grid(color=GRID, linewidth=0.5 * style.line)
    axes.set_axisbelow(True)
    axes.spines["polar"].set_color(GRID)
    axes.set_facecolor("white")


def _name_spokes(
    canvas: Canvas, metrics: Sequence[MetricValues], middle: tuple[float, float], radius: float, methods: Sequence[str]
) -> None:
    """Write the name of every metric at the end of its spoke, and the values at the centre and the rim below it."""
    style = canvas.style
    letters = style.font(style.note)
    step = line_height(letters)
    for number, metric in enumerate(metrics):
        angle = math.pi / 2 - 2 * math.pi * number / len(metrics)
        across, up = math.cos(angle), math.sin(angle)
        align = "center" if abs(across) < 0.35 else "left" if across > 0 else "right"
        x, y = middle[0] + (radius + 0.5 * style.note) * across, middle[1] - (radius + 0.5 * style.note) * up
        room = {
            "center": canvas.width - 2 * style.margin,
            "left": canvas.width - style.margin - x,
            "right": x - style.margin,
        }[align]
        left = {"center": style.margin, "left": x, "right": x - room}[align]
        ends = [-value if metric.direction == "lower" else value for value in _ends(metric, methods)]
        lines = [*wrap(metric.heading, letters, int(room), lines=2), f"{ends[0]:.3g} to {ends[1]:.3g}"]
        top = y - len(lines) * step * (1 if up > 0.35 else 0 if up < -0.35 else 0.5)
        for place, line in enumerate(lines):
            ink = FAINT if place == len(lines) - 1 else INK
            canvas.write(left, top + place * step, line, width=room, size=style.note, ink=ink, align=align)
