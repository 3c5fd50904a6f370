"""Who waits for what: at most one piece of work for each visitor, a new one stops the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from threading import Lock
from typing import Any

from vitreous.web.jobs import Job, Worker
from vitreous.web.listeners import Listeners

_LOOK_EVERY = 0.15  # seconds
_FIRST_LOOKS = (0.01, 0.02, 0.04, 0.08)  # quick work is seen quickly


class Visitors:
    """The running work of every visitor.

    Args:
        worker: Who does it.
        listeners: Who reads the answers.

    Attributes:
        tidy: Gives free memory back to the system.
    """

    def __init__(self, worker: Worker, listeners: Listeners) -> None:
        self._worker, self.listeners, self.tidy = worker, listeners, worker.tidy
        self._jobs: dict[str, Job] = {}
        self._lock = Lock()

    def begin(self, visitor: str, work: Callable[[Job], Any]) -> Job:
        """Start work for a visitor; what they waited for before is stopped."""
        with self._lock:
            before = self._jobs.pop(visitor, None)
            if before is not None:
                before.cancel()
            job = self._worker.submit(work)
            self._jobs[visitor] = job
        return job

    def stop(self, visitor: str) -> None:
        """Stop what a visitor waits for, if there is anything."""
        with self._lock:
            job = self._jobs.get(visitor)
        if job is not None:
            job.cancel()

    def superseded(self, visitor: str, job: Job) -> bool:
        """Whether the visitor has asked for something else since."""
        with self._lock:
            return self._jobs.get(visitor) is not job

    def finish(self, visitor: str, job: Job) -> None:
        """Forget work that is done."""
        with self._lock:
            if self._jobs.get(visitor) is job:
                del self._jobs[visitor]

    async def follow(self, job: Job) -> AsyncIterator[int]:
        """Look at work until it is done; each time give how much is done before it. Whoever stops looking stops it."""
        looks = iter(_FIRST_LOOKS)
        try:
            while not job.future.done():
                await asyncio.sleep(next(looks, _LOOK_EVERY))
                if not job.future.done():
                    yield self._worker.before(job)
        finally:
            if not job.future.done():
                job.cancel()
