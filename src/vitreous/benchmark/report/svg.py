"""Charts as SVG that a page holds in itself: lines over an axis, and a radar of methods over metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 38
_RADAR = 360
_RADIUS = 112


def line_chart(
    steps: Sequence[float], lines: Mapping[str, Sequence[float]], styles: Mapping[str, str], axis: str
) -> str:
    """Draw lines.

    Args:
        steps: places on the horizontal axis.
        lines: a height for every step, by name.
        styles: the CSS class of every line; lines without one are drawn first, in the background.
        axis: what the horizontal axis is.
    """
    heights = [height for line in lines.values() for height in line if math.isfinite(height)]
    ticks = _ticks(min(heights, default=0.0), max(heights, default=1.0))
    low, high = ticks[0], ticks[-1]
    first, last = steps[0], steps[-1]

    def across(step: float) -> float:
        return _LEFT + (step - first) / ((last - first) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def down(height: float) -> float:
        return _HEIGHT - _BOTTOM - (height - low) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(axis)}">']
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{down(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    every = max(1, math.ceil(len(steps) / 12))
    for step in steps[::every]:
        parts.append(
            f'<text x="{across(step):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(step)}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.1f}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(axis)}</text>'
    )
    for name in sorted(lines, key=lambda name: name in styles):
        points = " ".join(
            f"{across(step):.1f},{down(height):.1f}"
            for step, height in zip(steps, lines[name], strict=True)
            if math.isfinite(height)
        )
        style = styles.get(name, "other")
        parts.append(f'<polyline class="line {style}" points="{points}"><title>{escape(name)}</title></polyline>')
    return "".join(parts) + "</svg>"


def radar_chart(axes: Sequence[str], shapes: Mapping[str, Sequence[float]], styles: Mapping[str, str]) -> str:
    """Draw methods over metrics; 1 is outward and best, 0 the centre."""
    centre = _RADAR / 2
    angles = [2 * math.pi * place / len(axes) - math.pi / 2 for place in range(len(axes))]

    def point(angle: float, share: float) -> str:
        reach = _RADIUS * share
        return f"{centre + reach * math.cos(angle):.1f},{centre + reach * math.sin(angle):.1f}"

    parts = [
        f'<svg viewBox="-70 0 {_RADAR + 140} {_RADAR}" role="img" aria-label="radar chart of methods over metrics">'
    ]
    for ring in (0.25, 0.5, 0.75, 1.0):
        parts.append(f'<polygon class="grid" points="{" ".join(point(angle, ring) for angle in angles)}"/>')
    for angle, name in zip(angles, axes, strict=True):
        end = point(angle, 1.0).split(",")
        parts.append(f'<line class="grid" x1="{centre}" y1="{centre}" x2="{end[0]}" y2="{end[1]}"/>')
        parts.append(_axis_label(angle, name, centre))
    for name, shares in shapes.items():
        points = " ".join(point(angle, share) for angle, share in zip(angles, shares, strict=True))
        style = styles.get(name, "other")
        parts.append(f'<polygon class="shape {style}" points="{points}"><title>{escape(name)}</title></polygon>')
    return "".join(parts) + "</svg>"


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


def _short(number: float) -> str:
    return f"{number:.4g}"
