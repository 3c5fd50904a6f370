"""Charts as SVG that a page holds in itself: lines over an axis, and a radar of methods over metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vitreous.evaluation.report.curves import Curves
from vitreous.html.chart import Axis, Line, line_chart
from vitreous.html.page import escape

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
