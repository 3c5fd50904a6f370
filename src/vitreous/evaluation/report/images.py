"""Pictures of results: the best and worst samples of every method with their maps, and figures for print."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitreous._utils.messages import close_match
from vitreous.api.explain import explain
from vitreous.datasets import Review
from vitreous.errors import InputError, MethodError, VitreousError
from vitreous.evaluation.report.results import Results, counted_values, summarise
from vitreous.evaluation.report.svg import Curves, curves_of, shown_factor, sweeps_of
from vitreous.evaluation.report.tables import ResultTable
from vitreous.evaluation.runner.adapters import places_of, resized
from vitreous.evaluation.runner.measure import EvaluationContext, open_context
from vitreous.evaluation.store import Store, read_manifest
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import Look
from vitreous.html.page import picture
from vitreous.html.words import excerpt
from vitreous.methods import is_control
from vitreous.metrics.metric import Metric
from vitreous.models.hf_models import LoadedTextModel
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import Canvas, placeholder
from vitreous.pictures.charts import ChartLine, Panel, panels_figure
from vitreous.pictures.metric_charts import MetricValues, dots_figure, radar_figure
from vitreous.text.explain import explain_text

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
    assert not isinstance(sample, Review)
    target = sample.label if context.protocol.prompt is not None else None
    preprocessing = resized(model.preprocessing, context.protocol.resize)
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
