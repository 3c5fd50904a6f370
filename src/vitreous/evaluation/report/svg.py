"""Charts of the evaluation report: lines over an axis, and a radar of methods over metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitreous.evaluation.report.curves import Curves
from vitreous.html.chart import Axis, Line, line_chart
from vitreous.html.page import macro

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
