"""``--plugin``: methods from a file of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

PluginOption = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="A Python file that registers methods of your own; see the docs."),
]


def load_plugins(files: Sequence[Path]) -> None:
    """Load installed plugins and the files that were named."""
    from vitreous.plugin import load_entry_points, load_plugin  # noqa: PLC0415  # imports torch

    load_entry_points()
    for file in files:
        load_plugin(file)
