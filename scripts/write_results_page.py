"""Put the tables of finished runs into docs/results.md, and their manifests and rows beside it.

    python scripts/write_results_page.py RUNS

RUNS is the folder that ``vitreous evaluate --out`` was given. The page's words are written by hand; a table stands
between ``<!-- results: PROTOCOL DATASET -->`` and ``<!-- end -->``, where DATASET is how the data set's folder ends.
Every run behind a table is kept in docs/results/ with its manifest, the command that makes it, and all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from generated import ending_of

from vitreous.benchmark.report.curves import F1_CURVE, Curves, curves_of
from vitreous.benchmark.report.gathering import gather
from vitreous.benchmark.results import Results
from vitreous.benchmark.statistics import estimates
from vitreous.benchmark.store import read_manifest
from vitreous.benchmark.summary import counted_values, summarise
from vitreous.benchmark.tables import (
    ResultTable,
    as_rows,
    markdown_grid,
    number_parts,
    published_data,
    published_rows,
    table_heading,
)
from vitreous.metrics.metric import Metric, mean_of

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- results: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
START_LAYER = re.compile(r"[:,]start=\d+")  # a sweep over start layers puts it into every spelling
SHARED = re.compile(r"[\w./-]*/(?=shared/)")


def main() -> None:
    """Fill every place of the page for which there are results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    found = gather(parser.parse_args().runs, lambda text: print(text, file=sys.stderr))
    page = DOCS / "results.md"

    def filled(place: re.Match[str]) -> str:
        chosen = [one for one in found if (one.run.protocol, ending_of(one.run.data)) == (place[2], place[3])]
        chosen.sort(key=lambda one: -one.counted.sum())
        return place[1] + "\n" + "\n".join(map(_section, chosen)) + place[4] if chosen else place[0]

    page.write_text(PLACE.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")


def _section(results: Results) -> str:
    table = summarise(results)
    commands = "\n".join(_kept(store.folder, table, len(results.images)) for store in results.stores)
    counted = int(results.counted.sum())
    things = "photos" if results.run.things == "images" else results.run.things
    parts = [f"{counted} {things}, {len(table.methods)} methods, 95% bootstrap intervals.", _markdown(table)]
    parts += [_curve_table(results, table, curve) for curve in curves_of(results) if curve.title == F1_CURVE]
    if table.published:
        data = published_data(table.published)
        parts += [
            f"Published by others, with other models on {data}, not measured here (percent):",
            markdown_grid(*published_rows(table.published)),
        ]
    return "\n\n".join([*parts, f"```\n{commands}\n```", ""])


def _kept(folder: Path, table: ResultTable, images: int) -> str:
    """Keep a run's manifest and rows beside the page, and give the command that makes it."""
    manifest = read_manifest(folder)
    for name in ("command", "folder"):
        manifest.pop(name, None)  # where things lay on the machine is nobody's business; the page shows the command
    methods = set(manifest["run"]["methods"])
    rows = [row for row in as_rows(table) if row["method"] in methods]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)  # a line each, so that changes can be seen
    text = f'{{"manifest": {json.dumps(manifest, ensure_ascii=False)},\n"rows": [\n{lines}\n]}}\n'
    (DOCS / "results" / f"{folder.name}.json").write_text(SHARED.sub("../", text), encoding="utf-8")
    return SHARED.sub("../", _command(manifest["run"], images))


def _command(run: dict[str, Any], images: int) -> str:
    model = run["model"]
    parts = [f"vitreous evaluate --protocol {run['protocol']}", f"--model {model['name']}"]
    parts += [f"--{name} {','.join(map(str, model[name]))}" for name in ("mean", "std") if model[name]]
    parts.append(f"--data {run['data']}")
    if not run["settings"]["methods"]:  # a protocol with rows of its own is not told which
        asked = (
            [START_LAYER.sub("", method) for method in run["methods"]]
            if run["settings"]["start_layers"]
            else run["methods"]
        )
        parts.append(f"--methods {','.join(dict.fromkeys(asked))}")
    parts += ["--shuffle"] if run["shuffled"] else []
    parts += [f"--limit {images}"] if images < run["images"] else []
    parts += [f"--shard-size {run['shard_size']}", f"--threads {run['threads']}"]
    return " ".join(parts)


def _markdown(table: ResultTable) -> str:
    """One line per method, best first by the first metric that has a direction."""
    first = next(metric for metric in table.metrics if metric.direction is not None)
    headings = ["method", *(table_heading(metric) for metric in table.metrics)]
    rows = [[f"`{method}`", *(_cell(table, method, metric) for metric in table.metrics)] for method in table.methods]
    return markdown_grid(headings, [row for _, row in sorted(zip(_order(table, first), rows, strict=True))])


def _curve_table(results: Results, table: ResultTable, curve: Curves) -> str:
    """The points of a curve with their intervals, the methods in the order of the table above."""
    steps = [(f"{step:g}", column) for step, column in zip(curve.steps, curve.columns, strict=True) if step % 10 == 0]
    points = [mean_of(column, step, "higher", (0.0, 1.0), curve.title) for step, column in steps]
    columns = [column for _, column in steps]
    found: dict[str, list[str]] = {}
    for estimate in estimates(counted_values(results, columns), columns, points):
        mean, low, high = (f"{100 * value:.1f}" for value in (estimate.mean, estimate.low, estimate.high))
        interval = f" <small>{low} to {high}</small>" if math.isfinite(estimate.low) else ""  # one text has none
        found.setdefault(estimate.method, []).append(f"{mean}{interval}")
    first = next(metric for metric in table.metrics if metric.direction is not None)
    ranked = sorted(zip(_order(table, first), table.methods, strict=True))
    rows = [[f"`{name}`", *found[name]] for _, name in ranked]
    headings = ["method", *(step for step, _ in steps)]
    return f"{curve.title} (%) over the number of {curve.axis}, 95% intervals:\n\n{markdown_grid(headings, rows)}"


def _order(table: ResultTable, metric: Metric) -> list[tuple[float, str]]:
    sign = -1 if metric.direction == "higher" else 1
    found = {method: table.estimate(method, metric.name) for method in table.methods}
    known = {method: one.mean for method, one in found.items() if one is not None and math.isfinite(one.mean)}
    return [(sign * known[method] if method in known else math.inf, method) for method in found]


def _cell(table: ResultTable, method: str, metric: Metric) -> str:
    estimate = table.estimate(method, metric.name)
    if estimate is None or not math.isfinite(estimate.mean):
        return ""
    mean, bounds = number_parts(estimate, metric)
    text = f"**{mean}**" if table.is_best(estimate, metric) else mean
    return text if bounds is None else f"{text} <small>{bounds[0]} to {bounds[1]}</small>"


if __name__ == "__main__":
    main()
