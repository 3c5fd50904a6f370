"""What a job costs: seconds, passes of the model, and peak memory.

Jobs are timed in turn, so that a machine that slows down slows all of them. Passes are counted block by block. Memory
is what the allocator counts, the same number on every machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from vitreous.architecture import Architecture
from vitreous.architecture.trace import tensors_in

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


_ROUNDING = 1e-6


@dataclass
class Passes:
    """What went through each block, in tokens of images; a pass of half of the images, or of their tokens, is half one.

    Attributes:
        whole: by block, what one pass of all images takes through it.
        forward: by block, what went through it.
        backward: by block, what the gradient went through.
    """

    whole: Sequence[float]
    forward: list[float]
    backward: list[float]

    @property
    def forward_passes(self) -> float:
        """Forward passes of the whole model, in work."""
        return _mean(self._shares(self.forward))

    @property
    def backward_passes(self) -> float:
        """Backward passes through all blocks, in work."""
        return _mean(self._shares(self.backward))

    def __str__(self) -> str:
        """In words: how many forward passes, and how many backward passes from which block on."""
        return ", ".join([f"{_number(self.forward_passes)} forward", *self._backward_in_words()])

    def _backward_in_words(self) -> Iterator[str]:
        # What goes through a block comes from above: where more goes through than through the block below, some stop.
        shares = self._shares(self.backward)
        stopping = [here - below for here, below in zip(shares, [0.0, *shares[:-1]], strict=True)]
        if min(stopping) < -_ROUNDING:  # gradients that start inside: only the sum says something
            yield f"{_number(self.backward_passes)} backward"
            return
        for block, count in enumerate(stopping):
            if count > _ROUNDING:
                yield f"{_number(count)} backward" + (f" (from block {block})" if block else "")

    def _shares(self, counts: Sequence[float]) -> list[float]:
        return [count / whole for count, whole in zip(counts, self.whole, strict=True)]


def whole_pass(architecture: Architecture, forward: Job) -> list[float]:
    """What one plain forward pass takes through each block."""
    with counted_passes(architecture, [1.0] * architecture.depth) as passes:
        forward()
    return passes.forward


@contextmanager
def counted_passes(architecture: Architecture, whole: Sequence[float]) -> Iterator[Passes]:
    """Count what anybody sends through the blocks while this is open.

    A backward pass counts where the last step of a block is really undone, not where a gradient stops at its output.
    """
    passes = Passes(whole, [0.0] * architecture.depth, [0.0] * architecture.depth)
    with ExitStack() as hooks:
        for number, block in enumerate(architecture.blocks):
            if block.module is not None:
                hooks.enter_context(block.module.register_forward_hook(_counting(passes, number), with_kwargs=True))
        yield passes


def _counting(passes: Passes, number: int) -> Callable[..., None]:
    def count(module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        del module
        stream = output[0] if isinstance(output, tuple) else output
        assert isinstance(stream, Tensor)
        # What it got: another stream may have been put in the place of what it gave. No call of torch is made, which
        # would be one more step of the run.
        tokens = next(tensors_in((arguments, named)), stream).shape[:-1].numel()
        passes.forward[number] += tokens
        if stream.grad_fn is not None:
            stream.grad_fn.register_prehook(lambda _: undo(tokens))

    def undo(tokens: int) -> None:
        passes.backward[number] += tokens

    return count


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


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
