"""``vitreous protocols``: how explanations can be measured."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import print_json, results
from vitreous.cli.guard import DebugOption


def protocols(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _debug: DebugOption = False,
) -> None:
    """List the protocols that --protocol takes, with their papers and metrics."""
    from vitreous.evaluation.protocols import list_protocols  # noqa: PLC0415  # imports torch: --help must not wait for it

    listed = list_protocols()
    if as_json:
        print_json(
            [
                {
                    "name": protocol.name,
                    "title": protocol.title,
                    "paper": protocol.paper,
                    "version": protocol.version,
                    "metrics": [
                        {
                            "name": metric.name,
                            "direction": metric.direction,
                            "range": list(metric.range),
                            "description": metric.description,
                        }
                        for metric in protocol.metrics()
                    ],
                    "settings": protocol.settings(),
                }
                for protocol in listed
            ]
        )
        return
    table = Table(box=None)
    table.add_column("--protocol", no_wrap=True, style="bold")
    table.add_column("what it measures")
    for protocol in listed:
        about = Text(protocol.title)
        about.append(f"\n{protocol.paper}", style="dim")
        about.append(f"\n{', '.join(metric.name for metric in protocol.metrics())}", style="cyan")
        table.add_row(protocol.name, about)
    results().print(table)
