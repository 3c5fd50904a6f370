"""A line chart as a drawing inside a page: it takes the page's colours, so it is readable in the dark as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitreous.html.page import escape
from vitreous.pictures.line_style import line_style

# Readable on white and on black, and apart for people with any kind of colour vision; lines differ by dashes as well.
COLOURS = ("#2b8fd0", "#e06a1b", "#0fa67c", "#c878a4", "#c99700", "#7a8ff0", "#8a8a8a")
DASHES = ("", "7 4", "9 3 2 3", "2 3")

_WIDTH, _HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 42


@dataclass(frozen=True)
class Line:
    """Values over the horizontal axis; both in the units of the axes. NaN leaves a gap."""

    across: Sequence[float]
    values: Sequence[float]


def line_chart(lines: Sequence[Line], *, title: str, across: str, up: str) -> str:
    """Draw lines over axes from 0 to 100.

    Args:
        lines: What to draw; the number of a line gives its colour and dashes, see ``swatch``.
        title: What the chart shows, for people who cannot see it.
        across: What the horizontal axis means.
        up: What the vertical axis means.
    """
    drawn = "".join(
        f'<polyline points="{run}" fill="none" stroke-width="2.2" {_style(number)}/>\n'
        for number, line in enumerate(lines)
        for run in _runs(line)
    )
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-size="12" fill="currentColor">\n{_axes()}{drawn}'
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>\n'
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>\n</svg>\n'
    )


def swatch(number: int) -> str:
    """Draw a short piece of a line, for a legend."""
    return (
        '<svg viewBox="0 0 28 10" width="28" height="10" style="display: inline-block" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="27" y2="5" stroke-width="2.5" {_style(number)}/></svg>'
    )


def _style(number: int) -> str:
    colour, dash = line_style(number, COLOURS, DASHES)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{colour}"{dashes}'


def _runs(line: Line) -> list[str]:
    """Give the points of a line, cut where a value is missing."""
    runs: list[list[str]] = [[]]
    for across, value in zip(line.across, line.values, strict=True):
        if math.isfinite(value):
            runs[-1].append(f"{_x(across):.1f},{_y(value):.1f}")
        else:
            runs.append([])
    return [" ".join(run) for run in runs if run]


def _x(value: float) -> float:
    return _LEFT + value / 100 * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float) -> float:
    return _HEIGHT - _BOTTOM - value / 100 * (_HEIGHT - _BOTTOM - _TOP)


def _axes() -> str:
    parts = []
    for mark in range(0, 101, 20):
        x, y = _x(mark), _y(mark)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{mark}</text>'
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{mark}</text>\n'
        )
    return "".join(parts)
