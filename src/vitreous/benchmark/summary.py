"""Results as a table: every metric of the protocol with its interval and ranks, and what papers print apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitreous.benchmark.published import published_results
from vitreous.benchmark.results import Floats, Results
from vitreous.benchmark.statistics import Estimate, estimates, ranking
from vitreous.benchmark.tables import ResultTable
from vitreous.metrics.metric import Metric
from vitreous.protocols import Protocol, find_protocol


def summarise(results: Results, *, protocol: Protocol | None = None, ranks: bool = True) -> ResultTable:
    """Make the table of some results.

    Args:
        results: what was measured.
        protocol: how, where it is not one of those that have a name here.
        ranks: whether methods are ranked by paired tests, which takes longer.
    """
    measured = protocol or find_protocol(results.run.protocol)
    found: list[Estimate] = []
    ranked: dict[str, dict[str, int]] = {}
    for metric in measured.metrics():
        values = counted_values(results, metric.columns)
        if not values:
            break
        # One metric after the other, so that only its own columns are in memory; the resamples are the same for all.
        found += estimates(values, metric.columns, [metric], seed=results.run.seed)
        if ranks and metric.direction is not None and len(values) > 1:
            ranked[metric.name] = ranking(values, metric.columns, metric, seed=results.run.seed)
    return ResultTable(
        title_of(results),
        measured.metrics(),
        _by_method(found, results, measured.metrics()),
        ranked,
        published_results(measured.name),
    )


def counted_values(results: Results, columns: Sequence[str]) -> dict[str, Floats]:
    """Columns of every measured method, (images, columns); NaN for images that do not count, the same for all."""
    values = results.values(columns)
    return {method: np.where(results.counted[:, None], values[method], np.nan) for method in results.measured_methods}


def title_of(results: Results) -> str:
    """What was measured on what, in a line."""
    run = results.run
    return f"{run.protocol}, {run.model.name}, {run.data}, {int(results.counted.sum())} images"


def _by_method(found: Sequence[Estimate], results: Results, metrics: Sequence[Metric]) -> list[Estimate]:
    places = {method: place for place, method in enumerate(results.methods)}
    names = [metric.name for metric in metrics]
    return sorted(found, key=lambda one: (places[one.method], names.index(one.metric)))
