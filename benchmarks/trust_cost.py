"""What ``vitreous.trust`` costs: time as a multiple of a forward pass, and seconds of processor time.

    python benchmarks/trust_cost.py [--model NAME] [--photo FILE] [--threads N] [--repeats N]

Times are the shortest of several, all taken in one process; processor time hardly depends on what else runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

import torch

import vitreous
from vitreous.inputs.images import read_oriented
from vitreous.models import load_model


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
    pictures = [each for each in (files("vitreous.models") / "demo").iterdir() if each.name.endswith((".png", ".jpg"))]
    with as_file(pictures[0]) as shipped:
        photo = str(given.photo or shipped)
        pixels = model.preprocessing([read_oriented(Path(photo)).image])
        explanation = vitreous.explain(model, photo)

        def forward() -> None:
            with torch.no_grad():
                model.model(pixels)

        runs: dict[str, Callable[[], object]] = {
            "forward": forward,
            "explain": lambda: vitreous.explain(model, photo),
            "trust": lambda: vitreous.trust(model, photo, explanation),
            "trust without shift": lambda: vitreous.trust(model, photo, explanation, shift=False),
            "auto": lambda: vitreous.explain(model, photo, "auto"),
        }
        found = {name: measured(run, given.repeats) for name, run in runs.items()}
    report = {"model": given.model, "threads": given.threads}
    for name, (seconds, processor) in found.items():
        report[name] = {
            "seconds": round(seconds, 3),
            "processor seconds": round(processor, 3),
            "forward passes": round(processor / found["forward"][1], 1),
        }
    print(json.dumps(report, indent=2))


def measured(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The shortest time and the shortest processor time."""
    run()
    both = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        run()
        both.append((time.perf_counter() - wall, time.process_time() - processor))
    return min(one for one, _ in both), min(one for _, one in both)


if __name__ == "__main__":
    main()
