"""Time and peak memory of methods against forward + backward while the number of tokens grows, with fitted exponents.

    python benchmarks/growth_with_tokens.py [--model vit_tiny_patch16_224] [--cases 224:16 384:16 224:8 384:8]
        [--methods gae decompx ...] [--repeats 3] [--json FILE]

Without ``--methods`` all that read one recorded run are measured. A case is pixels:patch, for one picture.

Memory is the peak of what the allocator had given out during one job, beyond what there was before it, as the profiler
reports every allocation, those inside of operations included. Processor time of one thread is the median of
``--repeats`` runs, taken in turn with forward + backward; above ``--once`` tokens it is that of the profiled run
itself, whose few thousand events weigh nothing against seconds. An exponent is the slope of a straight line through the
logarithms of all cases: 1 grows with the tokens, 2 with their square.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from rows import median_ratio, seconds, time_in_turn, write_rows
from torch import Tensor, nn

import vitreous
from vitreous.methods import list_methods
from vitreous.methods.spelling import cost_of
from vitreous.speed.timing import peak_memory

YARDSTICK = "forward+backward"


def peak_of(job: Callable[[], object]) -> tuple[int, float]:
    """The peak of allocated bytes beyond those before the job, and its seconds."""
    took: list[float] = []
    peak = peak_memory(lambda: took.append(seconds(job)), torch.device("cpu"))
    return peak, took[0]


def baseline(model: nn.Module, image: Tensor) -> Callable[[], object]:
    """A plain forward and backward pass to the input, with frozen parameters and fused attention."""

    def job() -> None:
        pixels = image.clone().requires_grad_()
        model(pixels)[:, 0].sum().backward()

    return job


def measure(
    model: nn.Module, image: Tensor, spellings: Sequence[str], repeats: int, *, once: bool
) -> Iterator[dict[str, Any]]:
    """A row for each method on one model, that of the baseline first."""
    plain = baseline(model, image)
    plain()
    plain_peak, plain_once = peak_of(plain)
    plain_row = {"method": YARDSTICK, "seconds": plain_once, "peak_bytes": plain_peak}
    yield plain_row | {"ratio_forward_backward": 1.0, "ratio_peak_memory": 1.0}
    for spelling in spellings:
        job = lambda spelling=spelling: vitreous.explain(model, image, spelling, 0)  # noqa: E731
        if not once:
            job()
        peak, took = peak_of(job)
        ratio = took / plain_once
        if not once:
            times = time_in_turn({YARDSTICK: plain, spelling: job}, repeats)
            took, ratio = statistics.median(times[spelling]), median_ratio(times[spelling], times[YARDSTICK])
        row = {"method": spelling, "seconds": took, "ratio_forward_backward": ratio}
        row |= {"peak_bytes": peak, "ratio_peak_memory": peak / plain_peak}
        print(f"    {spelling:24} {ratio:7.2f} x time  {peak / plain_peak:6.2f} x peak of {YARDSTICK}", flush=True)
        yield row


def exponents(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every method measured at several sizes, how time and memory grow with tokens."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        if len(own) > 1:
            tokens = np.log([row["tokens"] for row in own])
            time, memory = (
                np.polyfit(tokens, np.log([row[of] for row in own]), 1)[0] for of in ("seconds", "peak_bytes")
            )
            found.append({"method": method, "time_exponent": float(time), "memory_exponent": float(memory)})
    return found


def main() -> None:
    """Print and write rows and exponents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--cases", nargs="+", default=["224:16", "384:16", "224:8", "384:8"], help="pixels:patch")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", type=int, default=1000, help="above so many tokens a method runs once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    spellings = given.methods or [info.name for info in list_methods() if cost_of(info.name).one_run]
    rows: list[dict[str, Any]] = []
    for case in given.cases:
        size, patch = map(int, case.split(":"))
        torch.manual_seed(0)
        model = timm.create_model(given.model, img_size=size, patch_size=patch).eval()
        model.requires_grad_(requires_grad=False)
        tokens = math.prod(model.patch_embed.grid_size) + model.num_prefix_tokens
        print(f"{given.model}, {size} px, patches of {patch}: {tokens} tokens")
        image, once = torch.randn(1, 3, size, size), tokens > given.once
        for row in measure(model, image, spellings, given.repeats, once=once):
            rows.append({"model": given.model, "size": size, "patch": patch, "tokens": tokens, **row})
            write_rows(given.json, rows, batch=1, exponents=exponents(rows))  # after each: some take minutes
    for row in exponents(rows):
        print(f"{row['method']:24} time n^{row['time_exponent']:.2f}, memory n^{row['memory_exponent']:.2f}")


if __name__ == "__main__":
    main()
