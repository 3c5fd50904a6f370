"""Measure the cost of a job: seconds, passes of the model, and peak memory.

Jobs are timed in turn, so that changes of the machine's load affect all of them. Passes are counted per block. Memory
is read from the allocator and is the same on every machine.
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
    """Return the seconds of every job in every repetition; each repetition runs every job once, in turn.

    There is no warm-up: the caller has run every job before.

    Args:
        jobs: the jobs by name.
        repeats: the number of repetitions.
        device: the device of the jobs: processor time on the CPU, wall time elsewhere.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            seconds[name].append(seconds_of(job, device))
    return seconds


def seconds_of(job: Job, device: torch.device) -> float:
    """Return the processor time of all threads; on other devices the wall time until the device has finished."""
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
    """Use one thread per operation: threads that wait for each other consume processor time."""
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
    """Tokens processed by each block; a pass of half of the images, or of half of their tokens, counts as half.

    Attributes:
        whole: by block, the tokens of one pass of all images.
        forward: by block, the tokens of all forward passes.
        backward: by block, the tokens of all backward passes.
    """

    whole: Sequence[float]
    forward: list[float]
    backward: list[float]

    @property
    def forward_passes(self) -> float:
        """Equivalent number of forward passes of the whole model."""
        return _mean(self._shares(self.forward))

    @property
    def backward_passes(self) -> float:
        """Equivalent number of backward passes through all blocks."""
        return _mean(self._shares(self.backward))

    def __str__(self) -> str:
        """Describe the number of forward passes, and of backward passes by their lowest block."""
        return ", ".join([f"{_number(self.forward_passes)} forward", *self._backward_in_words()])

    def _backward_in_words(self) -> Iterator[str]:
        # Backward passes come from above: if more pass through a block than through the one below, some stop there.
        shares = self._shares(self.backward)
        stopping = [here - below for here, below in zip(shares, [0.0, *shares[:-1]], strict=True)]
        if min(stopping) < -_ROUNDING:  # gradients that start inside the model: only the sum is meaningful
            yield f"{_number(self.backward_passes)} backward"
            return
        for block, count in enumerate(stopping):
            if count > _ROUNDING:
                yield f"{_number(count)} backward" + (f" (from block {block})" if block else "")

    def _shares(self, counts: Sequence[float]) -> list[float]:
        return [count / whole for count, whole in zip(counts, self.whole, strict=True)]


def whole_pass(architecture: Architecture, forward: Job) -> list[float]:
    """Return the tokens of one plain forward pass, by block."""
    with counted_passes(architecture, [1.0] * architecture.depth) as passes:
        forward()
    return passes.forward


@contextmanager
def counted_passes(architecture: Architecture, whole: Sequence[float]) -> Iterator[Passes]:
    """Count the passes through the blocks inside the context.

    A backward pass counts if it passes the last operation of a block, not if it stops at the block's output.
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
        # The input, because the output may have been replaced by an intervention. No torch function is called here: it
        # would be recorded as one more step of the run.
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
    """Return the peak of bytes that a job allocated and had not freed.

    All memory of PyTorch's allocator counts, also inside an operation. Memory allocated before does not count, nor that
    of libraries below PyTorch (oneDNN, MKL).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Kineto logs to standard error, and reports a missing GPU as an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    return _peak(sorted(_changes(results.experimental_event_tree())))


def _changes(events: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield time, size and address of every allocation (> 0 bytes) and deallocation (< 0)."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
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
            held -= taken.pop(address, 0)  # 0 for memory allocated before
    return most
