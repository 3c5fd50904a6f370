"""What the scripts share that write parts of the documentation."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from vitreous.metrics import Metric


def write_or_check(file: Path, wanted: str, script: str) -> None:
    """Write a file, or with --check on the command line fail if it is not what it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        file.write_text(wanted, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != wanted:
        sys.exit(f"{file} is out of date: run scripts/{script}.py")


def first_paragraph(thing: object) -> str:
    """The first paragraph of a docstring in one line."""
    text = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return " ".join(text.split())


def metric_rows(metrics: Iterable[Metric]) -> list[str]:
    """The lines of a table of metrics with their direction and range."""
    found = ["| metric | better | range | what it is |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        low, high = (_bound(value) for value in metric.range)
        better = metric.direction or "neither"
        found.append(f"| {metric.name} | {better} | {low} to {high} | {metric.description} |")
    return found


def _bound(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else ("∞" if value > 0 else "-∞")


def ending_of(data: str) -> str:
    """How the path of a data set ends: ``KIND:PATH`` -> its last two parts."""
    return "/".join(Path(data.partition(":")[2]).parts[-2:])
