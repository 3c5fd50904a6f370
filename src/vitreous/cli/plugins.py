"""``--plugin``: methods from a file of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PluginOption = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="A Python file that registers methods of your own; see the docs."),
]
