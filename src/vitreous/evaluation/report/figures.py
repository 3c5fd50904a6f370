"""Figures of results for print: dots, radar plots, curves with bands, and metrics over the start layer."""

from __future__ import annotations

from collections.abc import Sequence

from vitreous._utils.messages import close_match
from vitreous.errors import InputError, MethodError
from vitreous.evaluation.report.results import Results, summarise
from vitreous.evaluation.report.svg import Curves, curves_of, shown_factor, sweeps_of
from vitreous.evaluation.report.tables import ResultTable
from vitreous.explanation.views import Look
from vitreous.methods import is_control
from vitreous.metrics.metric import Metric
from vitreous.pictures.canvas import Canvas
from vitreous.pictures.charts import ChartLine, Panel, panels_figure
from vitreous.pictures.metric_charts import MetricValues, dots_figure, radar_figure

_BANDS = 7  # lines that have colours of their own
NAMES = ("dots", "radar", "curves", "layer-curve")


def results_figure(
    results: Results, name: str, *, methods: Sequence[str] | None, metrics: Sequence[str] | None, look: Look
) -> Canvas:
    """Draw results; see ``Results.figure``."""
    if name not in NAMES:
        raise InputError(f"results are drawn as {', '.join(NAMES)}, not as {name!r}{close_match(name, NAMES)}")
    for method in methods or ():
        if method not in results.methods:
            raise MethodError(f"{method} was not measured; measured methods are {', '.join(results.methods)}")
    if name == "curves":
        banded = methods or results.methods[:_BANDS]
        return panels_figure([_panel(curve, methods) for curve in curves_of(results, banded)], look=look)
    table = summarise(results, ranks=False)
    caption = "" if look.width is not None else table.title
    if name == "layer-curve":
        sweeps = sweeps_of(table.estimates, table.metrics)
        if not sweeps:
            raise InputError("no method was measured from several start layers, such as ixg.plus:start=0 and start=6")
        return panels_figure([_panel(sweep, None) for sweep in sweeps], caption=caption, look=look)
    draw = dots_figure if name == "dots" else radar_figure
    return draw(metric_values(table, methods, metrics), caption=caption, look=look)


def metric_values(
    table: ResultTable, methods: Sequence[str] | None = None, metrics: Sequence[str] | None = None
) -> list[MetricValues]:
    """Give what charts show of a table: shares in percent, as in tables."""
    known = [metric.name for metric in table.metrics]
    for name in metrics or ():
        if name not in known:
            raise InputError(
                f"there is no metric {name!r}{close_match(name, known) or '; there are ' + ', '.join(known)}"
            )
    chosen = [
        metric
        for metric in table.metrics
        if (metric.direction is not None if metrics is None else metric.name in metrics)
    ]
    return [_values(table, metric, methods) for metric in chosen]


def _values(table: ResultTable, metric: Metric, methods: Sequence[str] | None) -> MetricValues:
    factor = shown_factor(metric)
    shown = [method for method in table.methods if methods is None or method in methods]
    found = {method: table.estimate(method, metric.name) for method in shown}
    values = {
        method: (factor * one.mean, factor * one.low, factor * one.high)
        for method, one in found.items()
        if one is not None
    }
    return MetricValues(metric.label, metric.direction, values, frozenset(filter(is_control, shown)))


def _panel(curves: Curves, methods: Sequence[str] | None) -> Panel:
    lines = []
    for name, values in curves.lines.items():
        if methods is None or name in methods:
            low, high = curves.bands.get(name, (None, None))
            lines.append(ChartLine(name, curves.steps, values, low, high))
    axis = "start layer" if curves.axis == "start" else curves.axis
    return Panel(curves.title, axis, "", lines, whole=len(curves.steps) > 1 and curves.axis in {"start", "layer"})
