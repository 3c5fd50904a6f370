"""Figures of the evaluation report: charts with intervals, and the best and worst samples with their maps."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vitreous._utils.messages import close_match
from vitreous.api.explain import explain
from vitreous.datasets import Review, Sample, VolumeSample
from vitreous.errors import InputError, MethodError, VitreousError
from vitreous.evaluation.report.results import Results, counted_values, summarise
from vitreous.evaluation.report.tables import ResultTable, row_label, table_heading
from vitreous.evaluation.runner.adapters import places_of, resized
from vitreous.evaluation.runner.measure import EvaluationContext, open_context
from vitreous.evaluation.statistics import Estimate, means_interval
from vitreous.evaluation.store import Store, read_manifest
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import Look
from vitreous.html.page import Axis, Band, Line, line_chart, macro, picture
from vitreous.html.words import excerpt
from vitreous.methods import is_control
from vitreous.metrics.metric import Curve, Floats, Metric
from vitreous.models.hf_models import LoadedTextModel
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import Canvas, placeholder
from vitreous.pictures.charts import ChartLine, Panel, panels_figure
from vitreous.pictures.metric_charts import MetricValues, dots_figure, radar_figure
from vitreous.text.explain import explain_text

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


_SIDE = 300  # pixels of a photo and of its map
Thumbnails = Mapping[tuple[str, int], str]


@dataclass(frozen=True)
class Extreme:
    """An image and what a metric is on it alone."""

    index: int
    name: str
    value: float


@dataclass(frozen=True)
class Extremes:
    """The images that a method does best and worst on, by one metric."""

    method: str
    metric: Metric
    best: tuple[Extreme, ...]
    worst: tuple[Extreme, ...]


def extremes_of(results: Results, metrics: Sequence[Metric], methods: Sequence[str], count: int) -> list[Extremes]:
    """The ``count`` best and worst images of some methods, by the first metric that differs between images."""
    metric = next((metric for metric in metrics if metric.direction is not None), None)
    if metric is None or not len(results.images):
        return []
    names = results.image_names()
    values = counted_values(results, metric.columns)
    found = []
    for method in methods:
        with np.errstate(all="ignore"):  # a metric of a data set may not exist on one image
            alone = metric.combine(values[method])
        order = [int(place) for place in np.argsort(-alone if metric.direction == "higher" else alone, kind="stable")]
        known = [
            Extreme(int(results.images[place]), names[place], float(alone[place]))
            for place in order
            if np.isfinite(alone[place])
        ]
        shown = min(count, len(known) // 2)
        found.append(Extremes(method, metric, tuple(known[:shown]), tuple(known[len(known) - shown :][::-1])))
    return found


def thumbnails_of(results: Results, extremes: Iterable[Extremes]) -> tuple[Thumbnails, str | None]:
    """What is shown, as HTML by method and image, and why some or all of it is missing."""
    methods: dict[tuple[int, int], list[str]] = {}
    for each in extremes:
        for image in (*each.best, *each.worst):
            methods.setdefault((results.run_of(each.method), image.index), []).append(each.method)
    pictures: dict[tuple[str, int], str] = {}
    problem = None
    for (number, index), requested in sorted(methods.items()):  # run by run: one model is open at a time
        try:
            drawn = _draw(_opened(results.stores[number]), index, requested)
        except VitreousError as error:
            problem = str(error)
        else:
            pictures |= {(method, index): shown for method, shown in drawn.items()}
    return pictures, problem


def _opened(store: Store) -> EvaluationContext:
    """What a run is made of; a model whose name is a path lies where the run was started from."""
    folder = Path(read_manifest(store.folder).get("folder", ""))
    with ExitStack() as elsewhere:
        with suppress(OSError):  # it is gone, or somebody else's: then only a path from the root is found
            elsewhere.enter_context(chdir(folder))
        return open_context(store.run)


def _draw(context: EvaluationContext, index: int, methods: list[str]) -> dict[str, str]:
    """Explain the predicted class, or the prompt of the true one, as the protocol lets the model see the sample."""
    sample = context.data.load(index)
    model = context.classifier
    if isinstance(model, LoadedTextModel):
        assert isinstance(sample, Review)
        return _written(model, sample, methods)
    preprocessing = resized(model.preprocessing, context.protocol.resize)
    if isinstance(sample, VolumeSample):  # the slice with the highest score
        whole = explain(replace(model, preprocessing=preprocessing), [str(sample.file)], methods)
        explanation = whole.slice()
        base = BaseImage.of(explanation).fitted(_SIDE, _SIDE)
        return {method: picture(base.photo, "") + _map(base, explanation, method) for method in methods}
    assert isinstance(sample, Sample)
    target = sample.label if context.protocol.prompt is not None else None
    explanation = explain(replace(model, preprocessing=preprocessing), [sample.image], methods, target=target)
    base = BaseImage.of(explanation, 0, sample.image).with_mask(sample.mask).cropped().fitted(_SIDE, _SIDE)
    photo = picture(base.outlined(base.photo), "")  # its name stands below
    return {method: photo + _map(base, explanation, method) for method in methods}


def _map(base: BaseImage, explanation: Explanation, method: str) -> str:
    scores = explanation.scores_of(method)
    if not explanation.shows(method):
        return picture(placeholder(base.photo.size), "")
    return picture(base.lay(scores, explanation.grid_of(method), signed=explanation.signed[method]), "")


def _written(model: LoadedTextModel, sample: Review, methods: Sequence[str]) -> dict[str, str]:
    """The words around the highest one; those that people marked are underlined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about truncation, which the protocol documents
        explanation = explain_text(model, " ".join(sample.words), methods)
    marked = sample.rationale[places_of(sample, explanation.words[0])].tolist()
    return {method: excerpt(explanation, method, marked) for method in methods}


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
    """Return what charts show of a table: shares in percent, as in tables."""
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
