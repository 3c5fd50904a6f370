"""Fill the table of docs/choosing.md: what each method costs and tells, and what was measured of it.

    python scripts/write_choosing_table.py [--check]

Cost, class and sign come from the registry; the numbers are read from docs/results/*.json, which
``scripts/keep_results.py`` writes. What was not measured, or on fewer photos than others, has no number.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated import ending_of, write_or_check

from vitreous.errors import MethodError
from vitreous.methods import list_methods
from vitreous.methods.spelling import cost_of, parse

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- choosing -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "-"


@dataclass(frozen=True)
class Column:
    """A number of the table.

    Attributes:
        heading: what stands above it.
        protocol: the evaluation that it comes from.
        data: how the path of the data set ends.
        metric: its name there.
        scale: shares are shown in percent.
        better: where it is better.
    """

    heading: str
    protocol: str
    data: str
    metric: str
    scale: float
    better: str = "higher"


COLUMNS = (
    Column("pAcc ↑", "chefer-2021-segmentation", "pets/seg", "pixel accuracy", 100),
    Column("mIoU ↑", "chefer-2021-segmentation", "pets/seg", "mIoU", 100),
    Column("AP ↑", "skipplus-segmentation", "pets/seg", "AP", 100),
    Column("AUC positive ↓", "chefer-2021-perturbation", "data/imagenet", "AUC positive", 1, "lower"),
    Column("AUC negative ↑", "chefer-2021-perturbation", "data/imagenet", "AUC negative", 1),
    Column("insertion ↑", "skipplus-faithfulness", "data/imagenet", "insertion accuracy", 1),
    Column("deletion ↑", "skipplus-faithfulness", "data/imagenet", "deletion accuracy (100 - x)", 1),
)
Numbers = dict[tuple[Column, str], float]  # by column and spelling


def page(text: str, results: Path) -> str:
    """The page with its table written anew."""
    table = _table(_numbers(results))
    filled, places = PLACE.subn(lambda place: f"{place[1]}\n{table}\n\n{place[2]}", text)
    if places != 1:
        sys.exit("docs/choosing.md must have one place between <!-- choosing --> and <!-- end -->")
    return filled


def _numbers(results: Path) -> Numbers:
    found: dict[Column, list[dict[str, Any]]] = {column: [] for column in COLUMNS}
    for file in sorted(results.glob("*.json")):
        stored = json.loads(file.read_text(encoding="utf-8"))
        run = stored["manifest"]["run"]
        for column in COLUMNS:
            if (run["protocol"], ending_of(run["data"])) == (column.protocol, column.data):
                rows = [row for row in stored["rows"] if row["metric"] == column.metric and row["mean"] is not None]
                found[column] += rows
    largest = {column: max((row["n"] for row in rows), default=0) for column, rows in found.items()}
    # A sample of the photos has another mean than all of them, whatever the method.
    return {
        (column, row["method"]): row["mean"] * column.scale
        for column, rows in found.items()
        for row in rows
        if row["n"] == largest[column]
    }


def _table(numbers: Numbers) -> str:
    columns = [column for column in COLUMNS if any(measured == column for measured, _ in numbers)]
    headings = ["method", "cost", "depends on the class", "signed", *(column.heading for column in columns)]
    alignment = ["---", "---", "---", "---", *(["---:"] * len(columns))]
    rows = [_row(spelling, columns, numbers) for spelling in _spellings(numbers)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, alignment, *rows)]
    missing = [column.heading for column in COLUMNS if column not in columns]
    note = [f"Not measured, so there is no column for it: {', '.join(missing)}."] if missing else []
    return "\n\n".join(["\n".join(lines), *note])


def _spellings(numbers: Numbers) -> list[str]:
    """Every method as it is by default, with the other measured spellings of it behind it."""
    measured = {spelling for _, spelling in numbers}
    found = []
    for info in list_methods():
        others = sorted(spelling for spelling in measured - {info.name} if _name(spelling) == info.name)
        found += [info.name, *others]
    return found


def _name(spelling: str) -> str | None:
    try:
        return parse(spelling).info.name
    except MethodError:
        return None  # a method that has gone, or a plugin's


def _row(spelling: str, columns: list[Column], numbers: Numbers) -> list[str]:
    recipe = parse(spelling)
    traits = ["yes" if trait else "no" for trait in (recipe.info.class_specific, recipe.signed)]
    link = f"[`{spelling}`](methods.md#{recipe.info.name})"
    return [link, cost_of(spelling).label, *traits, *(_cell(column, spelling, numbers) for column in columns)]


def _cell(column: Column, spelling: str, numbers: Numbers) -> str:
    value = numbers.get((column, spelling))
    if value is None:
        return NOT_MEASURED
    of_column = [number for (measured, _), number in numbers.items() if measured == column]
    best = max(of_column) if column.better == "higher" else min(of_column)
    return f"**{value:.2f}**" if math.isclose(value, best) else f"{value:.2f}"


def main() -> None:
    """Write the table, or with --check fail if it is not what registry and results say."""
    file = DOCS / "choosing.md"
    write_or_check(file, page(file.read_text(encoding="utf-8"), DOCS / "results"), "write_choosing_table")


if __name__ == "__main__":
    main()
