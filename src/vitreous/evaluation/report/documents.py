"""Results as text for other documents: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitreous.evaluation.report.page import write_page
from vitreous.evaluation.report.results import Results, summarise
from vitreous.evaluation.report.tables import COLUMNS, ResultTable, as_latex, as_markdown, as_rows, published_as_rows


def write_document(
    found: Sequence[Results], form: str, *, pictures: int = 3, published: bool = False, p_values: bool = False
) -> str:
    """Write results as ``html``, ``markdown``, ``latex``, ``csv`` or ``json``.

    Args:
        found: what was measured.
        form: one of these.
        pictures: how many of the best and of the worst images the page shows of a method.
        published: whether numbers that papers print go with them, apart; CSV has own results alone.
        p_values: whether Markdown and LaTeX have the paired tests against the best method; all others always do.
    """
    if form == "html":
        return write_page(found, pictures=pictures, published=published)
    if form == "json":
        return json.dumps([_as_json(results, published=published) for results in found], indent=2) + "\n"
    if form == "csv":
        return as_csv((_about(results), summarise(results)) for results in found)
    write = {"markdown": as_markdown, "latex": as_latex}[form]
    return "\n".join(write(summarise(results, published=published), p_values=p_values) for results in found)


def _as_json(results: Results, *, published: bool) -> dict[str, Any]:
    table = summarise(results, published=published)
    return {
        **_about(results),
        "rows": as_rows(table),
        **({"published": published_as_rows(table)} if published else {}),
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
