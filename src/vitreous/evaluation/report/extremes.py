"""The best and the worst images of every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.report.results import Results
from vitreous.evaluation.report.summary import counted_values
from vitreous.metrics.metric import Metric


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
    """The ``count`` best and worst images of some methods, by the first metric that tells images apart."""
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
