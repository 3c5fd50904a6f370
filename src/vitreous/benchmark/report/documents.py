"""Results as text for other documents: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vitreous.benchmark.report.page import write_page
from vitreous.benchmark.results import Results
from vitreous.benchmark.summary import summarise
from vitreous.benchmark.tables import COLUMNS, ResultTable, as_latex, as_markdown, as_rows, published_as_rows


def write_document(found: Sequence[Results], form: str, *, pictures: int = 3) -> str:
    """Write results as ``html``, ``markdown``, ``latex``, ``csv`` or ``json``."""
    if form == "html":
        return write_page(found, pictures=pictures)
    if form == "json":
        return json.dumps([_as_json(results) for results in found], indent=2) + "\n"
    if form == "csv":
        return as_csv((_about(results), summarise(results)) for results in found)
    write: Mapping[str, Callable[..., str]] = {"markdown": as_markdown, "latex": as_latex}
    return "\n".join(write[form](summarise(results)) for results in found)


def _as_json(results: Results) -> dict[str, Any]:
    table = summarise(results)
    return {
        **_about(results),
        "rows": as_rows(table),
        "published": published_as_rows(table),
        "failures": [vars(failure) for failure in results.failures()],
        "runs": [str(store.folder) for store in results.stores],
    }


def _about(results: Results) -> dict[str, Any]:
    run = results.run
    context = {"protocol": run.protocol, "model": run.model.name, "data": run.data}
    return {**context, "images": len(results.images), "wanted": results.wanted}


def as_csv(described: Iterable[tuple[Mapping[str, Any], ResultTable]]) -> str:
    """One table for all; in front of every row what it is of, and how many images are finished of those wanted."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("protocol", "model", "data", "images", "wanted", *COLUMNS), lineterminator="\n")
    writer.writeheader()
    for about, table in described:
        writer.writerows({**about, **row} for row in as_rows(table))
    return text.getvalue()
