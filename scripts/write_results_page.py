"""Write the tables of docs/results.md from the runs that docs/results/ keeps.

    python scripts/write_results_page.py [--check]

The page's words are written by hand; tables stand between ``<!-- results: PROTOCOL DATASET -->`` and ``<!-- end -->``,
where DATASET is how the data set's folder ends. Runs of one protocol and model on the same photos share a table,
whenever they were measured; ``scripts/keep_results.py`` puts them there.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated import ending_of, write_or_check

from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.report.published import published_data, published_results, published_rows
from vitreous.evaluation.report.tables import (
    ResultTable,
    markdown_grid,
    number_parts,
    table_heading,
)
from vitreous.evaluation.statistics import Estimate
from vitreous.metrics.metric import Metric

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- results: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
START_LAYER = re.compile(r"[:,]start=\d+")  # a sweep over start layers puts it into every spelling
# A photo explained beside others may have another last digit, which may put a pixel on the other side of a threshold:
# so much of its interval a number may move when it is measured again.
SAME = 0.02


@dataclass(frozen=True)
class Kept:
    """A run that was kept.

    Attributes:
        run: what was measured, as its manifest says it.
        rows: its numbers.
        points: the points of its curve; empty where a table has none.
    """

    run: Mapping[str, Any]
    rows: Sequence[Estimate]
    points: Sequence[Estimate]

    @property
    def measured(self) -> int:
        """How many photos or texts were to be measured."""
        run = self.run
        return run["images"] if run["limit"] is None else min(run["limit"], run["images"])

    @property
    def counted(self) -> int:
        """How many of them count."""
        return max((row.n for row in self.rows), default=0)

    @property
    def table(self) -> str:
        """What runs of one table have in common."""
        same = {name: self.run[name] for name in ("protocol", "settings", "model", "preprocessing", "images", "seed")}
        return json.dumps([same, ending_of(self.run["data"]), self.measured, self.counted], sort_keys=True)


def page(text: str, results: Path) -> str:
    """The page with its tables written anew."""
    tables: dict[str, list[Kept]] = {}
    for file in sorted(results.glob("*.json")):
        kept = _read(file)
        tables.setdefault(kept.table, []).append(kept)

    def filled(place: re.Match[str]) -> str:
        chosen = [
            runs
            for runs in tables.values()
            if (runs[0].run["protocol"], ending_of(runs[0].run["data"])) == (place[2], place[3])
        ]
        chosen.sort(key=lambda runs: -runs[0].counted)
        return place[1] + "\n" + "\n".join(map(_section, chosen)) + place[4]

    return PLACE.sub(filled, text)


def _read(file: Path) -> Kept:
    stored = json.loads(file.read_text(encoding="utf-8"))
    return Kept(stored["manifest"]["run"], *(_estimates(stored.get(name, [])) for name in ("rows", "curves")))


def _estimates(rows: Sequence[Mapping[str, Any]]) -> list[Estimate]:
    return [
        Estimate(
            row["method"],
            row["metric"],
            *(math.nan if row[name] is None else row[name] for name in ("mean", "low", "high")),
            row["n"],
        )
        for row in rows
    ]


def _section(runs: Sequence[Kept]) -> str:
    runs = sorted(runs, key=lambda kept: -len(kept.run["methods"]))
    run = runs[0].run
    protocol = find_protocol(run["protocol"])
    merged = _merged([kept.rows for kept in runs])
    table = ResultTable(protocol.title, protocol.metrics(), merged, published=published_results(protocol.name))
    things = "texts" if run["settings"].get("reads") == "texts" else "photos"
    parts = [f"{runs[0].counted} {things}, {len(table.methods)} methods, 95% bootstrap intervals.", _markdown(table)]
    points = _merged([kept.points for kept in runs])
    if points:
        parts.append(_curve_table(points, table))
    if table.published:
        data = published_data(table.published)
        parts += [
            f"Published by others, with other models on {data}, not measured here (percent):",
            markdown_grid(*published_rows(table.published)),
        ]
    commands = "\n".join(_command(kept) for kept in runs)
    return "\n\n".join([*parts, f"```\n{commands}\n```", ""])


def _merged(parts: Sequence[Sequence[Estimate]]) -> list[Estimate]:
    """Numbers of several runs, each once; what two of them have measured has to agree."""
    found: dict[tuple[str, str], Estimate] = {}
    for estimate in (one for part in parts for one in part):
        before = found.setdefault((estimate.method, estimate.metric), estimate)
        if abs(before.mean - estimate.mean) > SAME * (before.high - before.low):
            sys.exit(f"{estimate.method}, {estimate.metric}: {before.mean} in one run, {estimate.mean} in another")
    return list(found.values())


def _command(kept: Kept) -> str:
    run, model = kept.run, kept.run["model"]
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
    parts += [f"--limit {kept.measured}"] if kept.measured < run["images"] else []
    parts += [f"--shard-size {run['shard_size']}", f"--threads {run['threads']}"]
    return " ".join(parts)


def _markdown(table: ResultTable) -> str:
    """One line per method, best first by the first metric that has a direction."""
    headings = ["method", *(table_heading(metric) for metric in table.metrics)]
    rows = [[f"`{name}`", *(_cell(table, name, metric) for metric in table.metrics)] for name in _ranked(table)]
    return markdown_grid(headings, rows)


def _curve_table(points: Sequence[Estimate], table: ResultTable) -> str:
    """The points of the curve of token-F1, the methods in the order of the table above."""
    steps = list(dict.fromkeys(point.metric for point in points))
    found: dict[str, list[str]] = {}
    for point in points:
        mean, low, high = (f"{100 * value:.1f}" for value in (point.mean, point.low, point.high))
        interval = f" <small>{low} to {high}</small>" if math.isfinite(point.low) else ""  # one text has none
        found.setdefault(point.method, []).append(f"{mean}{interval}")
    rows = [[f"`{name}`", *found[name]] for name in _ranked(table)]
    title = "token-F1 (%) over the number of words taken, the highest first, 95% intervals:"
    return f"{title}\n\n{markdown_grid(['method', *steps], rows)}"


def _ranked(table: ResultTable) -> list[str]:
    first = next(metric for metric in table.metrics if metric.direction is not None)
    sign = -1 if first.direction == "higher" else 1

    def place(method: str) -> tuple[float, str]:
        found = table.estimate(method, first.name)
        return (math.inf if found is None or math.isnan(found.mean) else sign * found.mean), method

    return sorted(table.methods, key=place)


def _cell(table: ResultTable, method: str, metric: Metric) -> str:
    estimate = table.estimate(method, metric.name)
    if estimate is None or not math.isfinite(estimate.mean):
        return ""
    mean, bounds = number_parts(estimate, metric)
    text = f"**{mean}**" if table.is_best(estimate, metric) else mean
    return text if bounds is None else f"{text} <small>{bounds[0]} to {bounds[1]}</small>"


def main() -> None:
    """Write the tables, or with --check fail if they are not what the kept runs say."""
    file = DOCS / "results.md"
    write_or_check(file, page(file.read_text(encoding="utf-8"), DOCS / "results"), "write_results_page")


if __name__ == "__main__":
    main()
