"""Work on the model: one thread does it, in the order it was asked for; it tells how far it is and can be stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from torch import nn

from vitreous.errors import VitreousError
from vitreous.web.memory import Tidying, resident_bytes

MOST_WAITING = 64
_ENOUGH_PASSES = 3  # to tell how fast a model is, if they took a second
_ENOUGH_QUICK_PASSES = 8


@dataclass(frozen=True)
class Limits:
    """What one request may take.

    Attributes:
        seconds: From the moment that its turn comes.
        memory_bytes: Beyond what the server has, its models included, when work on the model begins.
    """

    seconds: float = 120.0
    memory_bytes: int = 2 * 2**30


class CancelledError(VitreousError):
    """Somebody asked for the work to be stopped."""


class BudgetError(VitreousError):
    """A request takes more time or memory than the server gives."""


class BusyError(VitreousError):
    """More work is waiting than will be done in a reasonable time."""


@dataclass
class Pace:
    """How long a model takes: the seconds of a forward pass on one image or text, the fastest so far.

    The first pass of a model takes many times as long as the others, so nothing is told by one or two.
    """

    _fastest: float = math.inf
    _passes: int = 0
    _seconds: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Of one image or text; ``None`` while too little is known."""
        enough = _ENOUGH_PASSES if self._seconds > 1 else _ENOUGH_QUICK_PASSES
        return self._fastest if self._passes >= enough else None

    def add(self, images: int, seconds: float) -> None:
        """Note how long a pass took."""
        self._fastest = min(self._fastest, seconds / max(1, images))
        self._passes += 1
        self._seconds += seconds


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
        limits: What it may take; ``None`` for as much as it wants.
        pace: How fast the model is.
        runs_again: Whether a method is at work that asks the model many times: these passes tell how fast it is, in
            batches and with what the method records.
    """

    stage: str = "waiting"
    asked: int = 0
    things: str = "images"
    expected: int | None = None
    future: Future[Any] = field(default_factory=Future)
    seconds: float = 0.0
    limits: Limits | None = None
    pace: Pace = field(default_factory=Pace)
    runs_again: bool = False
    _stop: Event = field(default_factory=Event)
    _began: float | None = None
    _memory: int | None = None
    _forward_passes: float = 0.0
    _advice: str = ""

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
            BudgetError: it takes more than it may.
        """
        if self.cancelled:
            raise CancelledError("Stopped.")
        if self.limits is None:
            return
        if self._began is not None and time.monotonic() - self._began > self.limits.seconds:
            raise BudgetError(
                f"Stopped after {self.limits.seconds:g} s, which is all that a request may take on this server: "
                "choose fewer or quicker methods."
            )
        now = resident_bytes()
        if self._memory is not None and now is not None and now - self._memory > self.limits.memory_bytes:
            raise BudgetError(
                f"Stopped: this takes more than {self.limits.memory_bytes / 2**20:.0f} MB of memory, which is all that "
                "a request may take on this server."
            )

    @property
    def estimate(self) -> float | None:
        """How many seconds it will take, where that is known."""
        each = self.pace.seconds
        return None if each is None or not self._forward_passes else each * self._forward_passes

    def expect(self, forward_passes: float, advice: str) -> None:
        """Say what lies ahead, in the time of so many forward passes, and what to do where that is too much.

        Raises:
            BudgetError: it is.
        """
        self._forward_passes, self._advice = forward_passes, advice
        self._check_estimate()

    def passed(self, images: int, seconds: float) -> None:
        """Note how long a forward pass took.

        Raises:
            BudgetError: it tells that the work ahead would take too long.
        """
        if not self.runs_again:
            return
        told_before = self.pace.seconds is not None
        self.pace.add(images, seconds)
        if not told_before:
            self._check_estimate()

    def start(self, limits: Limits | None) -> None:
        """Say that its turn has come."""
        self.limits, self._began = limits, time.monotonic()

    def start_model(self) -> None:
        """Say that the model is there and its work begins: from here on memory counts."""
        self._memory = resident_bytes()

    def _check_estimate(self) -> None:
        if self.limits is not None and self.estimate is not None and self.estimate > self.limits.seconds:
            raise BudgetError(
                f"About {self.estimate:.0f} s, more than the {self.limits.seconds:g} s that a request may take on "
                f"this server: {self._advice}"
            )

    def begin(self, stage: str, expected: int | None = None) -> None:
        """Say what comes next, and how many images the model will be asked about."""
        self.check()
        self.stage, self.asked, self.expected = stage, 0, expected


class Worker:
    """The one thread that runs models, so that visitors cannot disturb each other's runs or add up their memory.

    Args:
        limits: What every piece of work may take; ``None`` for as much as it wants.

    Attributes:
        tidy: Gives free memory back to the system, after work on the model and after drawing.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits, self.tidy = limits, Tidying()
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
        job.start(self.limits)
        try:
            job.check()
            return work(job)
        finally:
            job.seconds = time.monotonic() - start
            self.tidy()
            with self._lock:
                self._waiting.remove(job)


@contextmanager
def watched(network: nn.Module, job: Job, count: Callable[[int], None]) -> Iterator[None]:
    """Count what a network is asked about, images or texts, and stop between its modules when the job is to be stopped.

    The hooks are taken away again whatever happens, so that a stopped run leaves the network as it was.
    """
    began = 0.0

    def size(inputs: tuple[Any, ...], named: dict[str, Any]) -> int:
        return len(inputs[0] if inputs else named.get("input_ids", [None]))

    def asked(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal began
        job.check()
        images = size(inputs, named)
        job.asked += images
        count(images)
        began = time.monotonic()

    def answered(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        job.passed(size(inputs, named), time.monotonic() - began)

    def between(_: nn.Module, __: tuple[Any, ...]) -> None:
        job.check()

    job.start_model()
    hooks = [network.register_forward_pre_hook(asked, with_kwargs=True)]
    hooks += [network.register_forward_hook(answered, with_kwargs=True)]
    try:
        hooks += [part.register_forward_pre_hook(between) for part in network.modules() if part is not network]
        yield
    finally:
        for hook in hooks:
            hook.remove()
