"""``vitreous models``: which models can be asked for by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import print_json, results, say
from vitreous.cli.guard import DebugOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _debug: DebugOption = False,
) -> None:
    """List the kinds of model names that --model takes."""
    from vitreous.models import list_models  # noqa: PLC0415  # imports torch: --help must not wait for it

    listed: Any = list_models()
    if as_json:
        print_json(listed)
        return
    console = results()
    console.print(_table(listed["names"]))
    say(console, f"timm knows {listed['timm_vision_transformers']} Vision Transformers by name.", "dim")


def _table(names: Iterable[Mapping[str, str]]) -> Table:
    table = Table(box=None)
    table.add_column("--model", no_wrap=True, style="bold")
    table.add_column("what it is")
    for kind in names:
        table.add_row(Text(kind["name"]), Text(kind["help"]))
    return table
