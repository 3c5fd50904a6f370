"""Many targets, many methods and many images at once, against one at a time.

    python benchmarks/many_at_once.py [--model vit_base_patch16_224] [--batch 2] [--repeats 3] [--json FILE]
    python benchmarks/many_at_once.py --stream 2000 [--model vit_tiny_patch16_224] [--batch 8] [--json FILE]

The first compares eight targets of each image with eight calls for one target, and ten methods in one call with ten
calls. The second explains a stream of images and prints rate and memory along it: both should stay as they are.
Processor time of one thread counts, since it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from rows import median_ratio, seconds, time_in_turn, write_rows
from torch import Tensor, nn

import vitreous
from vitreous.speed.timing import Job

TARGETS = 8
TOLD_APART = ["ixg.plus", "decompx.skipplus", "gae", "tokentm", "gradtoken", "attnlrp"]
TOGETHER = [
    *("rollout", "gae", "tokentm", "gradtoken", "ixg.plus", "attcat"),
    *("decompx", "decompx.skipplus", "fullgrad_plus", "attnlrp"),
]
STREAMED = ["tokentm", "gradtoken", "decompx.skipplus", "gae", "attcat", "rollout"]
STOPS = 10  # of a stream, where rate and memory are looked at


def make(name: str) -> tuple[nn.Module, int]:
    """A random model and the size of its images."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    return model, model.pretrained_cfg["input_size"][-1]


def ratio(many: Job, singles: Job, repeats: int) -> float:
    """Time of ``many`` over that of ``singles``."""
    times = time_in_turn({"many": many, "singles": singles}, repeats)
    return median_ratio(times["many"], times["singles"])


def compare(model: nn.Module, images: Tensor, repeats: int) -> Iterator[dict[str, object]]:
    """Rows of what is saved by asking for much at once."""
    classes = torch.arange(TARGETS).expand(len(images), -1)

    def each_target(method: str) -> None:
        for number in range(TARGETS):
            vitreous.explain(model, images, method, target=classes[:, number])

    def each_method() -> None:
        for method in TOGETHER:
            vitreous.explain(model, images, method)

    for method in TOLD_APART:
        saved = ratio(
            lambda method=method: vitreous.explain(model, images, method, target=classes),  # type: ignore[misc]
            lambda method=method: each_target(method),  # type: ignore[misc]
            repeats,
        )
        yield {"what": f"{TARGETS} targets", "method": method, "ratio": saved}
    saved = ratio(lambda: vitreous.explain(model, images, TOGETHER), each_method, repeats)
    yield {"what": f"{len(TOGETHER)} methods", "method": ", ".join(TOGETHER), "ratio": saved}


def stream(model: nn.Module, size: int, batch: int, images: int) -> Iterator[dict[str, object]]:
    """Rows of rate and memory along a stream, the rate over that of its first part."""
    per_part = max(1, images // batch // STOPS)
    first = None

    def part_of_stream() -> None:
        for _ in range(per_part):
            vitreous.explain(model, torch.randn(batch, 3, size, size), STREAMED, topk=2)

    for part in range(1, STOPS + 1):
        rate = per_part * batch / seconds(part_of_stream)
        first = first or rate
        yield {
            "what": "stream",
            "images": part * per_part * batch,
            "rate over first part": rate / first,
            "resident MB": resident_megabytes(),
            "live tensors": live_tensors(),
        }


def resident_megabytes() -> float:
    """The resident set of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def live_tensors() -> int:
    """How many tensors Python holds."""
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Print a row per comparison, or per part of the stream."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream", type=int, metavar="IMAGES")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    name = given.model or ("vit_tiny_patch16_224" if given.stream else "vit_base_patch16_224")
    batch = given.batch or (8 if given.stream else 2)
    model, size = make(name)
    if given.stream:
        found = stream(model, size, batch, given.stream)
    else:
        found = compare(model, torch.randn(batch, 3, size, size), given.repeats)
    rows = []
    for row in found:
        rows.append(row)
        print("  ".join(f"{key} {_number(value)}" for key, value in row.items()))
    write_rows(given.json, rows, model=name, batch=batch)


if __name__ == "__main__":
    main()
