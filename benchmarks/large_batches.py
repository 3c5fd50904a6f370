"""A large batch in one run, against parts of several sizes: time, peak memory, and how far the numbers differ.

    python benchmarks/large_batches.py [--model vit_tiny_patch16_224] [--images 64] [--repeats 2] [--json FILE]

Each row explains all images with five methods, at most so many tokens in one run. Time and memory are given over those
of one run of the whole batch; differences are the largest of all methods, over the largest score of each. The bound
that ``explain`` uses is ``vitreous.api.run_methods.TOKENS_AT_ONCE``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from rows import median_ratio, time_in_turn, write_rows
from torch import Tensor, nn

import vitreous
from vitreous._utils.torch_state import in_float64
from vitreous.api import run_methods
from vitreous.speed.timing import Job, peak_memory

METHODS = ["tokentm", "gradtoken", "decompx.skipplus", "gae", "attnlrp"]
PARTS = (4, 8, 16, 32)  # images of 197 tokens at once
WHOLE = 10**9  # tokens: no batch is split
TOKENS = 200  # of one image, about


def explained(model: nn.Module, images: Tensor, bound: int) -> vitreous.Explanation:
    """Explain all images, at most ``bound`` tokens in one run."""
    before, run_methods.TOKENS_AT_ONCE = run_methods.TOKENS_AT_ONCE, bound
    try:
        return vitreous.explain(model, images, METHODS)
    finally:
        run_methods.TOKENS_AT_ONCE = before


def largest_difference(found: vitreous.Explanation, expected: vitreous.Explanation) -> float:
    """Over the largest score of each method."""
    pairs = [(in_float64(found.scores[name]), in_float64(expected.scores[name])) for name in METHODS]
    return max(float((ours - whole).abs().max() / whole.abs().max()) for ours, whole in pairs)


def main() -> None:
    """Print a row per size of the parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(given.model).eval().requires_grad_(requires_grad=False)
    size = model.pretrained_cfg["input_size"][-1]
    images = torch.randn(given.images, 3, size, size)
    bounds = {f"{count} images": count * TOKENS for count in PARTS if count < given.images} | {"whole batch": WHOLE}
    jobs: dict[str, Job] = {
        name: (lambda bound=bound: explained(model, images, bound))  # type: ignore[misc]
        for name, bound in bounds.items()
    }
    seconds = time_in_turn(jobs, given.repeats)
    memory = {name: peak_memory(job, images.device) for name, job in jobs.items()}
    whole = explained(model, images, WHOLE)
    few, exact = images[:8].double(), model.double()
    whole64 = explained(exact, few, WHOLE)
    differences = {
        name: largest_difference(explained(exact, few, bound // 8), whole64) for name, bound in bounds.items()
    }
    model.float()
    rows = []
    for name, bound in bounds.items():
        row = {
            "at once": name,
            "time over whole": median_ratio(seconds[name], seconds["whole batch"]),
            "memory over whole": memory[name] / memory["whole batch"],
            "memory MB": memory[name] / 2**20,
            "difference float32": largest_difference(explained(model, images, bound), whole),
            "difference float64": differences[name],
        }
        rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    write_rows(given.json, rows, model=given.model, images=given.images, methods=METHODS)


if __name__ == "__main__":
    main()
