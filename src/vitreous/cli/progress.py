"""What a command is doing: a bar or a line that goes away on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitreous.cli.console import one_line, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_UNTIL_REPEATED = 30.0  # of a step that goes on and on


@contextmanager
def steps(console: Console, first: str = "") -> Iterator[Callable[[str], None]]:
    """Give the function that is told what is done next.

    Without a terminal a line is printed when a step has begun since the last one, at most every few seconds, and now
    and then while a step goes on; a command that takes less than these seconds prints nothing.
    """
    if console.is_terminal:
        with console.status(escape(one_line(first))) as status:
            yield lambda text: status.update(escape(one_line(text)))
        return
    lines = _Lines(console, first)
    lines.start()
    try:
        yield lines.step
    finally:
        lines.stop()


class _Lines(threading.Thread):
    """Prints the present step from time to time, whatever the command itself waits for."""

    def __init__(self, console: Console, first: str) -> None:
        super().__init__(name="vitreous-progress", daemon=True)
        self._console, self._text = console, first
        self._begun = time.monotonic()
        self._stopped = threading.Event()

    def step(self, text: str) -> None:
        """Another step begins."""
        self._begun, self._text = time.monotonic(), text

    def stop(self) -> None:
        """Print no more; what is being printed is finished first."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Print until stopped."""
        shown, when = "", 0.0
        while not self._stopped.wait(_SECONDS_BETWEEN_LINES):
            text, now = self._text, time.monotonic()
            if not text or (text == shown and now - when < _SECONDS_UNTIL_REPEATED):
                continue
            since = f" (for {now - self._begun:.0f} s)" if text == shown else ""
            say(self._console, f"{text}{since}")
            shown, when = text, now


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many photos are done, and give the function that counts them; one photo alone needs no bar."""
    if not console.is_terminal:
        with _counted(console, total) as advance:
            yield advance
        return
    columns = (TextColumn("Explaining"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=total < 2) as progress:
        task = progress.add_task("photos", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _counted(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with steps(console, f"explaining, 0 of {total} done") as step:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            step(f"explaining, {done} of {total} done")

        yield advance
