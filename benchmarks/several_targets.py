"""Several contrasts of an image in one call, against as many calls: time over the calls, by method.

    python benchmarks/several_targets.py [--model vit_tiny_patch16_224] [--targets 8] [--repeats 3] [--json FILE]

One call has one forward pass and a backward pass for every target; so many calls have as many of both. Both run in
turn in one process on one thread, and only their ratio is printed: below 0.7 is what is wanted of eight.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from rows import ratio_in_turn, write_rows

import vitreous
from vitreous.targets import Contrast

METHODS = ("gradtoken", "gae", "tokentm", "ixg", "decompx.skipplus", "attnlrp", "rise:budget=16")


def main() -> None:
    """Print a row per method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(given.model).eval().requires_grad_(requires_grad=False)
    size = model.pretrained_cfg["input_size"][-1]
    image = torch.randn(1, 3, size, size)
    contrasts = [Contrast(index, index + given.targets) for index in range(given.targets)]
    rows = []
    for method in METHODS:
        ratio = ratio_in_turn(
            lambda method=method: vitreous.explain(model, image, method, target=[contrasts]),  # type: ignore[misc]
            lambda method=method: [vitreous.explain(model, image, method, target=one) for one in contrasts],  # type: ignore[misc]
            given.repeats,
        )
        rows.append({"method": method, "one call over several": ratio})
        print(f"{method}  {ratio:.3f}")
    write_rows(given.json, rows, model=given.model, targets=given.targets)


if __name__ == "__main__":
    main()
