"""Work on the model: one thread does it, in the order it was asked for; it tells how far it is and can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from torch import nn

from vitreous.errors import VitreousError

MOST_WAITING = 64


class CancelledError(VitreousError):
    """Somebody asked for the work to be stopped."""


class BusyError(VitreousError):
    """More work is waiting than will be done in a reasonable time."""


@dataclass
class Job:
    """A piece of work, as those see it who wait for it.

    Attributes:
        stage: What is being done, for the visitor.
        asked: How many images or texts the model has been asked about.
        things: Which of the two.
        expected: How many it will be, where that is known.
        future: What becomes of it.
        seconds: How long it took, from the moment that its turn came.
    """

    stage: str = "waiting"
    asked: int = 0
    things: str = "images"
    expected: int | None = None
    future: Future[Any] = field(default_factory=Future)
    seconds: float = 0.0
    _stop: Event = field(default_factory=Event)

    @property
    def cancelled(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop.is_set()

    @property
    def fraction(self) -> float | None:
        """How much of it is done, where that is known."""
        return None if not self.expected else min(1.0, self.asked / self.expected)

    def cancel(self) -> None:
        """Ask it to stop; it does so before the model's next block."""
        self._stop.set()

    def check(self) -> None:
        """Stop here if that was asked for.

        Raises:
            CancelledError: it was.
        """
        if self.cancelled:
            raise CancelledError("Stopped.")

    def begin(self, stage: str, expected: int | None = None) -> None:
        """Say what comes next, and how many images the model will be asked about."""
        self.check()
        self.stage, self.asked, self.expected = stage, 0, expected


class Worker:
    """The one thread that runs models, so that visitors cannot disturb each other's runs or add up their memory."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vitreous-model")
        self._lock = Lock()
        self._waiting: list[Job] = []

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Have a piece of work done after all that came before it.

        Raises:
            BusyError: too much is waiting already.
        """
        job = Job()
        with self._lock:
            if sum(not other.cancelled for other in self._waiting) >= MOST_WAITING:
                raise BusyError("Too many visitors are waiting; please try again in a minute.")
            self._waiting.append(job)
        job.future = self._thread.submit(self._run, work, job)
        return job

    def before(self, job: Job) -> int:
        """How many pieces of work are done before this one, the running one included; cancelled ones take no time."""
        with self._lock:
            earlier = self._waiting[: self._waiting.index(job)] if job in self._waiting else []
            return sum(not other.cancelled for other in earlier)

    def close(self) -> None:
        """Stop all work and the thread."""
        with self._lock:
            for job in self._waiting:
                job.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[Job], Any], job: Job) -> Any:
        start = time.monotonic()
        try:
            job.check()
            return work(job)
        finally:
            job.seconds = time.monotonic() - start
            with self._lock:
                self._waiting.remove(job)


@contextmanager
def watched(network: nn.Module, job: Job, count: Callable[[int], None]) -> Iterator[None]:
    """Count what a network is asked about, images or texts, and stop between its modules when the job is to be stopped.

    The hooks are taken away again whatever happens, so that a stopped run leaves the network as it was.
    """

    def asked(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        job.check()
        images = len(inputs[0] if inputs else named.get("input_ids", [None]))
        job.asked += images
        count(images)

    def between(_: nn.Module, __: tuple[Any, ...]) -> None:
        job.check()

    hooks = [network.register_forward_pre_hook(asked, with_kwargs=True)]
    try:
        hooks += [part.register_forward_pre_hook(between) for part in network.modules() if part is not network]
        yield
    finally:
        for hook in hooks:
            hook.remove()
