"""Seconds of jobs that are run in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

Job = Callable[[], object]


def time_in_turn(jobs: Mapping[str, Job], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every job in every repetition; each repetition runs every job once, in turn.

    Nothing warms up here: whoever calls this has run every job before.

    Args:
        jobs: what is timed, by name.
        repeats: how often.
        device: where the jobs run, which decides what a second is.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            seconds[name].append(seconds_of(job, device))
    return seconds


def seconds_of(job: Job, device: torch.device) -> float:
    """Processor time of all threads; on other devices the time on the clock until everything there is done."""
    if device.type == "cpu":
        start = time.process_time()
        job()
        return time.process_time() - start
    _wait_for(device)
    start = time.perf_counter()
    job()
    _wait_for(device)
    return time.perf_counter() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread per operation: threads that wait for each other use processor time without doing anything."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
