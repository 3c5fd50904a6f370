"""A page about one explanation: the predictions and maps of its images, without a model to measure curves with."""

from __future__ import annotations

from pathlib import Path

from vitreous.explanation import Explanation
from vitreous.html import page, report
from vitreous.storage import StorageError, complete_file

_MADE = "vitreous.explain, in Python"


def write_page(explanation: Explanation, path: Path) -> Path:
    """Write the page, complete or not at all, and give its path.

    Raises:
        StorageError: the file cannot be written.
        InputError: the explanation holds no pictures.
    """
    if path.is_dir():
        raise StorageError(f"{path} cannot be written: it is a folder")
    sections = [
        report.photo_section(f"image {index}", None, explanation.select(index), ()) for index in range(len(explanation))
    ]
    with complete_file(path) as draft:
        draft.write_text(
            page.document(
                "Why did the model say this?",
                "".join(sections)
                + report.methods_section(explanation.methods, curves=False)
                + report.making_section(explanation.provenance, _MADE),
                style=report.STYLE,
            ),
            encoding="utf-8",
        )
    return path
