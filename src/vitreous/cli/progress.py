"""Progress on standard error: a bar or a status line on a terminal, plain lines at intervals elsewhere."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitreous.cli.console import one_line, print_line, print_warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from vitreous.evaluation.store.store import Store

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_UNTIL_REPEATED = 30.0  # of the same step
_SECONDS_BETWEEN_COUNTS = 30.0  # of an evaluation


@contextmanager
def steps(console: Console, first: str = "") -> Iterator[Callable[[str], None]]:
    """Show the current step; the function yielded sets the next one.

    Without a terminal, a line is printed at most every few seconds and only when the step has changed, or when it has
    lasted long. A short command prints nothing.
    """
    if console.is_terminal:
        with console.status(escape(one_line(first))) as status:
            yield lambda text: status.update(escape(one_line(text)))
        return
    lines = _StepLines(console, first)
    lines.start()
    try:
        yield lines.set_step
    finally:
        lines.stop()


class _StepLines(threading.Thread):
    """A thread that prints the current step at intervals."""

    def __init__(self, console: Console, first: str) -> None:
        super().__init__(name="vitreous-progress", daemon=True)
        self._console, self._text = console, first
        self._step_started = time.monotonic()
        self._stopped = threading.Event()

    def set_step(self, text: str) -> None:
        """Start another step."""
        self._step_started, self._text = time.monotonic(), text

    def stop(self) -> None:
        """Stop printing; a line in progress is finished first."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Print until stopped."""
        shown, when = "", 0.0
        while not self._stopped.wait(_SECONDS_BETWEEN_LINES):
            text, now = self._text, time.monotonic()
            if not text or (text == shown and now - when < _SECONDS_UNTIL_REPEATED):
                continue
            since = f" (for {now - self._step_started:.0f} s)" if text == shown else ""
            print_line(self._console, f"{text}{since}")
            shown, when = text, now


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many images are explained; the function yielded adds to the count. A single image gets no bar."""
    if not console.is_terminal:
        with _counted_steps(console, total) as advance:
            yield advance
        return
    columns = (TextColumn("Explaining"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=total < 2) as progress:
        task = progress.add_task("images", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _counted_steps(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with steps(console, f"explaining, 0 of {total} done") as step:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            step(f"explaining, {done} of {total} done")

        yield advance


class EvaluationProgress:
    """Progress of an evaluation: images or texts done, rate and remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store: Store | None = None
        self._before = self._done = 0
        self._started = self._printed = time.monotonic()
        columns = (TextColumn("Evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("images", total=None, rate="")
        self._preparing = ExitStack()  # the step shown before the run begins, without a terminal

    def __enter__(self) -> Self:
        if self._bar.disable:
            self._preparing.enter_context(steps(self._console, "loading the model and reading the data set"))
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._preparing.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._store is not None:
            run = self._store.run
            done = f"{self._done} of {run.wanted} {run.things}"
            print_line(self._console, f"stopped after {done}; run the same command to resume")

    def begin(self, store: Store, done: int) -> None:
        """Show the folder of the run and what it already holds; a second call only resets the count."""
        self._preparing.close()
        if self._store is None:
            run = store.run
            print_line(self._console, f"run: {store.folder} ({len(run.methods)} methods, {run.wanted} {run.things})")
            if done:
                # All shards but the last one are full, so the number of images gives the number of shards.
                stored = math.ceil(done / run.shard_size)
                print_line(
                    self._console, f"resumed: {stored} of {len(run.shards())} shards are there, {done} {run.things}"
                )
            self._started = self._printed = time.monotonic()
            self._before = done
        self._store, self._done = store, done
        self._bar.update(self._task, total=store.run.wanted, completed=done)

    def advance(self, images: int) -> None:
        """Add images to the count."""
        if not images or self._store is None:
            return
        run = self._store.run
        self._done += images
        self._bar.update(self._task, completed=self._done, rate=self._rate())
        if self._bar.disable and time.monotonic() - self._printed >= _SECONDS_BETWEEN_COUNTS:
            self._printed = time.monotonic()
            print_line(self._console, f"{self._done} of {run.wanted} {run.things}, {self._rate()}")

    def notice(self, text: str) -> None:
        """Print a warning."""
        print_warning(text, self._console)

    def _rate(self) -> str:
        assert self._store is not None
        run = self._store.run
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = (self._done - self._before) / seconds
        left = timedelta(seconds=round((run.wanted - self._done) / rate)) if rate else "unknown"
        return f"{rate:.2f} {run.things}/s, {left} left"
