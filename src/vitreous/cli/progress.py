"""A progress bar for more than one photo."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many photos are done, and give the function that counts them; one photo alone needs no bar."""
    columns = (TextColumn("Explaining"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=total < 2) as progress:
        task = progress.add_task("photos", total=total)
        yield lambda count: progress.advance(task, count)
