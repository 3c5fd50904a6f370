"""What ``vitreous.trust`` costs: runs of the model, processor time, seconds, and all of it in forward passes.

    python benchmarks/trust_cost.py [--model NAME] [--photo FILE] [--threads N] [--repeats N]

Times are the shortest of several, all taken in one process, in turn with plain forward passes of the same photo. What
is run is counted: images or parts of them, and the tokens that went through the model's last block over those of a
forward pass (backward passes are not among them). The load average says what the seconds are worth: above the number
of processors, others ran beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import nn

import vitreous
from vitreous.architecture import find_architecture
from vitreous.inputs.images import read_oriented
from vitreous.models import load_model


class TokenCount:
    """Counts the tokens that the attention of one block is given, in whatever run."""

    def __init__(self, network: nn.Module) -> None:
        self.tokens = self.images = 0
        blocks = [module for module in network.modules() if type(module).__name__.endswith(("Block", "Layer"))]
        (blocks or [network])[-1].register_forward_hook(self._count)

    def _count(self, module: nn.Module, given: tuple[torch.Tensor, ...], output: object) -> None:
        del module, output
        self.images += given[0].shape[0]
        self.tokens += given[0].shape[0] * given[0].shape[1]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--photo", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = load_model(given.model)
    shipped = files("vitreous.models") / "demo" / "chelsea.png"
    with as_file(shipped) as file:
        photo = str(given.photo or file)
        pixels = model.preprocessing([read_oriented(Path(photo)).image])
        explanation = vitreous.explain(model, photo)
        find_architecture(model.model, pixels)
        count = TokenCount(model.model)

        def forward() -> None:
            with torch.no_grad():
                model.model(pixels)

        runs: dict[str, Callable[[], object]] = {
            "forward": forward,
            "explain": lambda: vitreous.explain(model, photo),
            "trust": explanation.trust,
            "trust without shift": lambda: explanation.trust(shift=False),
            "auto": lambda: vitreous.explain(model, photo, "auto"),
        }
        found = measured(runs, given.repeats, count)
    load = os.getloadavg()[0]
    report: dict[str, object] = {"model": given.model, "threads": given.threads, "load average": round(load, 1)}
    whole = found["forward"]
    for name, one in found.items():
        report[name] = {
            "seconds": round(one["seconds"], 3),
            "processor seconds": round(one["processor"], 3),
            "processor time in forward passes": round(one["processor"] / whole["processor"], 1),
            "images or parts of them": one["images"],
            "tokens in forward passes": round(one["tokens"] / whole["tokens"], 2),
        }
    print(json.dumps(report, indent=2))


def measured(runs: dict[str, Callable[[], object]], repeats: int, count: TokenCount) -> dict[str, dict[str, float]]:
    """The shortest times of every run, taken in turn, and what it runs."""
    found: dict[str, dict[str, float]] = {}
    for repeat in range(repeats + 1):  # the first warms caches
        for name, run in runs.items():
            count.tokens = count.images = 0
            wall, processor = time.perf_counter(), time.process_time()
            run()
            times = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}
            if repeat <= 1:
                found[name] = times
            found[name] = {key: min(value, found[name][key]) for key, value in times.items()}
            found[name] |= {"tokens": count.tokens, "images": count.images}
    return found


if __name__ == "__main__":
    main()
