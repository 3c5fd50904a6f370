"""Charts of the evaluation report: curves over steps or over an option, and dots with intervals for every metric."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitreous.evaluation.report.results import Results, counted_values
from vitreous.evaluation.report.tables import ResultTable, row_label, table_heading
from vitreous.evaluation.statistics import Estimate, means_interval
from vitreous.html.page import Axis, Band, Line, line_chart, macro
from vitreous.metrics.metric import Curve, Floats, Metric

_SWEPT = re.compile(r"(?P<before>.*)\b(?P<option>start|layer|depth)=(?P<value>\d+)(?P<after>.*)")
_SHORTEST = 3
_PERCENT = 100.0
_RANDOM = "random"  # the control that every curve is read against


@dataclass(frozen=True)
class Curves:
    """Lines over one axis.

    Attributes:
        title: what is drawn.
        axis: what runs from left to right.
        steps: places on that axis.
        lines: a height for every step, by the line's name.
        columns: what the heights are the means of, where they are means over images.
        bands: by the line's name, the lower and the upper bound of its 95% bootstrap interval at every step.
    """

    title: str
    axis: str
    steps: tuple[float, ...]
    lines: Mapping[str, tuple[float, ...]]
    columns: tuple[str, ...] = ()
    bands: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)


def curves_of(results: Results, banded: Collection[str] = (), *, percent: bool = True) -> list[Curves]:
    """The curves that the protocol's metrics declare, averaged over images; of one title, the one with most steps.

    Args:
        results: what was measured.
        banded: the methods whose lines have bands, besides ``random``.
        percent: whether shares of 0..1 are in percent, as in tables.
    """
    longest: dict[str, tuple[Curve, Metric]] = {}
    for metric in results.protocol.metrics():
        for curve in metric.curves:
            if curve.title not in longest or len(curve.steps) > len(longest[curve.title][0].steps):
                longest[curve.title] = curve, metric
    return [
        _averaged(results, curve, metric if percent else None, banded)
        for curve, metric in longest.values()
        if len(curve.steps) >= _SHORTEST
    ]


def _averaged(results: Results, curve: Curve, metric: Metric | None, banded: Collection[str]) -> Curves:
    values = counted_values(results, curve.columns)
    factor = 1.0 if metric is None else _curve_factor(metric, values.values())
    title = f"{curve.title} (%)" if factor != 1 and "%" not in curve.title else curve.title
    lines, bands = {}, {}
    for method, table in values.items():
        known = factor * table[np.isfinite(table).all(axis=1)]
        if len(known):
            lines[method] = tuple(float(mean) for mean in known.mean(axis=0))
        if (method == _RANDOM or method in banded) and len(known) > 1:
            bounds = means_interval(known, seed=results.run.seed)
            bands[method] = tuple(bounds[0].tolist()), tuple(bounds[1].tolist())
    return Curves(title, curve.axis, curve.steps, lines, curve.columns, bands)


def _curve_factor(metric: Metric, tables: Iterable[Floats]) -> float:
    """Accuracies, probabilities and their differences are in percent where the metric made of them is."""
    if shown_factor(metric) == 1 and not metric.in_percent:
        return 1.0
    with np.errstate(invalid="ignore"):
        shares = all(not (np.abs(table) > 1).any() for table in tables)
    return _PERCENT if shares else 1.0


def shown_factor(metric: Metric) -> float:
    """What a metric's values are multiplied by where they are shown: shares of 0..1 are in percent."""
    return _PERCENT if metric.label != metric.name else 1.0


def sweeps_of(estimates: Sequence[Estimate], metrics: Sequence[Metric] = ()) -> list[Curves]:
    """Metrics over a number in the spelling, where methods were measured for several: SkipPLUS' start layers.

    Those of ``metrics`` that are shares of 0..1 are in percent, as in tables.
    """
    shown = {metric.name: metric for metric in metrics}
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for estimate in estimates:
        match = _SWEPT.fullmatch(estimate.method)
        if match is not None and np.isfinite(estimate.mean):
            others = f"{match['before']}{match['after']}".replace(":,", ":").replace(",,", ",").rstrip(":,")
            name = f"{others}, {match['option']} varies"
            lines = found.setdefault((estimate.metric, match["option"]), {})
            factor = shown_factor(shown[estimate.metric]) if estimate.metric in shown else 1.0
            lines.setdefault(name, {})[int(match["value"])] = factor * estimate.mean
    sweeps = []
    for (metric, option), lines in found.items():
        steps = sorted({step for line in lines.values() for step in line})
        whole = {name: tuple(line[step] for step in steps) for name, line in lines.items() if len(line) == len(steps)}
        if len(steps) >= _SHORTEST and whole:
            sweeps.append(
                Curves(shown[metric].label if metric in shown else metric, option, tuple(map(float, steps)), whole)
            )
    return sweeps


_ROW = 19  # pixels of one method
_LABELS = 210
_PLOT = 300
_TOP, _BOTTOM, _RIGHT = 8, 26, 64


@dataclass(frozen=True)
class _Dot:
    """One row of a chart of dots: the method, its mean and the interval, as coordinates."""

    name: str
    style: str
    y: str
    x: str | None
    low: str | None
    high: str | None
    text: str


@dataclass(frozen=True)
class _Dots:
    """A chart of dots ready for its template."""

    title: str
    rows: list[_Dot]
    ticks: list[tuple[str, str]]
    reference: str | None
    top: str
    bottom: str
    below: str
    labels: str = str(_LABELS - 8)
    width: int = _LABELS + _PLOT + _RIGHT
    height: int = 0


def dots_chart(table: ResultTable, metric: Metric, styles: Mapping[str, str]) -> str:
    """Draw the mean of every row of a table by one metric with its interval as SVG; random is a line through all.

    Rows stand from the best mean to the worst, whatever they are; one without a mean keeps its place at the end.

    Args:
        table: The results.
        metric: The metric.
        styles: The CSS class of every row.
    """
    found = {method: table.estimate(method, metric.name) for method in table.methods}
    known = {method: one for method, one in found.items() if one is not None and math.isfinite(one.mean)}
    bounds = [value for one in known.values() for value in (one.mean, one.low, one.high) if math.isfinite(value)]
    ticks = _ticks(min(bounds, default=0.0), max(bounds, default=1.0))
    sign = -1.0 if metric.direction == "higher" else 1.0
    order = sorted(known, key=lambda method: sign * known[method].mean)
    order += [method for method in table.methods if method not in known]

    def place(value: float) -> str | None:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return f"{_LABELS + _PLOT * share:.1f}" if math.isfinite(value) else None

    rows = []
    for number, method in enumerate(order):
        one = known.get(method)
        mean, low, high = (math.nan,) * 3 if one is None else (one.mean, one.low, one.high)
        text = "not measured" if one is None else metric.format(mean)
        y = f"{_TOP + _ROW * (number + 0.5):.1f}"
        rows.append(_Dot(row_label(method), styles.get(method, "other"), y, place(mean), place(low), place(high), text))
    bottom = _TOP + _ROW * len(order)
    random = known.get(_RANDOM)
    chart = _Dots(
        title=table_heading(metric),
        rows=rows,
        ticks=[(place(tick) or "", metric.format(tick)) for tick in ticks],
        reference=None if random is None else place(random.mean),
        top=str(_TOP),
        bottom=str(bottom),
        below=str(bottom + 15),
        height=bottom + _BOTTOM,
    )
    return macro("macros.html", "dots", chart)


def curves_chart(curves: Curves, styles: Mapping[str, str]) -> str:
    """Draw curves as SVG.

    Args:
        curves: The curves.
        styles: The CSS class of every line; lines without one are drawn first, in the background.
    """
    drawn = [*curves.lines.values(), *(bound for bounds in curves.bands.values() for bound in bounds)]
    heights = [height for line in drawn for height in line if math.isfinite(height)]
    ticks = _ticks(min(heights, default=0.0), max(heights, default=1.0))
    steps = curves.steps
    lines = [
        Line(name, steps, curves.lines[name], {"class": f"line {styles.get(name, 'other')}"})
        for name in sorted(curves.lines, key=lambda name: name in styles)
    ]
    marked = steps[:: max(1, math.ceil(len(steps) / 12))]
    across = Axis(curves.axis, (steps[0], steps[-1]), marked)
    bands = [
        Band(f"{name}, 95% interval", steps, low, high, {"class": f"band {styles.get(name, 'other')}"})
        for name, (low, high) in curves.bands.items()
    ]
    up = Axis("", (ticks[0], ticks[-1]), ticks)
    return line_chart(lines, title=curves.title, across=across, up=up, bands=bands)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to above the highest value, about five."""
    spread = high - low or abs(high) or 1.0
    raw = spread / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]
