"""Fill the tables of docs/speed.md from the measurements that are kept in docs/speed/.

    python scripts/write_speed_page.py [--check]

The page's words are written by hand. Between ``<!-- speed: NAME -->`` and ``<!-- end -->`` stands what is in
docs/speed/NAME.json: rows of ``vitreous speed --out``, or of a script in benchmarks/ with columns of its own.
``NAME peers`` is the comparison with other projects. What was not measured has no table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from generated import write_or_check

from vitreous.evaluation.report.tables import markdown_grid

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(<!-- speed: (\w+)( peers)? -->\n).*?(<!-- end -->)", re.DOTALL)
AT_ONCE = re.compile(r"\d+ methods at once")
NOT_MEASURED = "Not measured yet."
Row = dict[str, Any]


def main() -> None:
    """Write the page, or check it."""
    file = DOCS / "speed.md"
    write_or_check(file, page(file.read_text(encoding="utf-8"), DOCS / "speed"), "write_speed_page")


def page(text: str, folder: Path) -> str:
    """The page with its tables written anew."""

    def filled(place: re.Match[str]) -> str:
        file = folder / f"{place[2]}.json"
        body = _section(json.loads(file.read_text(encoding="utf-8")), bool(place[3])) if file.exists() else NOT_MEASURED
        return f"{place[1]}\n{body}\n\n{place[4]}"

    return PLACE.sub(filled, text)


def _section(kept: dict[str, Any], peers: bool) -> str:  # noqa: FBT001 - a switch between two forms of one section
    rows = kept["rows"]
    if "exponents" in kept:
        parts = [_growth_table(rows, kept["exponents"])]
    elif "ratio_limit" not in rows[0]:
        parts = [_plain_table(rows)]
    elif peers:
        parts = [_peer_table(rows), *_not_timed(row for row in rows if row["peer"])]
    else:
        own = [row for row in rows if row["peer"] is None]
        parts = [_own_table(own), *_not_timed(own), *_at_once(own)]
    return "\n\n".join([*parts, _origin(kept), f"```\n{_wrapped(kept['command'])}\n```"])


def _own_table(rows: Sequence[Row]) -> str:
    headings = ["method", "/ limit", "/ forward", "/ forward + backward", "memory", "passes", "limit"]
    timed = sorted((row for row in rows if row["ratio_limit"] is not None), key=lambda row: row["ratio_forward"])
    lines = [
        [
            _name(row["method"]),
            *(_ratio(row, name) for name in ("ratio_limit", "ratio_forward", "ratio_forward_backward")),
            f"{row['ratio_peak_memory']:.2f}",
            row["passes"],
            row["limit"],
        ]
        for row in timed
    ]
    return markdown_grid(headings, lines)


def _peer_table(rows: Sequence[Row]) -> str:
    headings = ["method", "peer", "peer / ours", "time / limit: ours", "peer", "memory: ours", "peer", "difference"]
    ours = {row["method"]: row for row in rows if row["peer"] is None}
    lines = []
    for row in rows:
        if row["peer"] and row["ratio_peer"] is not None:
            own = ours[row["method"]]
            lines.append(
                [
                    *(f"`{row['method']}`", row["peer"], _ratio(row, "ratio_peer")),
                    *(f"{which['ratio_limit']:.2f}" for which in (own, row)),
                    *(f"{which['ratio_peak_memory']:.2f}" for which in (own, row)),
                    f"{row['agreement']['largest_difference']:.0e}",
                ]
            )
    return markdown_grid(headings, lines)


def _not_timed(rows: Iterable[Row]) -> list[str]:
    """Why some rows have no numbers."""
    items = [
        f"- `{row['method']}`{' by ' + row['peer'] if row['peer'] else ''}: {row['reason']}."
        for row in rows
        if row["reason"]
    ]
    return ["Not timed:\n\n" + "\n".join(items)] if items else []


def _at_once(rows: Sequence[Row]) -> list[str]:
    """What asking for everything at once spares."""
    timed = [row for row in rows if row["ratio_forward"] is not None]
    together = next((row for row in timed if AT_ONCE.fullmatch(row["method"])), None)
    if together is None:
        return []
    alone = sum(row["ratio_forward"] for row in timed if row is not together)
    share = together["ratio_forward"] / alone
    return [f"The {together['method']} take {share:.2f} of the time that they take one by one."]


def _growth_table(rows: Sequence[Row], exponents: Sequence[Row]) -> str:
    """A line for each method: the exponents, and both ratios for each number of tokens."""
    counts = sorted({row["tokens"] for row in rows})
    found = {(row["method"], row["tokens"]): row for row in rows}
    fitted = {row["method"]: row for row in exponents}
    columns = {"time": ("time_exponent", "ratio_forward_backward"), "memory": ("memory_exponent", "ratio_peak_memory")}
    headings, lines = ["method"], {row["method"]: [f"`{row['method']}`"] for row in rows}
    for what, (exponent, ratio) in columns.items():
        headings += [f"{what} grows as n^", *(f"{what} at {count}" for count in counts)]
        for method, line in lines.items():
            numbers = [fitted.get(method, {}).get(exponent)]
            numbers += [found.get((method, count), {}).get(ratio) for count in counts]
            line += ["" if number is None else f"{number:.2f}" for number in numbers]
    return markdown_grid(headings, list(lines.values()))


def _plain_table(rows: Sequence[Row]) -> str:
    """The columns as they are named in the file, without underscores."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    headings = [name.replace("_", " ") for name in names]
    return markdown_grid(headings, [[_cell(row.get(name)) for name in names] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _name(method: str) -> str:
    return method if AT_ONCE.fullmatch(method) else f"`{method}`"


def _ratio(row: Row, name: str) -> str:
    low, high = row["spread"][name]
    return f"{row[name]:.2f} <small>{low:.2f} to {high:.2f}</small>"


def _origin(kept: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in kept["versions"].items())
    what = f"{kept['model']}, batch {kept['batch']}, " if {"model", "batch"} <= set(kept) else ""
    return f"{what}{'m' if what else 'M'}easured on {kept['created'][:10]} with {versions}, by"


def _wrapped(command: str) -> str:
    """A command in lines that fit on a page."""
    lines = [""]
    for word in command.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) > 112:
            lines[-1] += " \\"
            lines.append("    " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
    return "\n".join(lines)


if __name__ == "__main__":
    main()
