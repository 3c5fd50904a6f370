"""Curves: columns that hold one quantity at several steps, averaged over images for every method."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.report.results import Results
from vitreous.evaluation.report.summary import counted_values
from vitreous.evaluation.statistics import Estimate

_STEP = re.compile(r"(?P<what>\w*(?:hit|drop|probability|token_f1))_(?P<step>\d+)")
_WORDS = {"hit": "accuracy", "drop": "fall of the probability", "mif": "MIF", "lif": "LIF", "label": "true class"}
_SWEPT = re.compile(r"(?P<before>.*)\b(?P<option>start|layer|depth)=(?P<value>\d+)(?P<after>.*)")
_SHORTEST = 3
F1_CURVE = "token-F1"


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
    """The curves in some results: what the model says with more and more of a photo or text erased or kept."""
    groups: dict[str, dict[int, str]] = {}
    for column in results.run.columns:
        match = _STEP.fullmatch(column)
        if match is not None:
            groups.setdefault(match["what"], {})[int(match["step"])] = column
    return [_curve(results, what, steps) for what, steps in groups.items() if len(steps) >= _SHORTEST]


def _curve(results: Results, what: str, columns: Mapping[int, str]) -> Curves:
    steps = sorted(columns)
    ordered = tuple(columns[step] for step in steps)
    values = counted_values(results, ordered)
    lines = {}
    for method, table in values.items():
        known = table[np.isfinite(table).all(axis=1)]
        if len(known):
            lines[method] = tuple(float(mean) for mean in known.mean(axis=0))
    words = [_WORDS.get(word, word) for word in what.split("_") if word]
    title = F1_CURVE if what == "token_f1" else ", ".join(words)
    return Curves(title, _axis(what), tuple(map(float, steps)), lines, ordered)


def _axis(what: str) -> str:
    if what == "token_f1":
        return "words taken, the highest first"
    return "share kept (%)" if "insertion" in what else "share erased (%)"


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
