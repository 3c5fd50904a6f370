"""All protocols together: aggregate ranks with their disagreement, the Pareto front, and how alike columns rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.report.results import Results
from vitreous.evaluation.report.tables import ResultTable
from vitreous.methods import is_control
from vitreous.metrics.metric import Floats, Metric
from vitreous.metrics.sanity import ranks, spearman

_FEWEST_METHODS = 3  # with fewer, a rank correlation is meaningless
_MISSING = "-"
EXPLAINED = (
    "Mean rank of every method over the columns of all protocols, protocols weighing the same; the disagreement is the "
    "standard deviation of its ranks over protocols. A method is on the front if no other is better both in "
    "localisation and in faithfulness, by their mean ranks."
)


@dataclass(frozen=True)
class OverallRow:
    """One method over all columns.

    Attributes:
        method: its spelling.
        rank: the mean over protocols of its mean rank over a protocol's columns; 1 is best.
        disagreement: the standard deviation over protocols of the latter.
        of_protocol: its mean rank in each protocol.
        localisation: its mean rank over protocols that measure where relevance lies; NaN without one.
        faithfulness: the same over protocols that measure what it does to the output.
        on_front: whether no other method is better in one of the two and at least as good in the other.
    """

    method: str
    rank: float
    disagreement: float
    of_protocol: Mapping[str, float]
    localisation: float
    faithfulness: float
    on_front: bool


@dataclass(frozen=True)
class Overall:
    """The methods that all protocols of one model have measured, the best first.

    Attributes:
        title: of what.
        protocols: the protocols, each once.
        rows: one for every method.
    """

    title: str
    protocols: tuple[str, ...]
    rows: tuple[OverallRow, ...]

    def grid(self) -> tuple[list[str], list[list[str]]]:
        """Headings and cells of a table."""
        headings = ["method", "mean rank", "disagreement", "localisation", "faithfulness", "front", *self.protocols]
        cells = [
            [
                row.method,
                f"{row.rank:.2f}",
                f"{row.disagreement:.2f}",
                *(
                    f"{value:.2f}" if math.isfinite(value) else _MISSING
                    for value in (row.localisation, row.faithfulness)
                ),
                "yes" if row.on_front else "",
                *(f"{row.of_protocol[protocol]:.2f}" for protocol in self.protocols),
            ]
            for row in self.rows
        ]
        return headings, cells


def overall_results(found: Iterable[tuple[Results, ResultTable]]) -> list[Overall]:
    """Aggregate the tables of several protocols, one aggregate for every model that at least two have measured.

    A method counts if all of them have measured it by all their metrics; controls and ceilings do not.
    """
    by_model: dict[tuple[str, str], list[tuple[Results, ResultTable]]] = {}
    for results, table in found:
        by_model.setdefault((results.run.model.name, results.run.weights), []).append((results, table))
    overall = []
    for (model, _), tables in by_model.items():
        columns = {f"{results.run.protocol}": _columns(table) for results, table in tables}
        columns = {name: found for name, found in columns.items() if found}
        if len(columns) < 2:
            continue
        purposes = {results.run.protocol: results.protocol.purpose for results, _ in tables}
        methods = _common(columns)
        if len(methods) > 1:
            overall.append(_aggregate(f"Overall, {model}", methods, columns, purposes))
    return overall


def _columns(table: ResultTable) -> list[dict[str, float]]:
    """For every metric with a better direction the means of all methods, turned so that higher is better."""
    return [_turned(table, metric) for metric in table.metrics if metric.direction is not None]


def _turned(table: ResultTable, metric: Metric) -> dict[str, float]:
    sign = 1.0 if metric.direction == "higher" else -1.0
    return {
        one.method: sign * one.mean
        for one in table.estimates
        if one.metric == metric.name and math.isfinite(one.mean) and not is_control(one.method)
    }


def _common(columns: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    every = [column for found in columns.values() for column in found]
    return [method for method in every[0] if all(method in column for column in every)]


def _aggregate(
    title: str,
    methods: Sequence[str],
    columns: Mapping[str, Sequence[Mapping[str, float]]],
    purposes: Mapping[str, str],
) -> Overall:
    of_protocol = {name: _mean_ranks(methods, found) for name, found in columns.items()}
    every = np.stack(list(of_protocol.values()))
    means, spread = every.mean(axis=0), every.std(axis=0)
    axes = {
        purpose: _mean_or_nan([of_protocol[name] for name in of_protocol if purposes[name] == purpose], len(methods))
        for purpose in ("localisation", "faithfulness")
    }
    front = pareto_front(-np.stack(list(axes.values()), axis=1))
    rows = [
        OverallRow(
            method,
            float(means[place]),
            float(spread[place]),
            {name: float(found[place]) for name, found in of_protocol.items()},
            float(axes["localisation"][place]),
            float(axes["faithfulness"][place]),
            bool(front[place]),
        )
        for place, method in enumerate(methods)
    ]
    return Overall(title, tuple(of_protocol), tuple(sorted(rows, key=lambda row: (row.rank, row.method))))


def _mean_ranks(methods: Sequence[str], columns: Sequence[Mapping[str, float]]) -> Floats:
    """The mean over columns of the rank of every method, 1 for the best; equal ones share their mean rank."""
    found: Floats = np.mean([ranks(np.array([-column[method] for method in methods])) for column in columns], axis=0)
    return found


def _mean_or_nan(found: Sequence[Floats], methods: int) -> Floats:
    return np.mean(found, axis=0) if found else np.full(methods, np.nan)


def pareto_front(points: Floats) -> np.typing.NDArray[np.bool_]:
    """Say which of the points (n, axes) no other one dominates; higher is better on every axis.

    Where an axis was not measured, there is no front.
    """
    if not np.isfinite(points).all():
        return np.zeros(len(points), dtype=bool)
    as_good = (points[:, None] >= points[None]).all(axis=2)
    better = (points[:, None] > points[None]).any(axis=2)
    dominated = np.asarray((as_good & better).any(axis=0))
    front: np.typing.NDArray[np.bool_] = ~dominated
    return front


def agreement_grid(table: ResultTable) -> tuple[list[str], list[list[str]]] | None:
    """Headings and cells of the rank correlations between the columns of a table; None where there is one column.

    For the protocol ``fillings`` it shows how much the ranking depends on the filling.
    """
    metrics = [metric for metric in table.metrics if metric.direction is not None]
    columns = {metric.name: _turned(table, metric) for metric in metrics}
    columns = {name: means for name, means in columns.items() if len(means) >= _FEWEST_METHODS}
    if len(columns) < 2:
        return None
    rows = [[name, *(_agreement(means, other) for other in columns.values())] for name, means in columns.items()]
    return ["", *columns], rows


def _agreement(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    both = [method for method in one if method in other]
    if len(both) < _FEWEST_METHODS:
        return _MISSING
    return f"{spearman([one[method] for method in both], [other[method] for method in both]):.2f}"
