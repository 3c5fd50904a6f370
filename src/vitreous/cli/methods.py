"""``vitreous methods``: which methods there are, and what each can be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import print_json, results
from vitreous.cli.guard import DebugOption  # noqa: TC001  # typer reads annotations when it runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitreous.methods import MethodInfo, OptionInfo


def methods(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _debug: DebugOption = False,
) -> None:
    """List the explanation methods, with their papers, aggregations and options."""
    from vitreous.methods import list_methods  # noqa: PLC0415  # may import torch: --help must not wait for it

    listed = list_methods()
    if as_json:
        print_json([_as_json(method) for method in listed])
    else:
        console = results()
        console.print(_table(listed))
        console.print(Text("Spelling: name[.aggregation...][:option=value,...]", style="dim"))


def _table(listed: Sequence[MethodInfo]) -> Table:
    table = Table(show_lines=True)
    table.add_column("method", no_wrap=True, style="bold")
    table.add_column("what it is", ratio=3)
    table.add_column("class", no_wrap=True)
    table.add_column("signed", no_wrap=True)
    table.add_column("aggregations", ratio=2)
    table.add_column("options (default first)", ratio=3)
    for method in listed:
        about = Text(f"{method.summary}\n").append(f"{method.paper}, {method.year}", style="dim")
        options = "\n".join(_option(name, option) for name, option in method.options.items())
        table.add_row(
            method.name,
            about,
            "yes" if method.class_specific else "no",
            "yes" if method.signed else "no",
            Text(", ".join(method.aggregations)),
            Text(options),
        )
    return table


def _option(name: str, option: OptionInfo) -> str:
    others = [_value(choice) for choice in option.choices or () if choice != option.default]
    return f"{name}={' | '.join([_value(option.default), *others])}"


def _value(value: object) -> str:
    """Write a value as it is typed in a spelling."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _as_json(method: MethodInfo) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "year": method.year,
        "class_specific": method.class_specific,
        "signed": method.signed,
        "aggregations": list(method.aggregations),
        "options": {
            name: {
                "default": option.default,
                "choices": None if option.choices is None else list(option.choices),
                "help": option.help,
            }
            for name, option in method.options.items()
        },
    }
