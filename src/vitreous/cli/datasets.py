"""``vitreous datasets``: which data sets can be evaluated on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import print_json, results
from vitreous.cli.guard import DebugOption


def datasets(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _debug: DebugOption = False,
) -> None:
    """List the kinds of data sets that --data KIND:PATH takes, and what is expected at the path."""
    from vitreous.datasets import list_datasets  # noqa: PLC0415  # imports numpy and Pillow

    listed = list_datasets()
    if as_json:
        print_json([{"kind": kind, "help": text} for kind, text in listed.items()])
        return
    table = Table(box=None)
    table.add_column("--data", no_wrap=True, style="bold")
    table.add_column("what is expected at PATH")
    for kind, text in listed.items():
        table.add_row(Text(f"{kind}:PATH"), Text(text))
    results().print(table)
