"""Results as a table: every metric of the protocol with its interval and ranks, and what papers print apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from vitreous.benchmark.published import published_results
from vitreous.benchmark.results import Floats, Results
from vitreous.benchmark.statistics import Estimate, estimates, ranking
from vitreous.benchmark.tables import ResultTable
from vitreous.metrics.metric import Metric


def summarise(results: Results, *, ranks: bool = True) -> ResultTable:
    """Make the table of some results.

    Args:
        results: what was measured.
        ranks: whether methods are ranked by paired tests, which takes longer.
    """
    metrics = results.protocol.metrics()
    found: list[Estimate] = []
    ranked: dict[str, dict[str, int]] = {}
    for columns, alike in groupby(metrics, key=lambda metric: metric.columns):
        # Columns of one kind after the other, so that no more are in memory; the resamples are the same for all.
        values = counted_values(results, columns)
        if not values:
            break
        together = list(alike)
        found += estimates(values, columns, together, seed=results.run.seed)
        for metric in together:
            if ranks and metric.direction is not None and len(values) > 1:
                ranked[metric.name] = ranking(values, columns, metric, seed=results.run.seed)
    return ResultTable(
        title_of(results),
        metrics,
        _by_method(found, results, metrics),
        ranked,
        published_results(results.protocol.name),
    )


def counted_values(results: Results, columns: Sequence[str]) -> dict[str, Floats]:
    """Columns of every measured method, (images, columns); NaN for images that do not count, the same for all."""
    values = results.values(columns)
    return {method: np.where(results.counted[:, None], values[method], np.nan) for method in results.measured_methods}


def title_of(results: Results) -> str:
    """What was measured on what, in a line."""
    kind, _, path = results.run.data.partition(":")
    architecture, at, weights = results.run.model.name.partition("@")
    model = f"{architecture}{at}{Path(weights).name}"  # where the file is kept says nothing about what was measured
    counted = f"{int(results.counted.sum())} {results.run.things}"
    left = "" if results.finished else f" (not finished: {len(results.images)} of {results.wanted})"
    return f"{results.run.protocol}, {model}, {kind}:{Path(path).name}, {counted}{left}"


def _by_method(found: Sequence[Estimate], results: Results, metrics: Sequence[Metric]) -> list[Estimate]:
    places = {method: place for place, method in enumerate(results.methods)}
    names = [metric.name for metric in metrics]
    return sorted(found, key=lambda one: (places[one.method], names.index(one.metric)))
