"""The most memory that a job holds at a time, as the allocator counts it: the same number on every machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vitreous.speed.timing import Job


def peak_memory(job: Job, device: torch.device) -> int:
    """Bytes that the job took and had not given back, at the most.

    Everything that PyTorch's allocator gives counts, also inside one operation. What was there before does not, nor
    what libraries below it (oneDNN, MKL) take for themselves.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's library reports on standard error, and that a machine has no GPU as an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    return _peak(sorted(_changes(results.experimental_event_tree())))


def _changes(events: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """When memory was taken (> 0 bytes) or given back (< 0), and at which address."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        kind, details = event.typed
        if kind.name == "Allocation":
            yield event.start_time_ns, details.alloc_size, details.ptr


def _peak(changes: Sequence[tuple[int, int, int]]) -> int:
    taken: dict[int, int] = {}
    held = most = 0
    for _, size, address in changes:
        if size > 0:
            taken[address] = size
            held += size
            most = max(most, held)
        else:
            held -= taken.pop(address, 0)  # of what was there before, nothing
    return most
