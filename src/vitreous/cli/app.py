"""The ``vitreous`` command and what it consists of."""

from __future__ import annotations

from typing import Annotated

import typer

from vitreous import __version__
from vitreous.cli.datasets import datasets
from vitreous.cli.evaluate import evaluate
from vitreous.cli.explain import explain
from vitreous.cli.explain_text import explain_text
from vitreous.cli.figure import figure
from vitreous.cli.guard import DebugOption, GuardedGroup
from vitreous.cli.methods import methods
from vitreous.cli.models import models_app
from vitreous.cli.protocols import protocols
from vitreous.cli.report import report
from vitreous.cli.serve import serve
from vitreous.cli.speed import speed

app = typer.Typer(
    name="vitreous",
    help="See through Vision Transformers: which parts of a picture made the model say this class?",
    cls=GuardedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(explain)
app.command()(explain_text)
app.command()(figure)
app.command()(serve)
app.command()(evaluate)
app.command()(report)
app.command()(speed)
app.command()(methods)
app.add_typer(models_app, name="models")
app.command()(protocols)
app.command()(datasets)


def _show_version(value: bool) -> None:  # noqa: FBT001  # typer's signature
    if value:
        typer.echo(f"vitreous {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    _debug: DebugOption = False,
) -> None:
    """See through Vision Transformers: which parts of a picture made the model say this class?"""
