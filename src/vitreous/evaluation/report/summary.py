"""Results as a table: every metric of the protocol with its interval and ranks, and what papers print apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from vitreous.evaluation.report.published import published_results
from vitreous.evaluation.report.results import Results
from vitreous.evaluation.report.tables import ResultTable
from vitreous.evaluation.statistics import Comparison, Estimate, estimates, paired, standings
from vitreous.evaluation.store.run import RunError
from vitreous.metrics.metric import Floats, Metric


def summarise(results: Results, *, ranks: bool = True, published: bool = False) -> ResultTable:
    """Make the table of some results.

    Args:
        results: what was measured.
        ranks: whether methods are ranked and compared with the best by paired tests, which takes longer.
        published: whether numbers that papers print for the protocol go with it, in a table of their own.
    """
    metrics = results.protocol.metrics()
    found: list[Estimate] = []
    ranked: dict[str, dict[str, int]] = {}
    against_best: dict[str, dict[str, Comparison]] = {}
    for columns, alike in groupby(metrics, key=lambda metric: metric.columns):
        # Columns of one kind after the other, so that no more are in memory; the resamples are the same for all.
        values = counted_values(results, columns)
        if not values:
            break
        together = list(alike)
        found += estimates(values, columns, together, seed=results.run.seed)
        for metric in together:
            if ranks and metric.direction is not None and len(values) > 1:
                found_by = standings(values, columns, metric, seed=results.run.seed)
                ranked[metric.name] = {name: one.rank for name, one in found_by.items()}
                against_best[metric.name] = {
                    name: one.against_best for name, one in found_by.items() if one.against_best is not None
                }
    return ResultTable(
        title_of(results),
        metrics,
        _by_method(found, results, metrics),
        ranked,
        against_best,
        published_results(results.protocol.name) if published else (),
    )


def compare(results: Results, first: str, second: str) -> list[Comparison]:
    """Compare two methods by every metric of the protocol, by the paired test that ranks are made of."""
    for method in (first, second):
        if method not in results.measured_methods:
            known = ", ".join(results.measured_methods)
            raise RunError(f"{method} was not measured here; what was: {known}")
    found = []
    for columns, alike in groupby(results.protocol.metrics(), key=lambda metric: metric.columns):
        values = counted_values(results, columns)
        found += [paired(values, columns, metric, first, second, seed=results.run.seed) for metric in alike]
    return found


def counted_values(results: Results, columns: Sequence[str]) -> dict[str, Floats]:
    """Columns of every measured method, (images, columns); NaN for images that do not count, the same for all."""
    values = results.values(columns)
    return {method: np.where(results.counted[:, None], values[method], np.nan) for method in results.measured_methods}


def title_of(results: Results) -> str:
    """What was measured on what, in a line."""
    kind, _, path = results.run.data.partition(":")
    architecture, at, weights = results.run.model.name.partition("@")
    model = f"{architecture}{at}{Path(weights).name}"  # where the file is kept says nothing about what was measured
    broken = f" ({results.uncounted} could not be measured)" if results.uncounted else ""
    counted = f"{int(results.counted.sum())} {results.run.things}{broken}"
    left = "" if results.finished else f" (not finished: {len(results.images)} of {results.wanted})"
    return f"{results.run.protocol}, {model}, {kind}:{Path(path).name}, {counted}{left}"


def _by_method(found: Sequence[Estimate], results: Results, metrics: Sequence[Metric]) -> list[Estimate]:
    places = {method: place for place, method in enumerate(results.methods)}
    names = [metric.name for metric in metrics]
    return sorted(found, key=lambda one: (places[one.method], names.index(one.metric)))
