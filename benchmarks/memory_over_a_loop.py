"""Memory over a loop of explanations: resident set after 20 and after 500 calls, which should be the same.

python benchmarks/memory_over_a_loop.py [--model vit_tiny_patch16_224] [--calls 500] [--batch 1]
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import timm
import torch

import vitreous

METHODS = ["tokentm", "gradtoken", "decompx.skipplus", "gae", "attcat", "rollout"]


def resident_megabytes() -> float:
    """The resident set of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def live_tensors() -> int:
    """How many tensors Python holds."""
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def main() -> None:
    """Print memory and live tensors along the loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model(given.model)
    size = model.pretrained_cfg["input_size"][-1]
    for call in range(1, given.calls + 1):
        vitreous.explain(model, torch.randn(given.batch, 3, size, size), METHODS, topk=2)
        if call == 20 or call % 100 == 0:
            print(f"after {call:4d} calls: {resident_megabytes():7.0f} MB resident, {live_tensors()} live tensors")


if __name__ == "__main__":
    main()
