"""Two versions of vitreous beside each other on one machine: time, peak memory, and passes of the first call.

    python benchmarks/compare_versions.py BEFORE AFTER [--model vit_base_patch16_224] [--batch 2] [--rounds 3]
        [--repeats 3] [--methods tokentm ...] [--json FILE]

BEFORE and AFTER are source trees (folders with ``src/vitreous``), for example two git worktrees. They run in turn,
BEFORE AFTER BEFORE AFTER, each in a process of its own. A process times every method and a plain forward and backward
pass of the same model in turn, in processor time of one thread; what is compared between versions is the ratio of the
two, so that a machine that slows down slows both. Only ``vitreous.explain`` is used, and blocks are counted by hooks on
timm's own modules: nothing here depends on how a version works inside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

METHODS = (
    *("tokentm", "gradtoken", "decompx.skipplus", "gae", "ixg", "rollout", "fullgrad", "transattr", "attnlrp"),
    *("gradcam", "raw_attention", "ixg.skipplus", "legrad", "globenc", "lrp"),
)
Job = Callable[[], object]


def measure(model_name: str, batch: int, repeats: int, methods: Sequence[str]) -> dict[str, Any]:
    """What the version that is imported here costs; the work of one process."""
    import vitreous  # noqa: PLC0415  # the one that PYTHONPATH says, and only in this process

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(model_name).eval().requires_grad_(requires_grad=False)
    images = torch.randn(batch, 3, *model.pretrained_cfg["input_size"][-2:])

    def explaining(method: str) -> Job:
        return lambda: vitreous.explain(model, images, method, 1)

    jobs: dict[str, Job] = {method: explaining(method) for method in methods}
    plain = "forward and backward"
    jobs[plain] = lambda: _forward_backward(model, images)
    found: dict[str, Any] = {
        method: {"first_call": _first_call(vitreous.explain, model_name, method)} for method in methods
    }
    for job in jobs.values():
        job()
    memory = {name: _peak_memory(job) for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            seconds[name].append(time.process_time() - start)
    for method in methods:
        ratios = [ours / both for ours, both in zip(seconds[method], seconds[plain], strict=True)]
        found[method] |= {"time": ratios, "memory": memory[method] / memory[plain]}
    return {"source": str(Path(vitreous.__file__).parent), "methods": found}


def _forward_backward(model: nn.Module, images: Tensor) -> None:
    pictures = images.clone().requires_grad_()
    logits = model(pictures)
    torch.autograd.grad(logits[:, 1].sum(), pictures)


def _first_call(explain: Callable[..., object], model_name: str, method: str) -> dict[str, float]:
    """Forward passes of the blocks and of the embedding that the first call on a new model takes, and the second."""
    size = {"embed_dim": 24, "num_heads": 3}
    model = timm.create_model(model_name, **size).eval().requires_grad_(requires_grad=False)
    images = torch.randn(1, 3, *model.pretrained_cfg["input_size"][-2:])
    counts = {"blocks": 0.0, "embedding": 0.0}

    def counting(name: str, share: float) -> Callable[..., None]:
        def count(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            counts[name] += share * len(output) / len(images)

        return count

    for block in model.blocks:
        block.register_forward_hook(counting("blocks", 1 / len(model.blocks)))
    model.patch_embed.register_forward_hook(counting("embedding", 1.0))
    found = {}
    for call in ("first", "second"):
        counts |= dict.fromkeys(counts, 0.0)
        explain(model, images, method, 1)
        found |= {f"{call}_{name}": round(value, 3) for name, value in counts.items()}
    return found


def _peak_memory(job: Job) -> int:
    """Bytes that PyTorch's allocator gave the job and had not got back, at the most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    assert profiler.profiler is not None
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    changes = []
    while events:
        event = events.pop()
        events += event.children
        kind, details = event.typed
        if kind.name == "Allocation":
            changes.append((event.start_time_ns, details.alloc_size, details.ptr))
    taken: dict[int, int] = {}
    held = most = 0
    for _, size, address in sorted(changes):
        if size > 0:
            taken[address] = size
        held += size if size > 0 else -taken.pop(address, 0)  # what was there before the job does not count
        most = max(most, held)
    return most


def run_in(tree: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure one version in a process of its own."""
    settings = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, __file__, "--measure", *arguments]
    done = subprocess.run(command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if Path(found["source"]).resolve() != (tree / "src" / "vitreous").resolve():
        sys.exit(f"{found['source']} was imported in place of {tree}")
    return found["methods"]


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per method; the spread is of the ratio after / before between rounds."""
    rows = []
    for method in before[0]:
        pairs = [
            statistics.median(new[method]["time"]) / statistics.median(old[method]["time"])
            for old, new in zip(before, after, strict=True)
        ]
        times = [statistics.median(t for run in runs for t in run[method]["time"]) for runs in (before, after)]
        rows.append({
            "method": method, "before": times[0], "after": times[1], "ratio": times[1] / times[0],
            "lowest": min(pairs), "highest": max(pairs),
            "memory_before": before[0][method]["memory"], "memory_after": after[0][method]["memory"],
            "first_call_before": before[0][method]["first_call"], "first_call_after": after[0][method]["first_call"],
        })  # fmt: skip
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table: times and memory in those of a plain forward and backward pass."""
    print(f"{'method':20} {'before':>7} {'after':>7} {'ratio':>6}  rounds        memory         first call, passes")
    for row in rows:
        old, new = row["first_call_before"], row["first_call_after"]
        print(
            f"{row['method']:20} {row['before']:7.3f} {row['after']:7.3f} {row['ratio']:6.3f}  "
            f"{row['lowest']:.3f}-{row['highest']:.3f}  {row['memory_before']:5.3f} {row['memory_after']:5.3f}    "
            f"{old['first_blocks']:.2f} (+{old['first_embedding'] - old['second_embedding']:g} embeddings) -> "
            f"{new['first_blocks']:.2f} (+{new['first_embedding'] - new['second_embedding']:g})"
        )


def main() -> None:
    """Measure in turn, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="BEFORE and AFTER")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a ViT of timm")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="in each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of either version")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.model, given.batch, given.repeats, given.methods)))
        return
    if len(given.trees) != 2:
        parser.error("give two source trees, BEFORE and AFTER")
    arguments = ["--model", given.model, "--batch", f"{given.batch}", "--repeats", f"{given.repeats}"]
    arguments += ["--methods", *given.methods]
    runs: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for _ in range(given.rounds):
        for tree, kept in zip(given.trees, runs, strict=True):
            kept.append(run_in(tree, arguments))
    rows = compare(*runs)
    show(rows)
    if given.json is not None:
        content = {"model": given.model, "batch": given.batch, "rounds": given.rounds, "rows": rows}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
