"""What ``vitreous evaluate`` prints at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitreous.cli.console import messages, say
from vitreous.cli.progress import steps
from vitreous.evaluation.report.results import summarise
from vitreous.evaluation.report.terminal import as_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.evaluation.report.results import Results


def as_json(results: Results) -> list[dict[str, Any]]:
    """Give one row per method and metric as JSON values."""
    return results.rows()


def show(results: Results, console: Console, *, published: bool = False) -> None:
    """Print the table, and where the rest is."""
    if not results.measured_methods:
        return
    with steps(messages(), "testing methods against each other"):
        table = as_terminal(summarise(results, published=published), console.width)
    console.print(table)
    folder = results.stores[0].folder
    say(console, f"[low, high] are 95% intervals, #1 the rank; every image is in {folder}")
    say(console, f"a page with curves and pictures: vitreous report {folder}", "dim")
