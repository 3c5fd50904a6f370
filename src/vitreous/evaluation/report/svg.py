"""Charts of the evaluation report: curves over steps or over an option, and a radar of methods over metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.report.results import Results, counted_values
from vitreous.evaluation.statistics import Estimate
from vitreous.html.page import Axis, Line, line_chart, macro
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


_RADAR = 330
_RADIUS = 125


@dataclass(frozen=True)
class _RadarLabel:
    """The name of an axis in lines, each with its place."""

    anchor: str
    lines: list[tuple[str, str, str]]


@dataclass(frozen=True)
class _RadarShape:
    """The polygon of one method."""

    name: str
    style: str
    points: str


@dataclass(frozen=True)
class _Radar:
    """A radar chart ready for its template."""

    rings: list[str]
    spokes: list[tuple[str, str, str, str]]
    labels: list[_RadarLabel]
    shapes: list[_RadarShape]
    box: str = f"-90 0 {_RADAR + 180} {_RADAR}"


def curves_chart(curves: Curves, styles: Mapping[str, str]) -> str:
    """Draw curves as SVG.

    Args:
        curves: The curves.
        styles: The CSS class of every line; lines without one are drawn first, in the background.
    """
    heights = [height for line in curves.lines.values() for height in line if math.isfinite(height)]
    ticks = _ticks(min(heights, default=0.0), max(heights, default=1.0))
    steps = curves.steps
    lines = [
        Line(name, steps, curves.lines[name], {"class": f"line {styles.get(name, 'other')}"})
        for name in sorted(curves.lines, key=lambda name: name in styles)
    ]
    marked = steps[:: max(1, math.ceil(len(steps) / 12))]
    across = Axis(curves.axis, (steps[0], steps[-1]), marked)
    return line_chart(lines, title=curves.title, across=across, up=Axis("", (ticks[0], ticks[-1]), ticks))


def radar_chart(axes: Sequence[str], shapes: Mapping[str, Sequence[float]], styles: Mapping[str, str]) -> str:
    """Draw methods over metrics as SVG; 1 is at the rim and best, 0 is the centre."""
    centre = _RADAR / 2
    angles = [2 * math.pi * place / len(axes) - math.pi / 2 for place in range(len(axes))]

    def place(angle: float, share: float) -> tuple[str, str]:
        x, y = centre + _RADIUS * share * math.cos(angle), centre + _RADIUS * share * math.sin(angle)
        return f"{x:.1f}", f"{y:.1f}"

    def polygon(shares: Sequence[float]) -> str:
        return " ".join(",".join(place(angle, share)) for angle, share in zip(angles, shares, strict=True))

    chart = _Radar(
        rings=[polygon([ring] * len(axes)) for ring in (0.25, 0.5, 0.75, 1.0)],
        spokes=[(f"{centre:.1f}", f"{centre:.1f}", *place(angle, 1.0)) for angle in angles],
        labels=[_axis_label(angle, name, centre) for angle, name in zip(angles, axes, strict=True)],
        shapes=[_RadarShape(name, styles.get(name, "other"), polygon(shares)) for name, shares in shapes.items()],
    )
    return macro("macros.html", "radar", chart)


def _axis_label(angle: float, name: str, centre: float) -> _RadarLabel:
    """Place the name of an axis beyond its end, in lines of a few words."""
    reach = _RADIUS + 14
    x, y = centre + reach * math.cos(angle), centre + reach * math.sin(angle)
    anchor = "middle" if abs(math.cos(angle)) < 0.2 else "start" if math.cos(angle) > 0 else "end"
    lines = _wrapped(name, 20)
    top = y + 4 - (len(lines) - 1) * (12 if math.sin(angle) < -0.2 else 6 if math.sin(angle) < 0.2 else 0)
    return _RadarLabel(anchor, [(f"{x:.1f}", f"{top + 12 * row:.1f}", line) for row, line in enumerate(lines)])


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to above the highest value, about five."""
    spread = high - low or abs(high) or 1.0
    raw = spread / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]
