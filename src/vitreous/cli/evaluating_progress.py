"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vitreous.cli.console import say, say_warning
from vitreous.cli.progress import steps

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.evaluation.store.store import Store

_SECONDS_BETWEEN_LINES = 30.0


class EvaluationProgress:
    """Shows images or texts done, how many per second and the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store: Store | None = None
        self._before = self._done = 0
        self._started = self._said = time.monotonic()
        columns = (TextColumn("Evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("images", total=None, rate="")
        self._preparing = ExitStack()  # without a terminal: what is done before the run begins

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
            total = self._store.run.wanted
            done = f"{self._done} of {total} {self._store.run.things}"
            say(self._console, f"stopped with {done} done; the same command goes on from there")

    def begin(self, store: Store, done: int) -> None:
        """Show where the run is kept and how much of it is there; told again, it only counts anew."""
        self._preparing.close()
        if self._store is None:
            shards = store.run.shards()
            planned = f"{len(store.run.methods)} methods, {store.run.wanted} {store.run.things}"
            say(self._console, f"run: {store.folder} ({planned})")
            if done:
                # All shards but the last one are full, so images that are done say how many shards are.
                stored = math.ceil(done / store.run.shard_size)
                there = f"{stored} of {len(shards)} shards are there, {done} {store.run.things}"
                say(self._console, f"resumed: {there}")
            self._started = self._said = time.monotonic()
            self._before = done
        self._store, self._done = store, done
        self._bar.update(self._task, total=store.run.wanted, completed=done)

    def advance(self, images: int) -> None:
        """Count images."""
        if not images or self._store is None:
            return
        self._done += images
        self._bar.update(self._task, completed=self._done, rate=self._rate())
        if self._bar.disable and time.monotonic() - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            say(self._console, f"{self._done} of {self._store.run.wanted} {self._store.run.things}, {self._rate()}")

    def notice(self, text: str) -> None:
        """Print a warning."""
        say_warning(text, self._console)

    def _rate(self) -> str:
        assert self._store is not None
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = (self._done - self._before) / seconds
        left = timedelta(seconds=round((self._store.run.wanted - self._done) / rate)) if rate else "unknown"
        return f"{rate:.2f} {self._store.run.things}/s, {left} left"
