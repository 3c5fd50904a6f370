"""Results as tables of methods by metrics: Markdown, LaTeX, plain rows and the terminal.

Tables for readers show shares of 0..1 in percent and mark the best value of every metric; rows hold the numbers as they
are. A number without an interval, being of a single image, stands alone. Published numbers are a table of their own in
every form, never rows among own results. In a terminal a table has as many metrics side by side as a line holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitreous.evaluation.protocol import PublishedResult, published_rows, published_title
from vitreous.evaluation.statistics import EQUAL, Comparison, Estimate
from vitreous.methods import is_control, method_info
from vitreous.methods.registry import CONTROL_FAMILIES
from vitreous.metrics.metric import Metric

COLUMNS = (
    *("method", "kind", "metric", "mean", "low", "high", "n", "rank", "tied"),
    *("best", "difference", "difference_low", "difference_high", "p"),
)
_ARROWS = {"higher": "↑", "lower": "↓", None: ""}
_LATEX_ARROWS = {"higher": r" $\uparrow$", "lower": r" $\downarrow$", None: ""}
_MISSING = "-"
TIED = "≈"
ROW_KINDS = ("method", *CONTROL_FAMILIES)
_P_VALUES = "p of a paired bootstrap against the method with the best mean, two-sided, not corrected for several tests"
_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "≈": r"$\approx$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


@dataclass(frozen=True)
class ResultTable:
    """Own results of one protocol, model and data set, with what others have published beside them.

    Attributes:
        title: what was measured, on what.
        metrics: the columns, in order.
        estimates: own results, in any order.
        ranks: per metric's name the rank of each method by its mean, where they are wanted; controls have none.
        against_best: per metric's name how each method compares with the one of the best mean, which is left out.
        published: others' results.
        tied: per metric's name the methods that a paired test does not tell apart from the one of the best mean.
    """

    title: str
    metrics: Sequence[Metric]
    estimates: Sequence[Estimate]
    ranks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    against_best: Mapping[str, Mapping[str, Comparison]] = field(default_factory=dict)
    published: Sequence[PublishedResult] = ()
    tied: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def methods(self) -> list[str]:
        """All rows: methods by their mean of the main metric, the best first, then controls, then ceilings.

        Methods with the same mean keep the order in which their results came, and those without one come last.
        """
        listed = list(dict.fromkeys(estimate.method for estimate in self.estimates))
        main = self.main
        if main is None:
            return sorted(listed, key=lambda method: ROW_KINDS.index(row_kind(method)))
        sign = -1.0 if main.direction == "higher" else 1.0
        means = {one.method: sign * one.mean for one in self.estimates if one.metric == main.name}

        def place(method: str) -> tuple[int, float]:
            mean = means.get(method, math.nan)
            return ROW_KINDS.index(row_kind(method)), mean if math.isfinite(mean) else math.inf

        return sorted(listed, key=place)

    @property
    def main(self) -> Metric | None:
        """The metric that rows are sorted by: the first of which one direction is better."""
        return next((metric for metric in self.metrics if metric.direction is not None), None)

    def estimate(self, method: str, metric: str) -> Estimate | None:
        """Find one number, None where there is none."""
        return next((one for one in self.estimates if (one.method, one.metric) == (method, metric)), None)

    def best(self, metric: Metric) -> float | None:
        """Return the best mean of a metric, None where no direction is better or nothing was measured.

        Controls and ceilings do not count.
        """
        means = [
            one.mean
            for one in self.estimates
            if one.metric == metric.name and math.isfinite(one.mean) and not is_control(one.method)
        ]
        if metric.direction is None or not means:
            return None
        return max(means) if metric.direction == "higher" else min(means)

    def is_best(self, estimate: Estimate, metric: Metric) -> bool:
        """Return whether a number is the best of its column; equal ones are, whatever order they were summed in."""
        best = None if is_control(estimate.method) else self.best(metric)
        return best is not None and math.isclose(estimate.mean, best, rel_tol=EQUAL)


def row_kind(spelling: str) -> str:
    """Return whether a row is a ``method``, a ``control`` or a ``ceiling``."""
    return method_info(re.split(r"[.:]", spelling, maxsplit=1)[0]).family if is_control(spelling) else "method"


def row_label(spelling: str) -> str:
    """Name a row, with what it is where it is no method."""
    kind = row_kind(spelling)
    return spelling if kind == "method" else f"{spelling} ({kind})"


def as_markdown(table: ResultTable, *, p_values: bool = False) -> str:
    """Write a table in Markdown, the best value of a metric in bold, with a line that explains the marks.

    Args:
        table: the results.
        p_values: whether the paired tests against the best method follow in a table of their own.
    """
    headings = ["method", *(table_heading(metric) for metric in table.metrics)]
    rows = [
        [_markdown_label(method), *(f"**{text}**" if best else text for text, best in _cells(table, method))]
        for method in table.methods
    ]
    parts = [f"**{table.title}**", markdown_grid(headings, rows), explain_marks(table)]
    if p_values and (tests := _p_value_rows(table)):
        parts += [f"**{_P_VALUES}**", markdown_grid(*tests)]
    if table.published:
        parts += [
            f"**{published_title(table.published)}**",
            markdown_grid(*published_rows(table.published), aligned="---"),
        ]
    return "\n\n".join(parts) + "\n"


def as_latex(table: ResultTable, *, p_values: bool = False) -> str:
    """Write a table in LaTeX for the package booktabs, the best value of a metric in bold, without marks of ties.

    The caption explains bold numbers and intervals.

    Args:
        table: the results.
        p_values: whether the paired tests against the best method follow in a table of their own.
    """
    label = "tab:" + "-".join(re.findall(r"[a-z0-9]+", table.title.lower()))
    headings = ["method", *(_latex(metric.label) + _LATEX_ARROWS[metric.direction] for metric in table.metrics)]
    rows = [
        [
            _latex(row_label(method)),
            *(_latex_cell(text, best=best) for text, best in _cells(table, method, marked=False)),
        ]
        for method in table.methods
    ]
    caption = f"{table.title}. {explain_marks(table, tied=False)}".rstrip()
    compared = sum(not is_control(method) for method in table.methods)  # the others stand below them
    parts = [_latex_grid(caption, label, headings, rows, "l" + "r" * len(table.metrics), compared)]
    if p_values and (tests := _p_value_rows(table)):
        names, lines = tests
        escaped = [[_latex(cell) for cell in line] for line in lines]
        title = f"{table.title}. {_P_VALUES}"
        aligned = "l" + "r" * (len(names) - 1)
        parts.append(_latex_grid(title, f"{label}-p", [_latex(name) for name in names], escaped, aligned))
    if table.published:
        found, lines = published_rows(table.published)
        escaped = [[_latex(cell) for cell in line] for line in lines]
        title = published_title(table.published)
        names = [_latex(name) for name in found]
        parts.append(_latex_grid(title, f"{label}-published", names, escaped, "l" * len(found)))
    return "\n\n".join(parts) + "\n"


def _markdown_label(method: str) -> str:
    kind = row_kind(method)
    return f"`{method}`" if kind == "method" else f"`{method}` ({kind})"


def explain_marks(table: ResultTable, *, tied: bool = True) -> str:
    """Say what the marks mean that a table has: bold numbers, intervals, arrows, and ties if they are marked."""
    shown = [one for one in table.estimates if math.isfinite(one.mean)]
    marks = []
    if any(metric.direction is not None for metric in table.metrics):
        marks.append("Bold: best mean of its column; the arrow shows whether higher or lower is better.")
    if any(math.isfinite(one.low) and math.isfinite(one.high) for one in shown):
        marks.append("[low, high]: 95% bootstrap interval.")
    if tied and any(len(names) > 1 for names in table.tied.values()):
        marks.append(f"{TIED}: a paired test (p < 0.05) does not tell it apart from the best mean.")
    if table.main is not None and len(table.methods) > 1:
        marks.append(f"Rows are sorted by {table.main.name}.")
    if any(is_control(method) for method in table.methods):
        marks.append("Controls and ceilings stand below and are not compared.")
    if any(table.estimate(method, metric.name) not in shown for method in table.methods for metric in table.metrics):
        marks.append(f"{_MISSING}: not measured.")
    return " ".join(marks)


def _p_value_rows(table: ResultTable) -> tuple[list[str], list[list[str]]] | None:
    """Arrange the paired tests of every method against the best one; None where there are none."""
    metrics = [metric for metric in table.metrics if table.against_best.get(metric.name)]
    if not metrics:
        return None

    def p_value(method: str, metric: Metric) -> str:
        compared = table.against_best[metric.name].get(method)
        if compared is not None:
            return f"{compared.p:.2g}"
        return "best" if method in table.ranks.get(metric.name, {}) else _MISSING

    rows = [[method, *(p_value(method, metric) for metric in metrics)] for method in table.methods]
    return ["method", *(metric.name for metric in metrics)], rows


def as_rows(table: ResultTable) -> list[dict[str, Any]]:
    """Return own results as JSON values, one row per method and metric; a number that does not exist is None."""
    return [_own_row(table, estimate) for method in table.methods for estimate in _of_method(table, method)]


def published_as_rows(table: ResultTable) -> list[dict[str, Any]]:
    """Return others' results as JSON values."""
    names = ("method", "model", "data", "paper", "metric", "value")
    return [{name: getattr(result, name) for name in names} for result in table.published]


def _of_method(table: ResultTable, method: str) -> list[Estimate]:
    found = [table.estimate(method, metric.name) for metric in table.metrics]
    return [estimate for estimate in found if estimate is not None]


def _own_row(table: ResultTable, estimate: Estimate) -> dict[str, Any]:
    numbers = {name: _finite(getattr(estimate, name)) for name in ("mean", "low", "high")}
    kind = row_kind(estimate.method)
    row: dict[str, Any] = {
        "method": estimate.method,
        "kind": kind,
        "metric": estimate.metric,
        **numbers,
        "n": estimate.n,
    }
    rank = table.ranks.get(estimate.metric, {}).get(estimate.method)
    if rank is not None:
        row |= {"rank": rank, "tied": estimate.method in table.tied.get(estimate.metric, ())}
    compared = table.against_best.get(estimate.metric, {}).get(estimate.method)
    if compared is not None:
        row |= {"best": compared.second, "difference": _finite(compared.difference)}
        row |= {"difference_low": _finite(compared.low), "difference_high": _finite(compared.high), "p": compared.p}
    return row


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cells(table: ResultTable, method: str, *, marked: bool = True) -> list[tuple[str, bool]]:
    return [cell_of(table, method, metric, marked=marked) for metric in table.metrics]


def cell_of(
    table: ResultTable, method: str, metric: Metric, *, stacked: bool = False, marked: bool = True
) -> tuple[str, bool]:
    """Write a number of a method, and say whether it is the best of its column.

    Args:
        table: where it stands.
        method: its line.
        metric: its column.
        stacked: whether its interval stands on a line of its own.
        marked: whether ties with the best are marked.
    """
    estimate = table.estimate(method, metric.name)
    if estimate is None or not math.isfinite(estimate.mean):
        return _MISSING, False
    mean, bounds = number_parts(estimate, metric)
    best = table.is_best(estimate, metric)
    shown = f" {TIED}" if marked and is_tied(table, method, metric) and not best else ""
    interval = "" if bounds is None else f"[{bounds[0]}, {bounds[1]}]"
    text = f"{mean}{shown}\n{interval}".rstrip() if stacked else f"{mean} {interval}".rstrip() + shown
    return text, best


def is_tied(table: ResultTable, method: str, metric: Metric) -> bool:
    """Return whether a paired test does not tell a method apart from the one with the best mean."""
    return method in table.tied.get(metric.name, ())


def number_parts(estimate: Estimate, metric: Metric) -> tuple[str, tuple[str, str] | None]:
    """Write the mean of a finite number, and the bounds of its interval, which a single image has not."""
    mean, low, high = (metric.format(value) for value in (estimate.mean, estimate.low, estimate.high))
    return mean, (low, high) if math.isfinite(estimate.low) and math.isfinite(estimate.high) else None


def difference_parts(comparison: Comparison, metric: Metric) -> tuple[str, tuple[str, str] | None]:
    """Write the difference of two methods like the numbers that it is of, and the bounds of its interval."""
    difference = (comparison.difference, comparison.low, comparison.high)
    return number_parts(Estimate(comparison.first, metric.name, *difference, comparison.n), metric)


def table_heading(metric: Metric) -> str:
    """Name a metric with its unit and an arrow to where it is better."""
    return f"{metric.label} {_ARROWS[metric.direction]}".rstrip()


def _latex_cell(text: str, *, best: bool) -> str:
    return rf"\textbf{{{_latex(text)}}}" if best else _latex(text)


def markdown_grid(headings: Sequence[str], rows: Sequence[Sequence[str]], aligned: str = "---:") -> str:
    """Write a table in Markdown; ``aligned`` is how all columns but the first keep to a side."""
    lines = [list(headings), ["---", *([aligned] * (len(headings) - 1))], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _latex_grid(
    title: str, label: str, headings: Sequence[str], rows: Sequence[Sequence[str]], alignment: str, upper: int = 0
) -> str:
    """Write a table in LaTeX; a rule separates the ``upper`` first rows from the others."""
    body = [" & ".join(row) + r" \\" for row in rows]
    if 0 < upper < len(body):
        body.insert(upper, r"\midrule")
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{_latex(title)}}}",
        rf"\label{{{label}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(headings) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _latex(text: str) -> str:
    """Escape what LaTeX would read as a command."""
    return "".join(_LATEX_SPECIAL.get(sign, sign) for sign in text)


_BETWEEN = 3  # what stands between two columns


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: Sequence[Text]

    @property
    def width(self) -> int:
        """What it takes for nothing but the heading to be broken, and that between words only."""
        lines = [line for cell in self.cells for line in cell.plain.splitlines()]
        return max(map(len, [*lines, *self.heading.split()]))


def as_terminal(table: ResultTable, width: int) -> Group:
    """Lay out a table for rich; the best value of a metric is bold and starred, for terminals without bold.

    Args:
        table: methods by metrics.
        width: the characters that a line holds. Where they do not do, intervals stand below their means, and metrics
            that are still too many go into further tables.
    """
    methods = _Column("method", [Text(row_label(method)) for method in table.methods])
    left = width - methods.width - 2 * _BETWEEN
    columns = [_column(table, metric, stacked=False) for metric in table.metrics]
    if _width(columns) > left:
        columns = [_column(table, metric, stacked=True) for metric in table.metrics]
    parts = [_laid_out([methods, *some]) for some in _side_by_side(columns, left)]
    parts[0].title = Text(table.title)
    if table.published:
        parts.append(_published(table))
    return Group(*parts)


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width + _BETWEEN for column in columns)


def _side_by_side(columns: Sequence[_Column], left: int) -> Iterator[list[_Column]]:
    """Columns that fit beside the methods, in turn; one at least."""
    together: list[_Column] = []
    for column in columns:
        if together and _width([*together, column]) > left:
            yield together
            together = []
        together.append(column)
    yield together


def _laid_out(columns: Sequence[_Column]) -> Table:
    laid_out = Table(box=SIMPLE_HEAD, title_justify="left")
    for place, column in enumerate(columns):
        laid_out.add_column(Text(column.heading), justify="right" if place else "left", min_width=column.width)
    for cells in zip(*(column.cells for column in columns), strict=True):
        laid_out.add_row(*cells)
    return laid_out


def _column(table: ResultTable, metric: Metric, *, stacked: bool) -> _Column:
    return _Column(table_heading(metric), [_cell(table, method, metric, stacked=stacked) for method in table.methods])


def _cell(table: ResultTable, method: str, metric: Metric, *, stacked: bool) -> Text:
    text, best = cell_of(table, method, metric, stacked=stacked)
    if best:
        return Text(f"* {text}", style="bold green")
    return Text(text, style="green" if is_tied(table, method, metric) else "")


def _published(table: ResultTable) -> Table:
    headings, rows = published_rows(table.published)
    others = Table(title=Text(published_title(table.published)), box=SIMPLE_HEAD, title_justify="left", style="dim")
    for heading in headings:
        others.add_column(Text(heading))
    for row in rows:
        others.add_row(*(Text(cell, style="dim") for cell in row))
    return others
