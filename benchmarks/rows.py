"""What the measuring scripts share: timing in turn, and rows of figures in a file that says how they were made."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vitreous.provenance import software_versions
from vitreous.storage import write_text


def seconds(job: Callable[[], object]) -> float:
    """Processor time of a job in this process, which does not depend on what else the machine does."""
    start = time.process_time()
    job()
    return time.process_time() - start


def time_in_turn(jobs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every job, one after the other and again, after one round that does not count.

    Taken in turn, a processor that slows down slows all of them.
    """
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            took = seconds(job)
            if repeat:
                found[name].append(took)
    return found


def median_ratio(times: Sequence[float], yardstick: Sequence[float]) -> float:
    """The median of ratios that were measured side by side."""
    return statistics.median(ours / theirs for ours, theirs in zip(times, yardstick, strict=True))


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
