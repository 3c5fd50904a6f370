"""The charts of the report: curves over steps, metrics over an option, and a radar of methods over metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.report.results import Results, counted_values
from vitreous.evaluation.statistics import Estimate
from vitreous.html.chart import Axis, Line, line_chart
from vitreous.html.page import escape
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


def curves_chart(curves: Curves, styles: Mapping[str, str]) -> str:
    """Draw curves.

    Args:
        curves: what to draw.
        styles: the CSS class of every line; lines without one are drawn first, in the background.
    """
    heights = [height for line in curves.lines.values() for height in line if math.isfinite(height)]
    ticks = _ticks(min(heights, default=0.0), max(heights, default=1.0))
    steps = curves.steps
    lines = [
        Line(name, steps, curves.lines[name], f'class="line {styles.get(name, "other")}"')
        for name in sorted(curves.lines, key=lambda name: name in styles)
    ]
    marked = steps[:: max(1, math.ceil(len(steps) / 12))]
    across = Axis(curves.axis, (steps[0], steps[-1]), marked)
    return line_chart(lines, title=curves.title, across=across, up=Axis("", (ticks[0], ticks[-1]), ticks))


def radar_chart(axes: Sequence[str], shapes: Mapping[str, Sequence[float]], styles: Mapping[str, str]) -> str:
    """Draw methods over metrics; 1 is outward and best, 0 the centre."""
    centre = _RADAR / 2
    angles = [2 * math.pi * place / len(axes) - math.pi / 2 for place in range(len(axes))]

    def place(angle: float, share: float) -> tuple[float, float]:
        return centre + _RADIUS * share * math.cos(angle), centre + _RADIUS * share * math.sin(angle)

    def polygon(style: str, shares: Sequence[float], name: str) -> str:
        ends = (place(angle, share) for angle, share in zip(angles, shares, strict=True))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        return f'<polygon class="{style}" points="{points}"><title>{escape(name)}</title></polygon>'

    box = f"-90 0 {_RADAR + 180} {_RADAR}"
    parts = [
        f'<svg viewBox="{box}" role="img" aria-label="radar chart of methods over metrics">',
        *(polygon("gridline", [ring] * len(axes), "") for ring in (0.25, 0.5, 0.75, 1.0)),
        *(_rule(centre, centre, *place(angle, 1.0)) for angle in angles),
        *(_axis_label(angle, name, centre) for angle, name in zip(angles, axes, strict=True)),
        *(polygon(f"shape {styles.get(name, 'other')}", shares, name) for name, shares in shapes.items()),
    ]
    return "".join(parts) + "</svg>"


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="gridline" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _axis_label(angle: float, name: str, centre: float) -> str:
    """Write the name of an axis beyond its end, in lines of a few words."""
    reach = _RADIUS + 14
    x, y = centre + reach * math.cos(angle), centre + reach * math.sin(angle)
    anchor = "middle" if abs(math.cos(angle)) < 0.2 else "start" if math.cos(angle) > 0 else "end"
    lines = _wrapped(name, 20)
    top = y + 4 - (len(lines) - 1) * (12 if math.sin(angle) < -0.2 else 6 if math.sin(angle) < 0.2 else 0)
    spans = "".join(
        f'<tspan x="{x:.1f}" y="{top + 12 * row:.1f}">{escape(line)}</tspan>' for row, line in enumerate(lines)
    )
    return f'<text text-anchor="{anchor}">{spans}</text>'


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


# Told apart by people who do not see all colours, on white and on black.
LINES = 8

STYLE = """
:root { --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0478b; --c4: #8a6d00; --c5: #2d95c9; --c6: #7a4fd0;
  --c7: #6e6e6e; }
@media (prefers-color-scheme: dark) { :root { --c0: #4aa8e0; --c1: #ff8a3c; --c2: #2fd0a0; --c3: #ee86c4; --c4: #e0c040;
  --c5: #8cd3f7; --c6: #b497ff; --c7: #b5b5b5; } }
body { padding: 1.2rem clamp(0.8rem, 3vw, 2.5rem) 4rem; max-width: 84rem; }
h2 { font-size: 1.35rem; margin: 2.6rem 0 0.4rem; padding-top: 1rem; border-top: 2px solid var(--line); }
p { max-width: 70ch; }
.faint, figcaption, .interval { color: var(--faint); font-size: 0.86rem; }
table { font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; min-width: 6.5rem; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
td:first-child, code { font-family: ui-monospace, monospace; font-size: 0.86rem; }
table.published td, table.published th { text-align: left; color: var(--faint); }
td .interval { display: block; }
td .mean { font-weight: 400; } td.best .mean { font-weight: 700; }
td.best .mean::before { content: "★ "; color: var(--c4); }
.rank { color: var(--faint); font-size: 0.8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem; font-size: 0.92rem; margin: 0.6rem 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); gap: 1rem; }
.charts.wide { grid-template-columns: minmax(0, 38rem); }
figure { padding: 0.8rem; border-radius: 0.6rem; }
figcaption { margin-bottom: 0.3rem; font-weight: 600; color: var(--ink); }
svg { width: 100%; } svg text { fill: var(--faint); font: 11px system-ui, sans-serif; }
.gridline { stroke: var(--line); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.line.other { stroke: var(--faint); stroke-width: 1; opacity: 0.3; }
.shape { stroke-width: 2.2; fill-opacity: 0.06; }
.c0 { stroke: var(--c0); fill: var(--c0); } .c1 { stroke: var(--c1); fill: var(--c1); }
.c2 { stroke: var(--c2); fill: var(--c2); } .c3 { stroke: var(--c3); fill: var(--c3); }
.c4 { stroke: var(--c4); fill: var(--c4); } .c5 { stroke: var(--c5); fill: var(--c5); }
.c6 { stroke: var(--c6); fill: var(--c6); } .c7 { stroke: var(--c7); fill: var(--c7); }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5, .line.c6, .line.c7 { fill: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0.5rem 0; padding: 0; }
.legend li { display: flex; align-items: center; gap: 0.45rem; font-size: 0.86rem; }
.legend svg { width: 1.6rem; flex: none; }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
.strip { display: flex; flex-wrap: wrap; gap: 0.5rem; }
.strip div { width: 132px; font-size: 0.75rem; color: var(--faint);
  overflow-wrap: anywhere; line-height: 1.25; } .strip img { width: 132px; border-radius: 0.3rem; display: block; }
.texts .strip div { width: 100%; }
.images h4 { margin: 0.5rem 0 0.2rem; font-size: 0.82rem; color: var(--faint); font-weight: 600; }
.note { border-left: 4px solid var(--c1); padding: 0.3rem 0.8rem; background: var(--card); }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--faint); }
pre { overflow-x: auto; background: var(--card); padding: 0.8rem; border-radius: 0.6rem;
  font-size: 0.78rem; line-height: 1.4; }
"""
