"""Charts of curves, with bands and a legend; each draws what it is given and computes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import NDArray

from vitreous.errors import InputError
from vitreous.explanation.views import FigureOptions, Look, look_with
from vitreous.pictures.canvas import FAINT, INK, Canvas, line_height, wrap
from vitreous.pictures.style import PageStyle, line_style, page_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitreous.pictures.curves import Curves
    from vitreous.pictures.perturbations import LayerCurve, MeanCurves

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; lines differ by dashes as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1a1a1a")
DASHES = ("-", "--", "-.", ":")
GRID = "#e0e0e0"
CONTROL = "#8a8a8a"
_SCREEN_PANEL = 400  # width of a panel on the screen
_PANELS = 2  # side by side
_TITLE_LINES = 2
_BETTER = {"deletion": "low", "insertion": "high"}
_DONE = {"deletion": "deleted", "insertion": "inserted"}


Values = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart, with the band around it if there is one."""

    name: str
    across: Values
    values: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines.

    Attributes:
        title: Heading.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        lines: The lines.
        limits: Ends of the vertical axis; from the lines by default.
        mark: A place on the horizontal axis that is marked, and its name.
        whole: Whether the horizontal axis counts, so that it has ticks at whole numbers only.
    """

    title: str
    across: str
    up: str
    lines: Sequence[ChartLine]
    limits: tuple[float, float] | None = None
    mark: tuple[float, str] | None = None
    whole: bool = False


def panels_figure(
    panels: Sequence[Panel],
    *,
    caption: str = "",
    numbers: Mapping[str, Sequence[str]] | None = None,
    headings: Sequence[str] = (),
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw line charts side by side with one legend.

    Args:
        panels: The charts. Lines of one name have one style in all of them.
        caption: Heading of the page.
        numbers: By the name of a line, numbers that the legend shows.
        headings: What these numbers are.
        look: How the page is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures.charts import ChartLine, Panel, panels_figure
        >>> panel = Panel("accuracy", "layer", "%", [ChartLine("ours", [0, 1, 2], [10, 30, 40])])
        >>> canvas = panels_figure([panel], width="3.25in")
    """
    if not panels or not any(panel.lines for panel in panels):
        raise InputError("there is no curve to draw")
    look = look_with(look, options)
    style = page_style(look)
    columns = min(look.columns or _PANELS, len(panels))
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    shown_names = dict(zip(names, look.labelled(names), strict=True))
    left = 3.6 * style.caption
    inner = style.inner or columns * (left + _SCREEN_PANEL) + (columns - 1) * style.gap
    last = 1.2 * style.caption  # half of the number under the right end of an axis
    width = (inner - last - (columns - 1) * 1.5 * style.caption) / columns - left
    height = 0.66 * width
    letters = style.font(style.label, bold=True)
    lines = max(len(wrap(panel.title, letters, width, lines=_TITLE_LINES)) for panel in panels)
    title, below = lines * line_height(letters) + 0.3 * style.label, 3.1 * style.caption
    heading = heading_height(caption, style, inner)
    legend = Legend(shown_names, numbers or {}, headings, style, inner)
    rows = math.ceil(len(panels) / columns)
    canvas = Canvas(
        inner + 2 * style.margin,
        2 * style.margin + heading + rows * (title + height + below) + legend.height,
        style=style,
    )
    if caption:
        canvas.write(style.margin, style.margin, caption, width=inner, size=style.title, bold=True, lines=2)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        across = style.margin + left + column * (left + width + 1.5 * style.caption)
        top = style.margin + heading + row * (title + height + below)
        canvas.write(across, top, panel.title, width=width, size=style.label, bold=True, lines=_TITLE_LINES)
        axes = canvas.axes(across, top + title, width, height)
        for line in panel.lines:
            colour, dash = line_style(names.index(line.name), COLOURS, DASHES)
            axes.plot(line.across, line.values, dash, color=colour, linewidth=style.line)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.across, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
        _style_panel(axes, panel, style, labelled=column == 0 or panel.up != panels[number - 1].up)
    legend.draw(canvas, canvas.height - style.margin - legend.height)
    return canvas


def heading_height(caption: str, style: PageStyle, width: float) -> float:
    """Return the height of a page's heading."""
    if not caption:
        return 0.0
    letters = style.font(style.title, bold=True)
    return len(wrap(caption, letters, int(width), lines=2)) * line_height(letters) + 0.4 * style.title


def _style_panel(axes: Axes, panel: Panel, style: PageStyle, *, labelled: bool) -> None:
    places = [place for line in panel.lines for place in line.across]
    axes.set_xlim(min(places), max(places) if max(places) > min(places) else min(places) + 1)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    if panel.whole:
        step = max(1, math.ceil(len(set(places)) / 7))
        axes.set_xticks(sorted(set(places))[::step])
    letters = style.font_properties(style.caption)
    axes.set_xlabel(panel.across, fontproperties=letters, color=INK, labelpad=2)
    if labelled:
        axes.set_ylabel(panel.up, fontproperties=letters, color=INK, labelpad=2)
    if panel.mark is not None:
        place, name = panel.mark
        axes.axvline(place, color=CONTROL, linewidth=0.6 * style.line, linestyle=":")
        axes.text(
            place,
            1.0,
            f" {name}",
            transform=axes.get_xaxis_transform(),
            color=FAINT,
            va="top",
            fontproperties=style.font_properties(style.note),
        )
    plain_axes(axes, style)


def plain_axes(axes: Axes, style: PageStyle) -> None:
    """Draw axes without a frame, with a light grid and the page's fonts."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_linewidth(0.4 * style.line)
    axes.grid(color=GRID, linewidth=0.4 * style.line)
    axes.set_axisbelow(True)
    axes.set_facecolor("white")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(width=0.4 * style.line, length=2.5 * style.line / 2, pad=2, colors=INK)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(style.font_properties(style.note))


class Legend:
    """A legend below charts: names side by side, or one line each when numbers go with them."""

    def __init__(
        self,
        names: Mapping[str, str],
        numbers: Mapping[str, Sequence[str]],
        headings: Sequence[str],
        style: PageStyle,
        width: float,
    ) -> None:
        self.names, self.numbers, self.headings, self.style, self.width = names, numbers, headings, style, width
        self.swatch = 2.4 * style.caption
        self.letters = style.font(style.caption)
        self.column = max([style.font(style.note).getlength(text) for text in headings], default=0.0) + style.caption
        self.step = line_height(self.letters)
        self._places = self._table() if numbers else self._flow()

    @property
    def height(self) -> float:
        """Height that it takes."""
        return self._places[-1][1] + self.step + 0.3 * self.style.caption if self._places else 0.0

    def _room(self) -> float:
        return self.width - self.swatch - len(self.headings) * self.column

    def _table(self) -> list[tuple[float, float]]:
        places, top = [], float(self.step)
        for shown in self.names.values():
            places.append((0.0, top))
            top += len(wrap(shown, self.letters, int(self._room()), lines=2)) * self.step
        return places

    def _flow(self) -> list[tuple[float, float]]:
        places, left, top = [], 0.0, 0.0
        for shown in self.names.values():
            wide = min(self.width, self.swatch + self.letters.getlength(shown) + 1.6 * self.style.caption)
            if left and left + wide > self.width:
                left, top = 0.0, top + self.step
            places.append((left, top))
            left += wide
        return places

    def draw(self, canvas: Canvas, top: float) -> None:
        """Draw it with its upper edge at ``top``."""
        style, edge = self.style, self.style.margin
        for column, heading in enumerate(self.headings):
            left = edge + self.swatch + self._room() + column * self.column
            canvas.write(left, top, heading, width=self.column, size=style.note, ink=FAINT, align="right")
        for number, ((name, shown), (left, down)) in enumerate(zip(self.names.items(), self._places, strict=True)):
            colour, dash = line_style(number, COLOURS, DASHES)
            axes = canvas.axes(edge + left, top + down, self.swatch - 0.6 * style.caption, self.step)
            axes.set_axis_off()
            axes.plot([0, 1], [0, 0], dash, color=colour, linewidth=style.line)
            room = self._room() if self.numbers else self.width - left - self.swatch
            canvas.write(
                edge + left + self.swatch,
                top + down,
                shown,
                width=room,
                size=style.caption,
                lines=2 if self.numbers else 1,
            )
            for column, text in enumerate(self.numbers.get(name, ())):
                at = edge + self.swatch + self._room() + column * self.column
                canvas.write(at, top + down, text, width=self.column, size=style.caption, align="right")


def curves_figure(
    curves: Sequence[Curves],
    *,
    caption: str = "",
    what: str = "patches",
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw deletion curves on the left and insertion curves on the right, with the areas under them.

    Args:
        curves: One for each method, see ``perturbation_curves``.
        caption: The class whose probability they follow.
        what: What is deleted and inserted: patches or pixels.
        look: How the page is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import curves_figure, perturbation_curves
        >>> curves = perturbation_curves(model, "demo.jpg", explanation, steps=2)
        >>> curves_figure(curves, caption=explanation.label(), width="6.9in").save("curves.pdf").name
        'curves.pdf'
    """
    panels = [
        _fraction_panel(
            kind, what, [ChartLine(one.method, 100 * one.fractions, 100 * getattr(one, kind)) for one in curves]
        )
        for kind in ("deletion", "insertion")
    ]
    numbers = {one.method: [f"{100 * one.deletion_area:.1f}", f"{100 * one.insertion_area:.1f}"] for one in curves}
    headings = ("deletion area (%)", "insertion area (%)")
    return panels_figure(
        panels if curves else (), caption=caption, numbers=numbers, headings=headings, look=look, **options
    )


def _fraction_panel(kind: str, what: str, lines: Sequence[ChartLine]) -> Panel:
    return Panel(
        f"{kind}: {_BETTER[kind]} is better",
        f"{what} {_DONE[kind]} (%)",
        "probability (%)",
        lines,
        limits=(0, 102),
    )


def dataset_curves_figure(
    curves: Sequence[MeanCurves],
    *,
    caption: str = "",
    what: str = "patches",
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw mean deletion and insertion curves of several images, with the 95% interval of the mean as a band.

    Args:
        curves: One for each method, see ``dataset_curves``.
        caption: Heading of the page.
        what: What is deleted and inserted: patches or pixels.
        look: How the page is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import dataset_curves, dataset_curves_figure
        >>> curves = dataset_curves(model, ["demo.jpg", "other.jpg"], ["gae", "rollout"], steps=2)
        >>> canvas = dataset_curves_figure(curves, width="6.9in")
    """
    from vitreous.pictures.perturbations import areas, mean_band  # noqa: PLC0415  # imports models

    panels = []
    for kind in ("deletion", "insertion"):
        lines = []
        for one in curves:
            mean, low, high = (100 * part for part in mean_band(getattr(one, kind)))
            lines.append(ChartLine(one.method, 100 * one.fractions, mean, low, high))
        panels.append(_fraction_panel(kind, what, lines))
    numbers = {
        one.method: [
            f"{100 * float(np.nanmean(areas(one.fractions, values))):.1f}" for values in (one.deletion, one.insertion)
        ]
        for one in curves
    }
    headings = ("deletion area (%)", "insertion area (%)")
    return panels_figure(
        panels if curves else (), caption=caption, numbers=numbers, headings=headings, look=look, **options
    )


def layer_curve_figure(
    curves: Sequence[LayerCurve],
    *,
    caption: str = "",
    look: Look | None = None,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw the areas under deletion and insertion curves over the start layer; of several images with a band.

    Args:
        curves: One for each method, see ``layer_curves``.
        caption: Heading of the page.
        look: How the page is drawn.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import layer_curve_figure, layer_curves
        >>> canvas = layer_curve_figure(layer_curves(model, ["demo.jpg"], ["ixg"], steps=2))
    """
    from vitreous.pictures.perturbations import mean_band  # noqa: PLC0415

    panels = []
    for kind in ("deletion", "insertion"):
        lines = []
        for one in curves:
            values = getattr(one, kind)
            mean, low, high = (100 * part for part in mean_band(values))
            lines.append(ChartLine(one.method, one.layers, mean, *((low, high) if len(values) > 1 else (None, None))))
        marks = {one.skipplus for one in curves if one.skipplus is not None}
        mark = (float(marks.pop()), "SkipPLUS") if len(marks) == 1 else None
        panels.append(
            Panel(
                f"{kind}: {_BETTER[kind]} is better", "start layer", "area (%)", lines, mark=mark, whole=True
            )
        )  # fmt: skip
    return panels_figure(panels if curves else (), caption=caption, look=look, **options)
