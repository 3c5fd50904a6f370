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
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 42


@dataclass(frozen=True)
class Line:
    """Values over the horizontal axis.

    Attributes:
        name: What it is called, which is told when it is pointed at.
        across: Places on the horizontal axis.
        values: Heights; NaN leaves a gap.
        look: The attributes in SVG that give it its colour, see ``look_of``.
    """

    name: str
    across: Sequence[float]
    values: Sequence[float]
    look: str


@dataclass(frozen=True)
class Axis:
    """What an axis means, its ends, and where numbers stand on it."""

    meaning: str
    ends: tuple[float, float]
    marks: Sequence[float]

    def part(self, value: float) -> float:
        """How far a value is from the first end, 1 at the last one."""
        first, last = self.ends
        return (value - first) / ((last - first) or 1)


def percent_axis(meaning: str) -> Axis:
    """Give an axis from 0 to 100."""
    return Axis(meaning, (0, 100), range(0, 101, 20))


def line_chart(lines: Sequence[Line], *, title: str, across: Axis, up: Axis) -> str:
    """Draw lines over axes.

    Args:
        lines: What to draw, the last one on top.
        title: What the chart shows, for people who cannot see it.
        across: The horizontal axis.
        up: The vertical axis.
    """
    drawn = "".join(
        f'<polyline fill="none" stroke-width="2.2" {line.look} points="{run}">'
        f"<title>{escape(line.name)}</title></polyline>\n"
        for line in lines
        for run in _runs(line, across, up)
    )
    below, beside = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-size="12" fill="currentColor">\n{_axes(across, up)}{drawn}'
        f'<text x="{below}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across.meaning)}</text>\n'
        f'<text transform="translate(12 {beside}) rotate(-90)" text-anchor="middle">{escape(up.meaning)}</text>\n'
        "</svg>\n"
    )


def swatch(number: int) -> str:
    """Draw a short piece of a line, for a legend."""
    return (
        '<svg viewBox="0 0 28 10" width="28" height="10" style="display: inline-block" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="27" y2="5" stroke-width="2.5" {look_of(number)}/></svg>'
    )


def look_of(number: int) -> str:
    """Give a line the colour and dashes of its number."""
    colour, dash = line_style(number, COLOURS, DASHES)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{colour}"{dashes}'


def _runs(line: Line, across: Axis, up: Axis) -> list[str]:
    """Give the points of a line, cut where a value is missing."""
    runs: list[list[str]] = [[]]
    for place, value in zip(line.across, line.values, strict=True):
        if math.isfinite(value):
            runs[-1].append(f"{_x(across, place):.1f},{_y(up, value):.1f}")
        else:
            runs.append([])
    return [" ".join(run) for run in runs if run]


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.part(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.part(value) * (_HEIGHT - _BOTTOM - _TOP)


def _axes(across: Axis, up: Axis) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for mark in up.marks:
        y = _y(up, mark)
        parts.append(_rule(f"M{_LEFT} {y:.1f}H{right}") + _number(_LEFT - 6, y + 4, "end", mark))
    for mark in across.marks:
        x = _x(across, mark)
        parts.append(_rule(f"M{x:.1f} {_TOP}V{bottom}") + _number(x, bottom + 16, "middle", mark))
    return "".join(parts)


def _rule(path: str) -> str:
    return f'<path d="{path}" stroke="currentColor" stroke-opacity=".15"/>'


def _number(x: float, y: float, anchor: str, number: float) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{number:.4g}</text>\n'
