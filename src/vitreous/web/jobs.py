"""Jobs on the model: one worker thread, limits of time and memory, progress, cancellation, one job per session."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Any

from torch import nn

from vitreous.errors import VitreousError

_MIN_PASSES = 3  # for a time estimate, if they took more than a second
_MIN_FAST_PASSES = 8
_MIN_PROGRESS = 0.02  # of all inputs, before the time left is estimated
_MIN_PROGRESS_SECONDS = 1.0  # before the remaining time is extrapolated
_MIN_GROWTH, _LARGE_GROWTH = 32 * 2**20, 200 * 2**20  # bytes
_TRIM_INTERVAL = 10.0  # seconds
_STATM = Path("/proc/self/statm")


class CancelledError(VitreousError):
    """The job was cancelled."""


class BudgetError(VitreousError):
    """A request needs more time or memory than the server allows."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        seconds: Time on the worker thread; waiting in the queue does not count.
        memory_bytes: Growth of the process's memory after the model is loaded.
    """

    seconds: float = 120.0
    memory_bytes: int = 2 * 2**30


@dataclass
class Throughput:
    """Seconds per image or text of a forward pass: the fastest pass so far.

    The first passes of a model are many times slower than the others, so a few of them give no estimate.
    """

    _fastest: float = math.inf
    _passes: int = 0
    _seconds: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds per input; ``None`` before enough passes were measured."""
        enough = _MIN_PASSES if self._seconds > 1 else _MIN_FAST_PASSES
        return self._fastest if self._passes >= enough else None

    def add(self, inputs: int, seconds: float) -> None:
        """Record the duration of a pass."""
        self._fastest = min(self._fastest, seconds / max(1, inputs))
        self._passes += 1
        self._seconds += seconds


@dataclass
class Job:
    """One piece of work on the worker thread.

    Attributes:
        stage: What is being computed, as shown to the user.
        processed: How many images or texts the model has processed in this stage.
        unit: ``"images"`` or ``"texts"``.
        total: How many the stage needs, where that is known.
        future: The result.
        seconds: How long the job ran, without waiting.
        limits: Its limits; ``None`` for none.
        throughput: The speed of the model.
        measures_speed: Whether a method runs that passes many inputs through the model; only its passes tell the
            speed, because they are batched and recorded as that method does.
        cancelled_by: Who cancelled the job, if known.
    """

    stage: str = "waiting"
    processed: int = 0
    unit: str = "images"
    total: int | None = None
    future: Future[Any] = field(default_factory=Future)
    seconds: float = 0.0
    limits: Limits | None = None
    throughput: Throughput = field(default_factory=Throughput)
    measures_speed: bool = False
    cancelled_by: object = None
    _cancel: Event = field(default_factory=Event)
    _started: float | None = None
    _stage_started: float = field(default_factory=time.monotonic)
    _base_memory: int | None = None
    _forward_passes: float = 0.0
    _advice: str = ""

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled; it may still be running."""
        return self._cancel.is_set()

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the stage ends, extrapolated from what is processed; ``None`` if unknown.

        The plain image runs first, alone; batches of masked ones are counted when they are done.
        """
        elapsed = time.monotonic() - self._stage_started
        few = not self.total or self.processed < max(1, _MIN_PROGRESS * self.total)
        if not self.total or few or elapsed < _MIN_PROGRESS_SECONDS:
            return None
        return elapsed * max(0, self.total - self.processed) / self.processed

    @property
    def estimate(self) -> float | None:
        """Estimated duration of the expected passes; ``None`` if unknown."""
        each = self.throughput.seconds
        return None if each is None or not self._forward_passes else each * self._forward_passes

    def cancel(self, by: object = None) -> None:
        """Cancel the job; it ends before the model's next module runs."""
        if not self.cancelled:
            self.cancelled_by = by
        self._cancel.set()

    def check(self) -> None:
        """End the job here if it was cancelled or exceeds its limits.

        Raises:
            CancelledError: the job was cancelled.
            BudgetError: the job exceeds a limit.
        """
        if self.cancelled:
            raise CancelledError("Stopped.")
        if self.limits is None:
            return
        if self._started is not None and time.monotonic() - self._started > self.limits.seconds:
            raise BudgetError(
                f"Stopped after {self.limits.seconds:g} s, the time limit of this server: "
                "choose fewer or faster methods."
            )
        now = resident_bytes()
        if self._base_memory is not None and now is not None and now - self._base_memory > self.limits.memory_bytes:
            raise BudgetError(
                f"Stopped: this takes more than {self.limits.memory_bytes / 2**20:.0f} MB of memory, "
                "the limit of this server."
            )

    def expect(self, forward_passes: float, advice: str) -> None:
        """Declare the cost of the work ahead, in forward passes, and the advice to give if that is too much.

        Raises:
            BudgetError: it would exceed the time limit.
        """
        self._forward_passes, self._advice = forward_passes, advice
        self._check_estimate()

    def start(self, limits: Limits | None) -> None:
        """Start the clock."""
        self.limits, self._started = limits, time.monotonic()

    def start_stage(self, stage: str, total: int | None = None) -> None:
        """Name the next stage, and how many inputs the model will process in it."""
        self.check()
        self.stage, self.processed, self.total = stage, 0, total
        self._stage_started = time.monotonic()

    def start_model(self) -> None:
        """Start counting memory; the model is loaded by now."""
        self._base_memory = resident_bytes()

    def add_pass(self, inputs: int, seconds: float) -> None:
        """Record a forward pass.

        Raises:
            BudgetError: its duration shows that the work ahead would exceed the time limit.
        """
        self.processed += inputs
        if not self.measures_speed:
            return
        was_known = self.throughput.seconds is not None
        self.throughput.add(inputs, seconds)
        if not was_known:
            self._check_estimate()

    def _check_estimate(self) -> None:
        if self.limits is not None and self.estimate is not None and self.estimate > self.limits.seconds:
            raise BudgetError(
                f"This would take about {self.estimate:.0f} s, more than the limit of {self.limits.seconds:g} s per "
                f"request on this server: {self._advice}"
            )


class Worker:
    """The single thread that runs models. Gradio's queue decides whose turn it is.

    Gradio's own thread pool is not used: OpenMP keeps a pool of threads per calling thread, so 40 callers would
    multiply both threads and memory, and a cancelled request of Gradio's pool runs on while the next one starts.

    Args:
        limits: The limits of every job; ``None`` for none.

    Attributes:
        trim_memory: Returns free memory to the system.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits, self.trim_memory = limits, MemoryTrimmer()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vitreous-model")
        self._lock = Lock()
        self._jobs: list[Job] = []

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Run a function on the thread, after all earlier ones."""
        job = Job()
        with self._lock:
            self._jobs.append(job)
        job.future = self._thread.submit(self._run, work, job)
        return job

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        with self._lock:
            for job in self._jobs:
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
            self.trim_memory()
            with self._lock:
                self._jobs.remove(job)


class SessionJobs:
    """The job of every session. A session has at most one: starting another cancels it.

    Gradio's cancel events are sent by the browser; this holds for any client.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._jobs: dict[str, Job] = {}
        self._lock = Lock()

    def start(self, session: str, work: Callable[[Job], Any], owner: object) -> Job:
        """Submit a job for a session and cancel the session's previous one."""
        with self._lock:
            previous = self._jobs.pop(session, None)
            if previous is not None:
                previous.cancel(owner)
            job = self.worker.submit(work)
            self._jobs[session] = job
        return job

    def cancel(self, session: str, by: object = None) -> None:
        """Cancel the session's job, if there is one."""
        with self._lock:
            job = self._jobs.get(session)
        if job is not None:
            job.cancel(by)

    def finish(self, session: str, job: Job) -> None:
        """Forget a job that has ended."""
        with self._lock:
            if self._jobs.get(session) is job:
                del self._jobs[session]


@contextmanager
def monitored(network: nn.Module, job: Job, count: Callable[[int], None]) -> Iterator[None]:
    """Count the inputs of a network's forward passes, and end the job between modules when it has to end.

    The hooks are removed in any case, so that a cancelled run leaves the network unchanged.
    """
    started = 0.0

    def batch_size(inputs: tuple[Any, ...], named: dict[str, Any]) -> int:
        return len(inputs[0] if inputs else named.get("input_ids", [None]))

    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal started
        job.check()
        count(batch_size(inputs, named))
        started = time.monotonic()

    def after(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        job.add_pass(batch_size(inputs, named), time.monotonic() - started)

    def between(_: nn.Module, __: tuple[Any, ...]) -> None:
        job.check()

    job.start_model()
    hooks = [network.register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [network.register_forward_hook(after, with_kwargs=True)]
    try:
        hooks += [part.register_forward_pre_hook(between) for part in network.modules() if part is not network]
        yield
    finally:
        for hook in hooks:
            hook.remove()


def resident_bytes() -> int | None:
    """Return the resident memory of this process; ``None`` where the system does not report it."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def release_memory() -> None:
    """Return free memory to the system: the C library holds on to it, gigabytes after a large request."""
    gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


class MemoryTrimmer:
    """Releases memory when it has grown considerably, but not all the time: it stops every thread for a moment."""

    def __init__(self) -> None:
        self._baseline, self._last = resident_bytes() or 0, -math.inf
        self._lock = Lock()

    def __call__(self) -> None:
        """Release free memory if enough may be free."""
        with self._lock:
            growth = (resident_bytes() or 0) - self._baseline
            if growth > _LARGE_GROWTH or (growth > _MIN_GROWTH and time.monotonic() - self._last > _TRIM_INTERVAL):
                release_memory()
                # Halfway: what remains may be in use for good, or for a moment longer.
                self._baseline = (self._baseline + (resident_bytes() or 0)) // 2
                self._last = time.monotonic()


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None
