"""What visitors take home: the maps as they see them, the numbers behind them, and a report; of a text, its page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitreous.errors import InputError
from vitreous.explanation_folder import arrays_of
from vitreous.html import page, report
from vitreous.pictures.curves import Curves
from vitreous.pictures.tiles import SHARPNESS, Row, Tile, tiled
from vitreous.storage import write_text
from vitreous.text_explanation import By
from vitreous.web.drawing import Sliders, backdrop_of, draw_map
from vitreous.web.record import Record
from vitreous.web.studio import Visit, shown_methods
from vitreous.web.text_record import TextRecord
from vitreous.web.wanted import Wanted, classes_of

_TILE = 260


def save_png(record: Record, visit: Visit, wanted: Wanted, sliders: Sliders, folder: Path) -> Path:
    """Write the maps with their sliders as one picture."""
    methods = _shown(record, wanted)
    backdrop = backdrop_of(record, _TILE * SHARPNESS)
    rows = [
        Row(
            [
                Tile(backdrop.photo, record.caption(class_index)),
                *(Tile(draw_map(record, method, class_index, sliders, backdrop)) for method in methods),
            ]
        )
        for class_index in classes_of(wanted, record)
    ]
    signs = sorted({record.signed[method] for method in methods})
    return tiled(rows, tile=_TILE, headings=("photo", *methods), legend=signs).save(folder / _name(visit, "png"))


def save_npz(record: Record, visit: Visit, wanted: Wanted, folder: Path) -> Path:
    """Write the raw scores, the classes and the logits, as ``Explanation.save`` does."""
    explanation = record.explanation(_shown(record, wanted), classes_of(wanted, record))
    place = folder / _name(visit, "npz")
    np.savez(place, **arrays_of(explanation))
    return place


def save_report(record: Record, visit: Visit, wanted: Wanted, found: Sequence[Sequence[Curves]], folder: Path) -> Path:
    """Write a page that holds everything about the photo."""
    methods = _shown(record, wanted)
    explanation = record.explanation(methods, classes_of(wanted, record))
    measured = [report.Measured(tuple(curves), record.by) for curves in found] if record.has_curves else []
    command = f"vitreous serve: {visit.model}, {', '.join(methods)}"
    body = (
        report.photo_section(visit.upload.name, record.photo.picture, explanation, measured)
        + report.methods_section(methods, curves=record.has_curves)
        + report.provenance_section(explanation.provenance, command)
    )
    place = folder / _name(visit, "html")
    write_text(place, page.document("Why did the model say this?", body, style=report.STYLE))
    return place


def save_words(record: TextRecord, wanted: Wanted, by: By, folder: Path) -> Path:
    """Write a page with the text in colours."""
    methods = [method for method in wanted.methods if method not in record.failed]
    if not methods:
        raise InputError("There is no explanation to take home.")
    place = folder / "vitreous-text.html"
    write_text(place, record.explanation(methods, classes_of(wanted, record)).html(by=by))
    return place


def _shown(record: Record, wanted: Wanted) -> list[str]:
    methods = list(dict.fromkeys(shown_methods(record, wanted)))
    if not methods:
        raise InputError("There is no map to take home.")
    return methods


def _name(visit: Visit, kind: str) -> str:
    """Name a file after the photo as this visitor calls it, with nothing in it that a file system could mistake."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(visit.upload.name).stem).strip("-")[:60]
    return f"vitreous-{stem or 'photo'}.{kind}"
