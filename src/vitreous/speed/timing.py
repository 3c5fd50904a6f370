"""Measure the cost of a job: seconds, passes of the model, and peak memory; one row per method or peer.

Jobs are timed in turn, so that changes of the machine's load affect all of them. Passes are counted per block. Memory
is read from the allocator and is the same on every machine. Baselines are plain passes of the same model on the same
images.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from vitreous.architecture import Architecture
from vitreous.architecture.trace import tensors_in
from vitreous.tape import PIXELS, Needs
from vitreous.tape.output import class_scores


class Ratio(NamedTuple):
    """The median of the ratios of single repetitions, with the 25th and 75th percentile."""

    median: float
    low: float
    high: float


class Agreement(NamedTuple):
    """Agreement of a peer's map with ours.

    Attributes:
        agrees: whether the maps are equal up to rounding.
        correlation: over all patches of all images; None for a constant map.
        largest_difference: relative to the largest value of our map.
    """

    agrees: bool
    correlation: float | None
    largest_difference: float


@dataclass(frozen=True)
class SpeedRow:
    """The cost of one job. Numbers that were not measured are None.

    Attributes:
        method: the spelling, or the number of methods in one call.
        ratio_forward: time over that of a plain forward pass without a graph.
        ratio_forward_backward: time over that of a plain forward pass and a backward pass to the pixels.
        ratio_limit: time over that of the minimum of plain passes that the method needs.
        ratio_peak_memory: peak of allocated memory over that of a plain forward and backward pass.
        passes: the passes that were counted.
        limit: the passes that ``ratio_limit`` is relative to.
        peer: the library that implements the method; None for vitreous.
        ratio_peer: the peer's time over ours.
        agreement: of the peer's map with ours.
        spread: 25th and 75th percentile over the repetitions, by name of a ratio of times.
        reason: why there are no numbers.
        milliseconds: median time of the whole batch, on this machine.

    Examples:
        >>> from vitreous.speed import SpeedRow
        >>> SpeedRow("gae", ratio_forward=3.1).ratio_forward
        3.1
    """

    method: str
    ratio_forward: float | None = None
    ratio_forward_backward: float | None = None
    ratio_limit: float | None = None
    ratio_peak_memory: float | None = None
    passes: str | None = None
    limit: str | None = None
    peer: str | None = None
    ratio_peer: float | None = None
    agreement: Agreement | None = None
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    reason: str | None = None
    milliseconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values, rounded to four digits."""
        row = {name: _rounded(value) for name, value in asdict(self).items()}
        row["agreement"] = None if self.agreement is None else _rounded(self.agreement._asdict())
        return row


def ratio_of(seconds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the ratio of two jobs that were timed in turn, taken within each repetition."""
    ratios = [one / other for one, other in zip(seconds, baseline, strict=True)]
    if len(ratios) == 1:
        return Ratio(*ratios * 3)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


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


FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True)
class PlainModel:
    """A model without recording: fused attention, frozen parameters."""

    network: nn.Module
    architecture: Architecture
    images: Tensor
    target: Tensor

    def forward(self) -> Tensor:
        """Run one forward pass without a graph."""
        with torch.no_grad():
            return class_scores(self.network(self.images), self.architecture.name, len(self.images))

    def forward_backward(self) -> Tensor:
        """Run one forward pass with a graph, and return the gradient of the target at the pixels."""
        (gradient,) = self.to_blocks((PIXELS,))
        return gradient

    def to_blocks(self, lowest: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Run one forward pass whose graph starts at the lowest of these blocks, and a backward pass to each."""
        entering: dict[int, Tensor] = {}
        start = min(lowest)
        pixels = self.images.clone().requires_grad_() if start == PIXELS else self.images
        entering[PIXELS] = pixels
        with ExitStack() as hooks:
            for layer in set(lowest) - {PIXELS}:
                block = self.architecture.blocks[layer].module
                assert block is not None, f"block {layer} is no module"
                hook = _remember(entering, layer, starts=layer == start)
                hooks.enter_context(block.register_forward_pre_hook(hook))
            output = self.network(pixels)
        logits = class_scores(output, self.architecture.name, len(pixels))
        chosen = logits.gather(1, self.target[:, None]).sum()
        last = len(lowest) - 1
        return tuple(
            torch.autograd.grad(chosen, entering[layer], retain_graph=number < last)[0]
            for number, layer in enumerate(lowest)
        )


def _remember(entering: dict[int, Tensor], layer: int, *, starts: bool) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        stream = arguments[0].detach().requires_grad_() if starts else arguments[0]
        entering[layer] = stream
        return (stream, *arguments[1:])

    return hook


@dataclass(frozen=True)
class Limit:
    """The minimum of plain passes that a method needs.

    Attributes:
        lowest: the lowest block that each backward pass has to reach; empty if a forward pass is enough.
    """

    lowest: tuple[int, ...]

    @property
    def name(self) -> str:
        """Description of the passes."""
        ends = ["backward" + ("" if layer == PIXELS else f" (from block {layer})") for layer in self.lowest]
        return " + ".join(["forward", *ends])

    def job(self, plain: PlainModel) -> Callable[[], object]:
        """Return a function that runs the passes."""
        return (lambda: plain.to_blocks(self.lowest)) if self.lowest else plain.forward

    def seconds(self, seconds: Mapping[str, Sequence[float]]) -> Sequence[float]:
        """Look up their times among those of all jobs."""
        return seconds[self.name]


@dataclass(frozen=True)
class CountedLimit:
    """As many plain passes as were counted, for methods that run the model many times.

    The ratio measures the overhead besides the passes, not whether fewer passes would suffice.
    """

    passes: Passes

    @property
    def name(self) -> str:
        """Description of the passes."""
        return f"the same passes, plain: {self.passes}"

    def seconds(self, seconds: Mapping[str, Sequence[float]]) -> list[float]:
        """F forward + B (forward and backward - forward), from the times of the two plain jobs."""
        forwards, backwards = self.passes.forward_passes, self.passes.backward_passes
        return [
            forwards * forward + backwards * (both - forward)
            for forward, both in zip(seconds[FORWARD], seconds[BOTH], strict=True)
        ]


def limit_of(needs: Needs, depth: int) -> Limit:
    """Return the limit of methods that read one recorded run: one plain backward pass for each of theirs.

    Gradients after the last block cost no more than the head, so their limit is the forward pass.
    """
    found = (part.lowest for part in needs.gradients.values())
    return Limit(tuple(sorted((layer for layer in found if layer is not None and layer < depth), reverse=True)))
