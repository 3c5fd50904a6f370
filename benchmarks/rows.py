"""What the measuring scripts share: timing in turn, and rows of figures in a file that says how they were made."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.storage import write_text
from vitreous.explanation.folder import software_versions
from vitreous.speed import timing
from vitreous.speed.timing import Job, seconds_of

_PROCESSOR = torch.device("cpu")


def seconds(job: Job) -> float:
    """Processor time of a job in this process, which does not depend on what else the machine does."""
    return seconds_of(job, _PROCESSOR)


def time_in_turn(jobs: Mapping[str, Job], repeats: int) -> dict[str, list[float]]:
    """Seconds of every job, one after the other and again, after one round that does not count."""
    for job in jobs.values():
        job()
    return timing.time_in_turn(jobs, repeats, _PROCESSOR)


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of ratios that were measured side by side."""
    return statistics.median(ours / theirs for ours, theirs in zip(times, baseline, strict=True))


def ratio_in_turn(job: Job, baseline: Job, repeats: int) -> float:
    """The median ratio of a job to what it is measured by, both run in turn after one round that does not count."""
    times = time_in_turn({"job": job, "baseline": baseline}, repeats)
    return median_ratio(times["job"], times["baseline"])


@torch.no_grad()
def bare(model: nn.Module, pictures: Tensor, count: int) -> None:
    """The plain model on ``count`` pictures, which perturbations are measured by; as many at once as are given."""
    while count > 0:
        model(pictures[:count])
        count -= len(pictures)


def write_rows(file: Path | None, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Write rows with date, versions and command, if a file was asked for."""
    if file is None:
        return
    script, *arguments = sys.argv
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": software_versions(),
        "threads": torch.get_num_threads(),
        "command": command,
        **settings,
        "rows": list(rows),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(content, indent=1) + "\n")
