"""Results as text for other documents: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitreous.benchmark.report.page import write_page
from vitreous.benchmark.results import Results
from vitreous.benchmark.summary import summarise
from vitreous.benchmark.tables import COLUMNS, as_latex, as_markdown, as_rows, published_as_rows

FORMATS = ("html", "markdown", "latex", "csv", "json")
ENDINGS = {"html": ".html", "markdown": ".md", "latex": ".tex", "csv": ".csv", "json": ".json"}


def write_document(found: Sequence[Results], form: str, *, pictures: int = 3) -> str:
    """Write results in one of ``FORMATS``."""
    if form == "html":
        return write_page(found, pictures=pictures)
    if form == "json":
        return json.dumps([_as_json(results) for results in found], indent=2) + "\n"
    if form == "csv":
        return _csv(found)
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


def _csv(found: Sequence[Results]) -> str:
    """One table for all; in front of every row what it is of, and how many images are finished of those wanted."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("protocol", "model", "data", "images", "wanted", *COLUMNS), lineterminator="\n")
    writer.writeheader()
    for results in found:
        writer.writerows({**_about(results), **row} for row in as_rows(summarise(results)))
    return text.getvalue()
