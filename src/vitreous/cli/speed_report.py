"""What ``vitreous speed`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import say

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.speed.request import Measured
    from vitreous.speed.rows import SpeedRow

# F is a forward pass, FB a forward and a backward pass: terminals are narrow.
_RATIOS = {"ratio_limit": "/limit", "ratio_forward": "/F", "ratio_forward_backward": "/FB"}
_LEGEND = (
    "time over the limit (the least plain passes the method needs), over a forward pass (F), over forward and backward "
    "(FB), peak memory over that of FB; medians, with the middle half of all repetitions"
)


def show(measured: Measured, console: Console) -> None:
    """Print the ratios, methods and peers beneath each other, and why something has none."""
    rows, peers = measured.rows, any(row.peer for row in measured.rows)
    table = Table(title=Text(_title(measured)), box=SIMPLE_HEAD, title_justify="left")
    table.add_column("method", no_wrap=True)
    limit, *others = _RATIOS.values()
    for heading in (limit, "middle half", *others, "memory", *(["/ours", "difference"] if peers else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("passes")
    for row in rows:
        if row.ratio_forward is not None:
            table.add_row(*_cells(row, peers=peers))
    if any(row.ratio_forward is not None for row in rows):
        console.print(table)
    for row in rows:
        if row.reason is not None:
            say(console, f"{_name(row)}: {row.reason}")
    say(console, _LEGEND, "dim")


def _title(measured: Measured) -> str:
    given = measured.provenance
    height, width = given["size"]
    return f"{given['model']}, {given['batch']} images of {height} x {width}, {given['device']}"


def _cells(row: SpeedRow, *, peers: bool) -> list[Text]:
    limit, *others = (_number(getattr(row, name)) for name in _RATIOS)
    low, high = row.spread["ratio_limit"]
    cells = [_name(row), limit, f"{_number(low)}-{_number(high)}", *others, _number(row.ratio_peak_memory)]
    if peers:
        difference = "" if row.agreement is None else f"{row.agreement.largest_difference:.0e}"
        cells += [_number(row.ratio_peer), difference]
    return [Text(cell) for cell in (*cells, row.passes or "")]


def _name(row: SpeedRow) -> str:
    return row.method if row.peer is None else f"{row.method} by {row.peer}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
