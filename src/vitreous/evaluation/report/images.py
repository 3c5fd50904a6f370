"""The best and the worst samples of every method, with their maps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitreous.api.explain import explain
from vitreous.datasets import Review
from vitreous.errors import VitreousError
from vitreous.evaluation.report.results import Results, counted_values
from vitreous.evaluation.runner.adapters import places_of, resized
from vitreous.evaluation.runner.measure import EvaluationContext, open_context
from vitreous.evaluation.store.store import Store, read_manifest
from vitreous.explanation.explanation import Explanation
from vitreous.html.page import picture
from vitreous.html.words import excerpt
from vitreous.metrics.metric import Metric
from vitreous.models.text_models import LoadedTextModel
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.captions import placeholder
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
