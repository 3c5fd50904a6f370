"""Keep finished runs beside the documentation: manifest, all rows and curves of each, in docs/results/.

    python scripts/keep_results.py RUNS

RUNS is the folder that ``vitreous evaluate --out`` was given. ``scripts/write_results_page.py`` makes the tables of
docs/results/*.md from what is kept, so a run of today can stand in one table with one of last month.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from vitreous.evaluation.report.figures import Curves, curves_of
from vitreous.evaluation.report.results import Results, counted_values, discover_runs, summarise
from vitreous.evaluation.report.tables import ResultTable, as_rows
from vitreous.evaluation.statistics import estimates
from vitreous.evaluation.store import read_manifest
from vitreous.metrics.metric import mean_of

KEPT = Path(__file__).parents[1] / "docs" / "results"
SHARED = re.compile(r"[\w./-]*/(?=shared/)")


def main() -> None:
    """Keep every run of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    for results in discover_runs(parser.parse_args().runs, lambda text: print(text, file=sys.stderr)):
        keep(results, KEPT)


def keep(results: Results, place: Path) -> None:
    """Write a file for each run behind some results; a line for each row, so that changes can be seen."""
    table = summarise(results)
    curves = [
        row
        for curve in curves_of(results, percent=False)
        if curve.title == "token-F1"
        for row in _points(results, curve)
    ]
    for store in results.stores:
        manifest = read_manifest(store.folder)
        for name in ("command", "folder"):
            manifest.pop(name, None)  # where things lay on the machine is nobody's business
        manifest["run"]["limit"] = len(results.images)  # of a run that was stopped, what is there
        methods = set(manifest["run"]["methods"])
        parts = [
            f'"{name}": [\n{_lines([row for row in rows if row["method"] in methods])}\n]'
            for name, rows in (("rows", as_rows(table)), ("curves", curves))
            if rows
        ]
        text = ",\n".join([f'{{"manifest": {json.dumps(manifest, ensure_ascii=False)}', *parts]) + "}\n"
        (place / f"{store.folder.name}.json").write_text(SHARED.sub("../", text), encoding="utf-8")


def _lines(rows: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def _points(results: Results, curve: Curves) -> list[dict[str, Any]]:
    """Every tenth step of a curve with its interval, as rows whose metric is the step."""
    steps = [(f"{step:g}", column) for step, column in zip(curve.steps, curve.columns, strict=True) if step % 10 == 0]
    points = [mean_of(column, step, "higher", (0.0, 1.0), curve.title) for step, column in steps]
    columns = [column for _, column in steps]
    return as_rows(ResultTable(curve.title, points, estimates(counted_values(results, columns), columns, points)))


if __name__ == "__main__":
    main()
