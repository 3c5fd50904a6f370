"""The most memory that a job holds at a time, as the allocator counts it: the same number on every machine."""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile

from vitreous.speed.timing import Job


def peak_memory(job: Job, device: torch.device) -> int:
    """Bytes of tensors alive at once above those that were alive before.

    Every allocation and release of PyTorch's allocator counts, also those inside one operation. What libraries below it
    (oneDNN, MKL) take for themselves does not.
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
    changes = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most
