"""The chosen maps on the half of the photos that nothing was chosen on: values per photo, tables and tests.

    python benchmarks/recipe_report.py measure --model tiny --photos 64 --out FILE [--parts segmentation tokens ...]
    python benchmarks/recipe_report.py tables FILE... > tables.md

``measure`` goes on where it stopped: every batch of photos is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from recipe import (
    COLUMNS,
    MODELS,
    TOGETHER,
    base_maps,
    grid_game,
    measured,
    mosaics_of,
    open_model,
    samples_of,
    sign_flip,
)

import vitreous

METHODS = (
    "tokentm",
    "gradtoken",
    "gae",
    "decompx.skipplus",
    "decompx.skipplus.propagate",
    "fullgrad_plus:rule=libra",
    "attcat:rule=libra",
    "twoscale",
    "refined",
)
BAR = ("tokentm", "gradtoken", "gae", "decompx.skipplus")
PARTS = ("segmentation", "grid", "tokens", "pixels", "saco")
Values = dict[str, dict[str, list[float]]]


def measure(
    model: str, photos: int, parts: list[str], methods: list[str], percent: list[int], out: Path, skip: int = 0
) -> None:
    """Measure part after part, batch after batch; of the photos of the half, ``skip`` are left out."""
    known = json.loads(out.read_text()) if out.exists() else {"values": {}, "done": {}}
    known |= {"model": model, "name": MODELS[model].name, "data": MODELS[model].data, "percent": percent}
    known |= {
        "methods": methods,
        "skip": skip,
        "versions": versions(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    _, adapter = open_model(model)
    samples = samples_of(model, "report", photos, skip)
    mosaics = list(mosaics_of(samples))
    for start in range(0, len(samples), TOGETHER):
        some = samples[start : start + TOGETHER]
        base: Any = None
        for part in parts:
            if known["done"].get(part, 0) > start or (part == "segmentation" and not MODELS[model].masks):
                continue
            if part == "grid":
                cells = mosaics[start : start + TOGETHER]
                found = base_maps(adapter, cells, explained="label", bases=methods)
                table = grid_game(found, cells, found["maps"])
            else:
                base = base or base_maps(adapter, some, explained="predicted", bases=methods)
                table = measured(model, some, base, base["maps"], [part], percent)
            for column, of in table.items():
                for method, values in of.items():
                    known["values"].setdefault(column, {}).setdefault(method, []).extend(values.tolist())
            known["done"][part] = start + len(some)
            out.write_text(json.dumps(known))


def versions() -> dict[str, str]:
    """What was used."""
    return {
        "vitreous": vitreous.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
    }


def table(known: dict[str, Any]) -> str:
    """A table of means; bold the best of a column and what is not clearly worse (p >= 0.01)."""
    columns = [column for column in COLUMNS if column.name in known["values"]]
    counts = [len(next(iter(known["values"][column.name].values()))) for column in columns]
    arrows = {1: "↑", -1: "↓"}
    lines = [
        "| map | " + " | ".join(f"{column.name} {arrows[column.better]}" for column in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
        "| *photos* | " + " | ".join(f"*{count}*" for count in counts) + " |",
    ]
    for method in known["methods"]:
        cells = []
        for column in columns:
            of = {name: np.array(values) * column.better for name, values in known["values"][column.name].items()}
            if method not in of:
                cells.append("-")
                continue
            best = max(of, key=lambda name: of[name].mean())
            near = method == best or sign_flip(of[best] - of[method]) >= 0.01
            text = f"{abs(of[method].mean()):.2f}"
            cells.append(f"**{text}**" if near else text)
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tests(known: dict[str, Any], method: str, against: tuple[str, ...]) -> str:
    """Gains over some maps with their p, positive where the method is better."""
    columns = [column for column in COLUMNS if column.name in known["values"]]
    lines = [
        f"| `{method}` against | " + " | ".join(column.name for column in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for other in against:
        cells = []
        for column in columns:
            of = known["values"][column.name]
            if method not in of or other not in of:
                cells.append("-")
                continue
            gain = (np.array(of[method]) - np.array(of[other])) * column.better
            cells.append(f"{gain.mean():+.2f} (p {sign_flip(gain):.2g})")
        lines.append(f"| `{other}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def exploration(values: Values) -> str:
    """Means of all candidates, best average precision first; a dash where one was not measured."""
    columns = [column for column in COLUMNS if column.name in values]
    names = list(dict.fromkeys(name for column in columns for name in values[column.name]))
    # A zero of their own concerns the grid game alone.
    moved = {name: name.removesuffix("-1") for name in names}
    rows: dict[str, dict[str, float]] = {}
    for column in columns:
        for name, of in values[column.name].items():
            if name == moved[name] or column.name == "grid":
                shown = "grid, 0 at +1 sd" if name != moved[name] else column.name
                rows.setdefault(moved[name], {})[shown] = float(np.mean(of))
            else:
                rows.setdefault(moved[name], {}).setdefault(column.name, float(np.mean(of)))
    shown = [*(column.name for column in columns), "grid, 0 at +1 sd"]
    lines = ["| map | " + " | ".join(shown) + " |", "| --- |" + " ---: |" * len(shown)]
    for name, row in sorted(rows.items(), key=lambda item: -item[1].get("AP", 0)):
        lines.append(f"| {name} | " + " | ".join(f"{row[each]:.2f}" if each in row else "-" for each in shown) + " |")
    return "\n".join(lines)


def merged(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One table per model, of files that measured other methods on the same photos; only what was measured on all."""
    found: dict[str, dict[str, Any]] = {}
    for known in files:
        first = found.setdefault(known["model"], {**known, "methods": [], "values": {}})
        assert (first["percent"], first.get("skip", 0)) == (known["percent"], known.get("skip", 0))
        first["methods"] += [method for method in known["methods"] if method not in first["methods"]]
        for column, of in known["values"].items():
            first["values"].setdefault(column, {}).update(of)
    for known in found.values():
        for column, of in known["values"].items():
            count = max(map(len, of.values()))
            left_out = [method for method in known["methods"] if len(of.get(method, ())) < count]
            if left_out:
                print(f"{known['model']}, {column}: not measured on all photos: {', '.join(left_out)}", file=sys.stderr)
            whole = {method: values for method, values in of.items() if method not in left_out}
            known["values"][column] = without_missing(whole)
    return list(found.values())


def without_missing(of: dict[str, list[float]]) -> dict[str, list[float]]:
    """Values by method without photos on which one has none, such as precision where a mask is empty."""
    known = np.isfinite(np.array(list(of.values()))).all(axis=0)
    return {method: np.array(values)[known].tolist() for method, values in of.items()}


def main() -> None:
    """Measure, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", choices=list(MODELS), default="tiny")
    measuring.add_argument("--photos", type=int, default=64)
    measuring.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    measuring.add_argument("--methods", nargs="+", default=list(METHODS))
    measuring.add_argument("--percent", type=int, nargs="+", default=[10, 30, 50, 70, 90])
    measuring.add_argument("--skip", type=int, default=0, help="photos of that half that were looked at before")
    measuring.add_argument("--out", type=Path, required=True)
    printing = commands.add_parser("tables")
    printing.add_argument("files", type=Path, nargs="+")
    exploring = commands.add_parser("exploration", help="the means of all candidates that were compared")
    exploring.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "exploration":
        for file in options.files:
            print(f"#### {file.stem.removeprefix('explore-')}\n\n{exploration(json.loads(file.read_text()))}\n")
        return
    if options.what == "measure":
        measure(
            options.model, options.photos, options.parts, options.methods, options.percent, options.out, options.skip
        )
        return
    for known in merged([json.loads(file.read_text()) for file in options.files]):
        print(f"### {known['model']}\n\n{table(known)}\n")
        for method in ("twoscale", "refined"):
            if method in known["methods"]:
                others = BAR if method == "twoscale" else tuple(each for each in known["methods"] if each != method)
                print(f"{tests(known, method, others)}\n")


if __name__ == "__main__":
    main()
