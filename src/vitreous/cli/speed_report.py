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

# Short, for terminals are narrow.
_SHORT = {" forward": "F", " backward": "B", " (from block ": "@", ")": ""}
_LEGEND = (
    "time over the limit, which is the least plain passes that the method needs, with half of the width of the middle "
    "half of all repetitions (+-); over a forward pass (F); over forward and backward (FB); peak memory over that of "
    "FB; 1B@6 is a backward pass that goes down to block 6"
)
_PEER_LEGEND = "over ours: the peer's time over that of the method above it"


def show(measured: Measured, console: Console) -> None:
    """Print the ratios, methods and peers beneath each other, and why something has none."""
    timed, peers = [row for row in measured.rows if row.spread], any(row.peer for row in measured.rows)
    if timed:
        console.print(_table(timed, _title(measured), peers=peers))
    for row in measured.rows:
        if row.reason is not None:
            say(console, f"{_name(row)}: {row.reason}")
    say(console, f"{_LEGEND}; {_PEER_LEGEND}" if peers else _LEGEND, "dim")


def _table(rows: list[SpeedRow], title: str, *, peers: bool) -> Table:
    table = Table(title=Text(title), box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=20)
    for heading in ("/limit", "+-", "/F", "/FB", "memory", *(["/ours"] if peers else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("passes", min_width=9)
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row, peers=peers)))
    return table


def _title(measured: Measured) -> str:
    given = measured.provenance
    height, width = given["size"]
    return f"{given['model']}, {given['batch']} images of {height} x {width}, {given['device']}"


def _cells(row: SpeedRow, *, peers: bool) -> list[str]:
    low, high = row.spread["ratio_limit"]
    numbers = [
        *(row.ratio_limit, (high - low) / 2, row.ratio_forward, row.ratio_forward_backward, row.ratio_peak_memory),
        *([row.ratio_peer] if peers else []),
    ]
    passes = row.passes or ""
    for long, short in _SHORT.items():
        passes = passes.replace(long, short)
    return [_name(row), *("" if number is None else f"{number:.2f}" for number in numbers), passes]


def _name(row: SpeedRow) -> str:
    return row.method if row.peer is None else f"{row.method} by {row.peer}"
