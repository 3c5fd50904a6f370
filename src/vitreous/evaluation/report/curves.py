"""The curves of a report: quantities over the steps of a protocol, and metrics over an option of a spelling."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.report.results import Results, counted_values
from vitreous.evaluation.statistics import Estimate
from vitreous.metrics.metric import Curve

_SWEPT = re.compile(r"(?P<before>.*)\b(?P<option>start|layer|depth)=(?P<value>\d+)(?P<after>.*)")
_SHORTEST = 3


@dataclass(frozen=True)
class Curves:
    """Lines over one axis.

    Attributes:
        title: what is drawn.
        axis: what runs from left to right.
        steps: places on that axis.
        lines: a height for every step, by the line's name.
        columns: what the heights are the means of, where they are means over images.
    """

    title: str
    axis: str
    steps: tuple[float, ...]
    lines: Mapping[str, tuple[float, ...]]
    columns: tuple[str, ...] = ()


def curves_of(results: Results) -> list[Curves]:
    """The curves that the protocol's metrics declare, averaged over images; of one title, the one with most steps."""
    longest: dict[str, Curve] = {}
    for curve in (curve for metric in results.protocol.metrics() for curve in metric.curves):
        if curve.title not in longest or len(curve.steps) > len(longest[curve.title].steps):
            longest[curve.title] = curve
    return [_averaged(results, curve) for curve in longest.values() if len(curve.steps) >= _SHORTEST]


def _averaged(results: Results, curve: Curve) -> Curves:
    lines = {}
    for method, table in counted_values(results, curve.columns).items():
        known = table[np.isfinite(table).all(axis=1)]
        if len(known):
            lines[method] = tuple(float(mean) for mean in known.mean(axis=0))
    return Curves(curve.title, curve.axis, curve.steps, lines, curve.columns)


def sweeps_of(estimates: Sequence[Estimate]) -> list[Curves]:
    """Metrics over a number in the spelling, where methods were measured for several: SkipPLUS' start layers."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for estimate in estimates:
        match = _SWEPT.fullmatch(estimate.method)
        if match is not None and np.isfinite(estimate.mean):
            name = f"{match['before']}{match['option']}=…{match['after']}"
            lines = found.setdefault((estimate.metric, match["option"]), {})
            lines.setdefault(name, {})[int(match["value"])] = estimate.mean
    sweeps = []
    for (metric, option), lines in found.items():
        steps = sorted({step for line in lines.values() for step in line})
        whole = {name: tuple(line[step] for step in steps) for name, line in lines.items() if len(line) == len(steps)}
        if len(steps) >= _SHORTEST and whole:
            sweeps.append(Curves(metric, option, tuple(map(float, steps)), whole))
    return sweeps
