"""Write the tables and charts of docs/results/ from the runs that are kept there.

    python scripts/write_results_page.py [--check]

The words are written by hand; a chart and tables stand between ``<!-- results: PROTOCOL DATASET [MODEL] -->`` and
``<!-- end -->``, where DATASET is how the data set's folder ends, and MODEL is ``demo`` for its runs, which stand apart
from those of all others. Runs of one protocol and model on the same photos share a table, whenever they were measured;
``scripts/keep_results.py`` puts them there.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from generated import ending_of, write_or_check

from vitreous.evaluation.protocol import published_data, published_results, published_rows
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.report.figures import dots_chart
from vitreous.evaluation.report.overall import pareto_front
from vitreous.evaluation.report.tables import (
    ResultTable,
    markdown_grid,
    number_parts,
    table_heading,
)
from vitreous.evaluation.statistics import Estimate
from vitreous.methods import is_control
from vitreous.metrics.metric import Metric

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- results: (\S+) (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
APART = "demo"  # the model whose tables stand apart
START_LAYER = re.compile(r"[:,]start=\d+")  # a sweep over start layers puts it into every spelling
# A photo explained beside others may have another last digit, which may put a pixel on the other side of a threshold:
# so much of its interval a number may move when it is measured again.
SAME = 0.02
# The charts are images of their own, so they carry their style; the grey is readable on white and on black.
STYLE = (
    "svg{background:none}text{font:11px system-ui,sans-serif;fill:#808080}.gridline{stroke:#8884;stroke-width:1}"
    ".dot line{stroke:#5577cc;stroke-width:2}.dot circle{fill:#5577cc}"
    ".dot.control line{stroke:#999}.dot.control circle{fill:#999}.dot.control text{font-style:italic}"
    ".dot.best line{stroke:#d9622b}.dot.best circle{fill:#d9622b}"
    ".reference{stroke:#999;stroke-width:1.5;stroke-dasharray:5 3}"
)


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
        same = {name: self.run[name] for name in ("protocol", "settings", "preprocessing", "images", "seed")}
        same["stratified"] = self.run.get("stratified", False)
        same["model"] = {name: value for name, value in self.run["model"].items() if value is not None}
        return json.dumps([same, ending_of(self.run["data"]), self.measured, self.counted], sort_keys=True)


def page(text: str, results: Path) -> str:
    """The page with its tables written anew."""
    tables = _tables(results)

    def filled(place: re.Match[str]) -> str:
        chosen = tables.get((place[2], place[3], place[4] or ""), [])
        chart = f"![{place[2]}: mean and 95% interval of every method]({_chart_name(*place.groups()[1:4])})\n\n"
        return place[1] + "\n" + (chart if chosen else "") + "\n".join(map(_section, chosen)) + place[5]

    return PLACE.sub(filled, text)


def charts(text: str, results: Path) -> dict[str, str]:
    """The charts of a page by their file names: of the largest table of each place, by its first metric."""
    tables = _tables(results)
    found = {}
    for _, protocol, data, model, _ in PLACE.findall(text):
        for runs in tables.get((protocol, data, model), [])[:1]:
            table = _table(runs)
            first = _first_metric(table)
            best = next(iter(_ranked(table)))
            styles = {name: "control" if is_control(name) else "best" if name == best else "" for name in table.methods}
            chart = dots_chart(table, first, styles).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
            opening, rest = chart.split(">", 1)
            found[_chart_name(protocol, data, model)] = f"{opening}><style>{STYLE}</style>{rest}\n"
    return found


# The summary: who localises and who is faithful, of the methods that both protocols have measured.
LOCALISATION = ("skipplus-segmentation", "pets/seg", "AP")
FAITHFULNESS = ("skipplus-faithfulness", "data/imagenet", ("insertion accuracy", "deletion accuracy (100 - x)"))
NAMED = ("tokentm", "gradtoken", "decompx.skipplus", "gae", "rollout", "raw_attention", "attnlrp", "gradcam")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 430, 52, 14, 185, 40


def summary(results: Path) -> str:
    """Localisation against faithfulness as SVG: a dot for every method, with a name where it is on the Pareto front."""
    tables = _tables(results)
    localised = _means(tables[*LOCALISATION[:2], ""][0], (LOCALISATION[2],))
    faithful = _means(tables[*FAITHFULNESS[:2], ""][0], FAITHFULNESS[2])
    points = {name: (localised[name], faithful[name]) for name in localised if name in faithful}
    methods = {name: at for name, at in points.items() if not is_control(name)}
    best = pareto_front(np.array(list(methods.values())))
    front = {name for name, is_best in zip(methods, best, strict=True) if is_best}
    (left, right), (low, high) = (_round_bounds(values) for values in zip(*points.values(), strict=True))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - left) / (right - left)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    parts = [f"<style>{STYLE}{SUMMARY_STYLE}</style>", *_axes((left, right), (low, high), place)]
    along = sorted(place(*methods[name]) for name in front)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in along)
    parts.append(f'<polyline class="front" points="{line}"/>')
    taken: list[tuple[float, float]] = []
    for name in sorted(points, key=lambda one: points[one][1]):
        x, y = place(*points[name])
        kind = "control" if is_control(name) else "best" if name in front else ""
        title = f"{name}: AP {points[name][0]:.1f}, faithfulness {points[name][1]:.1f}"
        text = ""
        if kind or name in NAMED:  # the front is named on the right, where there is room, the others on the left
            side, anchor = (x + 8, "start") if name in front else (x - 8, "end")
            height = y + 4
            while any(abs(side - other) < LABEL and abs(height - above) < 12 for other, above in taken):
                height -= 2
            taken.append((side, height))
            text = f'<text x="{side:.1f}" y="{height:.1f}" text-anchor="{anchor}">{name}</text>'
        parts.append(f'<g class="dot {kind}"><title>{title}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>{text}</g>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>\n'


SUMMARY_STYLE = (
    ".front{fill:none;stroke:#d9622b;stroke-width:1;stroke-dasharray:3 3}"
    ".dot text{font-size:10.5px}.dot.best text{font-weight:600}"
)
LABEL = 130  # pixels of the longest name


def _axes(
    across: tuple[float, float], up: tuple[float, float], place: Callable[[float, float], tuple[float, float]]
) -> Iterator[str]:
    for tick in range(int(across[0]), int(across[1]) + 1, 10):
        x = place(tick, up[0])[0]
        yield f'<line class="gridline" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick}</text>'
    for tick in range(int(up[0]), int(up[1]) + 1, 5):
        y = place(across[0], tick)[1]
        yield f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
    middle = (HEIGHT - BOTTOM + TOP) / 2
    centre = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{centre:.0f}" y="{HEIGHT - 6}" text-anchor="middle">localisation (AP, %)</text>'
    turned = f'transform="rotate(-90 14 {middle:.0f})" text-anchor="middle"'
    yield f'<text x="14" y="{middle:.0f}" {turned}>faithfulness (insertion and deletion, %)</text>'


def _round_bounds(values: Sequence[float]) -> tuple[float, float]:
    return 5 * math.floor(min(values) / 5), 5 * math.ceil(max(values) / 5)


def _means(runs: Sequence[Kept], metrics: Sequence[str]) -> dict[str, float]:
    """The mean of several metrics of every method, in percent, for all that were measured by all of them."""
    table = _table(runs)
    unit = {metric.name: 100.0 if metric.range[1] <= 1 else 1.0 for metric in table.metrics}
    found = {}
    for method in table.methods:
        estimates = [table.estimate(method, metric) for metric in metrics]
        if all(estimate is not None and math.isfinite(estimate.mean) for estimate in estimates):
            found[method] = sum(estimate.mean * unit[estimate.metric] for estimate in estimates if estimate) / len(
                metrics
            )
    return found


def _chart_name(protocol: str, data: str, model: str | None) -> str:
    return f"{protocol}-{'-'.join(filter(None, (Path(data).parts[0], model)))}.svg"


def _tables(results: Path) -> dict[tuple[str, str, str], list[list[Kept]]]:
    """The kept runs by protocol, data set and model, those of one table together, the largest first."""
    together: dict[str, list[Kept]] = {}
    for file in sorted(results.glob("*.json")):
        kept = _read(file)
        together.setdefault(kept.table, []).append(kept)
    found: dict[tuple[str, str, str], list[list[Kept]]] = {}
    # Controls alone stand below the tables that they belong to, however many photos they have.
    for runs in sorted(together.values(), key=lambda runs: (not _methods(_table(runs)), -runs[0].counted)):
        run = runs[0].run
        apart = APART if run["model"]["name"] == APART else ""
        found.setdefault((run["protocol"], ending_of(run["data"]), apart), []).append(runs)
    return found


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
    table = _table(runs)
    noun = "texts" if runs[0].run["settings"].get("reads") == "texts" else "photos"
    first, count = runs[0], len(_methods(table))
    sample = ", a stratified sample" if first.run.get("stratified") and first.measured < first.run["images"] else ""
    what = f"{count} methods" if count else "the controls alone, on a random sample of the same photos"
    parts = [f"{first.counted} {noun}{sample}, {what}, 95% bootstrap intervals.", _markdown(table)]
    points = _merged([kept.points for kept in runs])
    if points:
        parts.append(_curve_table(points, table))
    if table.published and count:
        data = published_data(table.published)
        parts += [
            f"Published by others, with other models on {data}, not measured here (percent):",
            markdown_grid(*published_rows(table.published)),
        ]
    commands = "\n".join(_command(kept) for kept in runs)
    return "\n\n".join([*parts, f"```\n{commands}\n```", ""])


def _table(runs: Sequence[Kept]) -> ResultTable:
    protocol = find_protocol(runs[0].run["protocol"])
    merged = _merged([kept.rows for kept in runs])
    return ResultTable(protocol.title, protocol.metrics(), merged, published=published_results(protocol.name))


def _methods(table: ResultTable) -> list[str]:
    return [method for method in table.methods if not is_control(method)]


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
    parts += ["--stratify"] if run.get("stratified") else []
    parts += [f"--limit {kept.measured}"] if kept.measured < run["images"] else []
    parts += [f"--shard-size {run['shard_size']}", f"--threads {run['threads']}"]
    return " ".join(parts)


def _markdown(table: ResultTable) -> str:
    """One line per method, best first by the first metric that has a direction; controls stand below."""
    headings = ["method", *(table_heading(metric) for metric in table.metrics)]
    rows = [[_label(name), *(_cell(table, name, metric) for metric in table.metrics)] for name in _ranked(table)]
    return markdown_grid(headings, rows)


def _curve_table(points: Sequence[Estimate], table: ResultTable) -> str:
    """The points of the curve of token-F1, the methods in the order of the table above."""
    steps = list(dict.fromkeys(point.metric for point in points))
    found: dict[str, list[str]] = {}
    for point in points:
        mean, low, high = (f"{100 * value:.1f}" for value in (point.mean, point.low, point.high))
        interval = f" <small>{low} to {high}</small>" if math.isfinite(point.low) else ""  # one text has none
        found.setdefault(point.method, []).append(f"{mean}{interval}")
    rows = [[_label(name), *found[name]] for name in _ranked(table) if name in found]
    title = "token-F1 (%) over the number of words taken, the highest first, 95% intervals:"
    return f"{title}\n\n{markdown_grid(['method', *steps], rows)}"


def _label(method: str) -> str:
    return f"*control: `{method}`*" if is_control(method) else f"`{method}`"


def _first_metric(table: ResultTable) -> Metric:
    return next(metric for metric in table.metrics if metric.direction is not None)


def _ranked(table: ResultTable) -> list[str]:
    first = _first_metric(table)
    sign = -1 if first.direction == "higher" else 1

    def place(method: str) -> tuple[bool, float, str]:
        found = table.estimate(method, first.name)
        known = found is not None and not math.isnan(found.mean)
        return is_control(method), sign * found.mean if known else math.inf, method

    return sorted(table.methods, key=place)


def _cell(table: ResultTable, method: str, metric: Metric) -> str:
    estimate = table.estimate(method, metric.name)
    if estimate is None or not math.isfinite(estimate.mean):
        return ""
    mean, bounds = number_parts(estimate, metric)
    text = f"**{mean}**" if table.is_best(estimate, metric) else mean
    return text if bounds is None else f"{text} <small>{bounds[0]} to {bounds[1]}</small>"


def main() -> None:
    """Write tables and charts, or with --check fail if they are not what the kept runs say."""
    results = DOCS / "results"
    for file in sorted(results.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        write_or_check(file, page(text, results), "write_results_page")
        for name, chart in charts(text, results).items():
            write_or_check(results / name, chart, "write_results_page")
    write_or_check(results / "summary.svg", summary(results), "write_results_page")


if __name__ == "__main__":
    main()
