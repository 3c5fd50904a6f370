"""Time and peak memory of methods as ratios to plain passes of the same model, measured in one interleaved run.

    python benchmarks/methods_against_forward_backward.py [--model vit_base_patch16_224] [--batch 8] [--repeats 5]
        [--methods globenc alti:setting=original ...]

The yardstick is a plain forward + backward to the input with frozen parameters and fused attention. Each repetition
times every job once, in turn, and the median ratio counts. Processor time of one thread is counted, since it does not
depend on what else the machine does.
Peak memory is the growth of the process's resident set over a job, each job in a fresh process (``--memory``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import timm
import torch
from torch import Tensor, nn

import vitreous

USUAL = ["decompx.skipplus", "gae", "ixg.plus", "tokentm", "gradtoken"]
# The three papers' methods and the ones they build on, asked for together.
FOUNDATION = [
    *("raw_attention", "rollout", "attcam", "gae", "gradsam", "gradient", "ixg", "cat", "attixg", "attcat"),
    *("decompx", "tokentm", "gradtoken"),
]


def make(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    """A random model with frozen parameters, and random images."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval().requires_grad_(requires_grad=False)
    size = model.pretrained_cfg["input_size"][-1]
    return model, torch.randn(batch, 3, size, size)


def jobs(model: nn.Module, images: Tensor, methods: Mapping[str, Sequence[str]]) -> Mapping[str, Callable[[], object]]:
    """What is measured, by name; the two yardsticks first."""

    def forward() -> None:
        with torch.no_grad():
            model(images)

    def forward_backward() -> None:
        pixels = images.clone().requires_grad_()
        logits = model(pixels)
        logits.gather(1, logits.argmax(1, keepdim=True)).sum().backward()

    def explain(spellings: Sequence[str]) -> Callable[[], object]:
        return lambda: vitreous.explain(model, images, spellings)

    explained = {name: explain(spellings) for name, spellings in methods.items()}
    return {"forward": forward, "forward+backward": forward_backward, **explained}


def time_all(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every job, interleaved, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, job in work.items():
            start = time.process_time()
            job()
            if repeat:
                seconds[name].append(time.process_time() - start)
    return seconds


def peak_memory(model_name: str, batch: int, methods: Mapping[str, Sequence[str]], job: str) -> int:
    """Growth of the resident set in kB while a job runs twice in a process of its own."""

    def measure(queue: multiprocessing.Queue[int]) -> None:
        model, images = make(model_name, batch)
        with torch.no_grad():
            model(images[:1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work = jobs(model, images, methods)[job]
        for _ in range(2):
            work()
        queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=measure, args=(queue,))
    process.start()
    grown = queue.get()
    process.join()
    return grown


def main() -> None:
    """Print one row per job: time over forward, time over forward + backward, and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--methods", nargs="+", help="spellings, each measured alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{given.model}, batch {given.batch}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    methods = {spelling: [spelling] for spelling in given.methods or USUAL}
    if not given.methods:
        methods[f"{len(FOUNDATION)} methods at once"] = FOUNDATION
    if given.memory:
        # Before torch starts threads in this process: forking after that is not safe.
        names = ("forward", "forward+backward", *methods)
        grown = {name: peak_memory(given.model, given.batch, methods, name) for name in names}
        for name, kilobytes in grown.items():
            ratio = kilobytes / grown["forward+backward"]
            print(f"{name:24s} {kilobytes / 1024:9.0f} MB  {ratio:6.2f} x forward+backward")
        return
    seconds = time_all(jobs(*make(given.model, given.batch), methods), given.repeats)
    for name, measured in seconds.items():
        forward, both = (
            statistics.median(a / b for a, b in zip(measured, seconds[yardstick], strict=True))
            for yardstick in ("forward", "forward+backward")
        )
        print(f"{name:24s} {forward:6.2f} x forward  {both:6.2f} x forward+backward")


if __name__ == "__main__":
    main()
