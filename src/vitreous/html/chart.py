"""Line charts as SVG inside a page: they take the page's colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitreous.html.page import macro
from vitreous.pictures.colours import line_style

# Readable on white and on black, and distinct for any kind of colour vision; lines differ by dashes as well.
_COLOURS = ("#2b8fd0", "#e06a1b", "#0fa67c", "#c878a4", "#c99700", "#7a8ff0", "#8a8a8a")
_DASHES = ("", "7 4", "9 3 2 3", "2 3")

_WIDTH, _HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 42


@dataclass(frozen=True)
class Line:
    """Values over the horizontal axis.

    Attributes:
        name: Name of the line, shown on hover.
        across: Positions on the horizontal axis.
        values: Heights; NaN leaves a gap.
        attributes: SVG attributes such as the colour, see ``line_attributes``.
    """

    name: str
    across: Sequence[float]
    values: Sequence[float]
    attributes: Mapping[str, str]


@dataclass(frozen=True)
class Axis:
    """An axis: its label, its ends, and its tick marks."""

    label: str
    ends: tuple[float, float]
    marks: Sequence[float]

    def part(self, value: float) -> float:
        """Give the position of a value: 0 at the first end, 1 at the last one."""
        first, last = self.ends
        return (value - first) / ((last - first) or 1)


@dataclass(frozen=True)
class _Polyline:
    name: str
    attributes: Mapping[str, str]
    points: str


@dataclass(frozen=True)
class _Rule:
    """A grid line with its number."""

    path: str
    x: float
    y: float
    anchor: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart ready for its template: all coordinates are computed."""

    title: str
    across: str
    up: str
    rules: Sequence[_Rule]
    lines: Sequence[_Polyline]
    width: int = _WIDTH
    height: int = _HEIGHT
    below: tuple[float, float] = ((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6)
    beside: tuple[float, float] = (12, (_TOP + _HEIGHT - _BOTTOM) / 2)


def percent_axis(label: str) -> Axis:
    """Make an axis from 0 to 100."""
    return Axis(label, (0, 100), range(0, 101, 20))


def layout_chart(lines: Sequence[Line], *, title: str, across: Axis, up: Axis) -> Chart:
    """Compute the coordinates of a chart; the last line is drawn on top.

    Args:
        lines: The lines.
        title: What the chart shows, for screen readers.
        across: The horizontal axis.
        up: The vertical axis.
    """
    drawn = [_Polyline(line.name, line.attributes, run) for line in lines for run in _runs(line, across, up)]
    return Chart(title, across.label, up.label, _rules(across, up), drawn)


def line_chart(lines: Sequence[Line], *, title: str, across: Axis, up: Axis) -> str:
    """Draw lines over axes as SVG; see ``layout_chart``."""
    return macro("macros.html", "line_chart", layout_chart(lines, title=title, across=across, up=up))


def line_attributes(number: int) -> dict[str, str]:
    """Give the colour and the dashes of a line by its number, as SVG attributes."""
    colour, dash = line_style(number, _COLOURS, _DASHES)
    return {"stroke": colour, **({"stroke-dasharray": dash} if dash else {})}


def _runs(line: Line, across: Axis, up: Axis) -> list[str]:
    """Give the points of a line, split where a value is missing."""
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


def _rules(across: Axis, up: Axis) -> list[_Rule]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    rows = [(mark, _y(up, mark)) for mark in up.marks]
    columns = [(mark, _x(across, mark)) for mark in across.marks]
    return [
        *(_Rule(f"M{_LEFT} {y:.1f}H{right}", _LEFT - 6, y + 4, "end", f"{mark:.4g}") for mark, y in rows),
        *(_Rule(f"M{x:.1f} {_TOP}V{bottom}", x, bottom + 16, "middle", f"{mark:.4g}") for mark, x in columns),
    ]
