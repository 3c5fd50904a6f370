"""The curves figure: deletion and insertion of several methods on one photo."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from vitreous.errors import InputError
from vitreous.pictures.captions import font, line_height, wrap
from vitreous.pictures.data.curves import Curves
from vitreous.pictures.line_style import line_style
from vitreous.pictures.sheet import FAINT, INK, Sheet, font_properties
from vitreous.pictures.tiles import MARGIN

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; lines differ by dashes as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1a1a1a")
DASHES = ("-", "--", "-.", ":")
_WIDTH = 400
_HEIGHT = 270
_LEFT = 52
_BETWEEN = 62
_TITLE = 30
_BELOW = 52
_SWATCH = 34


def curves_figure(curves: Sequence[Curves], *, caption: str = "", what: str = "patches") -> Sheet:
    """Draw deletion curves on the left and insertion curves on the right, with the areas under them.

    Args:
        curves: One for each method.
        caption: Which class they follow.
        what: What is deleted and inserted, patches or pixels.
    """
    if not curves:
        raise InputError("there is no curve to draw")
    inner = _LEFT + 2 * _WIDTH + _BETWEEN
    names = inner - _SWATCH - 240
    entries = [wrap(one.method, font(13), names, lines=2) for one in curves]
    heading = line_height(font(18, bold=True)) + 8 if caption else 0
    legend = sum(len(lines) for lines in entries) * line_height(font(13)) + line_height(font(13)) + 6
    sheet = Sheet(2 * MARGIN + inner, 2 * MARGIN + heading + _TITLE + _HEIGHT + _BELOW + legend)
    if caption:
        sheet.write(MARGIN, MARGIN, caption, width=inner, size=18, bold=True)
    top = MARGIN + heading
    for number, kind in enumerate(("deletion", "insertion")):
        left = MARGIN + _LEFT + number * (_WIDTH + _BETWEEN)
        sheet.write(left, top, f"{kind}: {_GOOD[kind]} is better", width=_WIDTH, bold=True)
        axes = sheet.axes(left, top + _TITLE, _WIDTH, _HEIGHT)
        for position, one in enumerate(curves):
            values = one.deletion if kind == "deletion" else one.insertion
            colour, dash = line_style(position, COLOURS, DASHES)
            axes.plot(100 * one.fractions, 100 * values, dash, color=colour, linewidth=2)
        _dress(axes, f"{what} {'deleted' if kind == 'deletion' else 'inserted'}, most relevant first (%)")
    _legend(sheet, curves, top + _TITLE + _HEIGHT + _BELOW, names)
    return sheet


_GOOD = {"deletion": "low", "insertion": "high"}


def _dress(axes: Axes, below: str) -> None:
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 102)
    axes.set_xlabel(below, fontproperties=font_properties(13), color=INK)
    axes.set_ylabel("probability of the class (%)", fontproperties=font_properties(13), color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e0e0e0", linewidth=0.8)
    axes.set_axisbelow(True)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font_properties(12))


def _legend(sheet: Sheet, curves: Sequence[Curves], top: float, names: int) -> None:
    """Draw one line for each method: how its curve looks, its name and its areas."""
    right = MARGIN + _SWATCH + names
    step = line_height(font(13))
    sheet.write(MARGIN + _SWATCH, top, "area under the curve", width=names, size=12, ink=FAINT)
    for column, kind in enumerate(("deletion", "insertion")):
        sheet.write(right + 120 * column, top, kind, width=110, size=12, ink=FAINT, align="right")
    top += step
    for number, one in enumerate(curves):
        colour, dash = line_style(number, COLOURS, DASHES)
        axes = sheet.axes(MARGIN, top + 2, _SWATCH - 8, step - 4)
        axes.set_axis_off()
        axes.plot([0, 1], [0, 0], dash, color=colour, linewidth=2)
        used = sheet.write(MARGIN + _SWATCH, top, one.method, width=names, size=13, lines=2)
        for column, value in enumerate((one.deletion_area, one.insertion_area)):
            sheet.write(right + 120 * column, top, f"{100 * value:.1f}", width=110, size=13, align="right")
        top += used
