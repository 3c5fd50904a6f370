"""The scaffold of every page: the Jinja2 environment, and the parts and line charts that pages share.

Charts are SVG inside the page and take its colours, light or dark.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as _escape
from PIL import Image

from vitreous._utils.messages import printable
from vitreous._utils.storage import PNG_LEVEL
from vitreous.pictures.style import line_style, ramp

_RAMP = 144  # pixels across a legend


def render(template: str, **values: Any) -> str:
    """Render a template of ``vitreous/html/templates``; text is escaped, ``Markup`` is not."""
    return _environment().get_template(template).render(**values)


def macro(template: str, name: str, *arguments: Any) -> str:
    """Call one macro of a template."""
    return str(getattr(_environment().get_template(template).module, name)(*arguments))


def opening(title: str, *, heading: str | None = None, style: str | None = None) -> str:
    """Render a page up to its body.

    Args:
        title: Title of the page in the browser.
        heading: Heading of the page; its title by default.
        style: A style sheet among the templates, added to the common one.
    """
    return render("opening.html", title=title, heading=heading, style=style)


def closing() -> str:
    """Render the end of a page."""
    return render("closing.html")


def document(title: str, body: str, *, heading: str | None = None, style: str | None = None) -> str:
    """Render a whole page around a body that is already HTML; see ``opening``."""
    return render("page.html", title=title, heading=heading, style=style, body=Markup(body))  # noqa: S704


def escape(text: object) -> str:
    """Escape a text for HTML and for attributes; what UTF-8 cannot encode becomes a backslash escape."""
    return str(_escape(printable(str(text))))


def data_uri(content: bytes, kind: str) -> str:
    """Make a data URI; ``kind`` is the media type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture(image: Image.Image, alt: str, *, exact: bool = False) -> str:
    """Embed an image: as JPEG, which is a fifth of the size, or as PNG when ``exact``."""
    stream = io.BytesIO()
    if exact:
        image.save(stream, format="PNG", compress_level=PNG_LEVEL)
    else:
        image.convert("RGB").save(stream, format="JPEG", quality=88)
    source = data_uri(stream.getvalue(), "image/png" if exact else "image/jpeg")
    return macro("macros.html", "picture", source, image.size, alt)


def figure(content: str, caption: str) -> str:
    """Render a card; content and caption are already HTML."""
    return macro("macros.html", "figure", Markup(content), Markup(caption))  # noqa: S704


def bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Render bars, each with a label, a length from 0 to 1 and a text after it."""
    return macro("macros.html", "bars", clipped(rows))


def clipped(rows: Iterable[tuple[str, float, str]]) -> list[tuple[str, float, str]]:
    """Clip the lengths of bars to 0 and 1."""
    return [(label, min(max(length, 0.0), 1.0), text) for label, length, text in rows]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table of texts; it scrolls on narrow screens."""
    return macro("macros.html", "table", headings, rows)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vitreous.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_encodable,
    )
    environment.filters["picture"] = lambda *given, **options: Markup(picture(*given, **options))  # noqa: S704
    environment.filters["ramp"] = lambda signed: ramp(_RAMP, signed=signed)
    return environment


def _encodable(value: object) -> object:
    """File names may hold bytes that UTF-8 cannot encode."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


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
class Band:
    """An area between two heights over the horizontal axis, drawn behind the lines.

    Attributes:
        name: Name of the band, shown on hover.
        across: Positions on the horizontal axis.
        low: Lower heights.
        high: Upper heights.
        attributes: SVG attributes such as the CSS class.
    """

    name: str
    across: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    attributes: Mapping[str, str]


@dataclass(frozen=True)
class Axis:
    """An axis: its label, its ends, and its tick marks."""

    label: str
    ends: tuple[float, float]
    marks: Sequence[float]

    def part(self, value: float) -> float:
        """Return the position of a value: 0 at the first end, 1 at the last one."""
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
    bands: Sequence[_Polyline] = ()
    width: int = _WIDTH
    height: int = _HEIGHT
    below: tuple[float, float] = ((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6)
    beside: tuple[float, float] = (12, (_TOP + _HEIGHT - _BOTTOM) / 2)


def percent_axis(label: str) -> Axis:
    """Make an axis from 0 to 100."""
    return Axis(label, (0, 100), range(0, 101, 20))


def layout_chart(lines: Sequence[Line], *, title: str, across: Axis, up: Axis, bands: Sequence[Band] = ()) -> Chart:
    """Compute the coordinates of a chart; the last line is drawn on top.

    Args:
        lines: The lines.
        title: What the chart shows, for screen readers.
        across: The horizontal axis.
        up: The vertical axis.
        bands: Areas behind the lines.
    """
    drawn = [_Polyline(line.name, line.attributes, run) for line in lines for run in _runs(line, across, up)]
    areas = [_Polyline(band.name, band.attributes, _outline(band, across, up)) for band in bands]
    return Chart(title, across.label, up.label, _rules(across, up), drawn, areas)


def line_chart(lines: Sequence[Line], *, title: str, across: Axis, up: Axis, bands: Sequence[Band] = ()) -> str:
    """Draw lines over axes as SVG; see ``layout_chart``."""
    chart = layout_chart(lines, title=title, across=across, up=up, bands=bands)
    return macro("macros.html", "line_chart", chart)


def line_attributes(number: int) -> dict[str, str]:
    """Return the colour and the dashes of a line by its number, as SVG attributes."""
    colour, dash = line_style(number, _COLOURS, _DASHES)
    return {"stroke": colour, **({"stroke-dasharray": dash} if dash else {})}


def _outline(band: Band, across: Axis, up: Axis) -> str:
    """Return the corners of a band: along its lower side, and back along the upper one."""
    places = list(band.across)
    corners = [*zip(places, band.low, strict=True), *reversed(list(zip(places, band.high, strict=True)))]
    return " ".join(f"{_x(across, place):.1f},{_y(up, value):.1f}" for place, value in corners)


def _runs(line: Line, across: Axis, up: Axis) -> list[str]:
    """Return the points of a line, split where a value is missing."""
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
