"""Results as tables in a terminal, with as many metrics side by side as a line holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitreous.evaluation.report.tables import ResultTable, cell_of, published_rows, published_title, table_heading
from vitreous.metrics.metric import Metric

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
    methods = _Column("method", [Text(method) for method in table.methods])
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
    return Text(f"* {text}", style="bold green") if best else Text(text)


def _published(table: ResultTable) -> Table:
    headings, rows = published_rows(table.published)
    others = Table(title=Text(published_title(table.published)), box=SIMPLE_HEAD, title_justify="left", style="dim")
    for heading in headings:
        others.add_column(Text(heading))
    for row in rows:
        others.add_row(*(Text(cell, style="dim") for cell in row))
    return others
