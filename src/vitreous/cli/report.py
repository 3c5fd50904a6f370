"""``vitreous report``: what evaluations have found, as one page or as tables."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import messages, results, say, say_warning
from vitreous.cli.guard import DebugOption
from vitreous.cli.options import PublishedOption
from vitreous.cli.progress import steps


class Format(StrEnum):
    """How results are written."""

    HTML = "html"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


def report(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or the --out of `vitreous evaluate` with many runs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The file to write.", show_default="DIR/report.html; tables are printed"),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="A page, or tables for other documents.")] = Format.HTML,
    pictures: Annotated[
        int, typer.Option(min=0, help="How many of the best and of the worst images the page shows of a method.")
    ] = 3,
    published: PublishedOption = False,
    p_values: Annotated[
        bool, typer.Option("--p-values", help="Tables also have the paired test of every method against the best one.")
    ] = False,
    _debug: DebugOption = False,
) -> None:
    """Write what was measured as one page that needs nothing else: tables, curves, radar chart, best and worst images.

    Runs of the same protocol, model and data set are one table; one that is not finished stands in a table of its own.
    """
    from vitreous.evaluation.report.documents import write_document  # noqa: PLC0415  # imports torch
    from vitreous.evaluation.report.results import discover_runs  # noqa: PLC0415
    from vitreous.paths import expanded  # noqa: PLC0415
    from vitreous.storage import write_text  # noqa: PLC0415

    folder = expanded(folder)
    console = messages()
    with steps(console, f"reading the runs in {folder}") as step:
        found = discover_runs(folder, say_warning)
        step("writing tables and tests")
        text = write_document(found, form.value, pictures=pictures, published=published, p_values=p_values)
    if out is None and form is not Format.HTML:
        sys.stdout.write(text)
        return
    place = folder / "report.html" if out is None else expanded(out)
    write_text(place, text)
    say(results(), f"report: {place}")
