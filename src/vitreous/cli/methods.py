"""``vitreous methods``: which methods there are, and what each can be asked for."""

from __future__ import annotations

from typing import Annotated

import typer

from vitreous.cli.console import print_json, results
from vitreous.cli.guard import DebugOption
from vitreous.cli.plugins import PluginOption


def methods(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plugin: PluginOption = None,
    _debug: DebugOption = False,
) -> None:
    """List the explanation methods, with their papers, aggregations and options."""
    from vitreous.cli import methods_report  # noqa: PLC0415  # imports torch: --help must not wait for it
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    if as_json:
        print_json(methods_report.as_json())
    else:
        methods_report.show(results())
