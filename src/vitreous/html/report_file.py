"""A report that is written photo by photo, so that a folder of thousands needs no more memory than one photo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from PIL import Image

from vitreous.errors import UnsupportedModelError
from vitreous.explanation import Explanation
from vitreous.html import page, report
from vitreous.models import LoadedModel
from vitreous.pictures.data.curves import perturbation_curves
from vitreous.pixels import Images
from vitreous.storage import StorageError, complete_file


class ReportFile:
    """A report on its way; see ``report_file``."""

    def __init__(self, stream: IO[str], command: str, methods: Sequence[str]) -> None:
        self._stream, self._command, self._methods = stream, command, methods
        self._provenance: Mapping[str, Any] = {}
        stream.write(page.opening("Why did the model say this?", style=report.STYLE))

    def add(self, name: str, photo: Image.Image, explanation: Explanation, model: LoadedModel) -> None:
        """Write about one photo; its curves are measured now."""
        measured = [measure(model, photo, explanation, target) for target in range(explanation.classes_per_image)]
        self._provenance, self._methods = explanation.provenance, explanation.methods
        self._stream.write(report.photo_section(name, photo, explanation, measured))

    def finish(self, failures: Mapping[str, str]) -> None:
        """Write what concerns all photos."""
        self._stream.write(report.failures_section(failures))
        self._stream.write(report.methods_section(self._methods))
        self._stream.write(report.making_section(self._provenance, self._command))
        self._stream.write(page.CLOSING)


@contextmanager
def report_file(path: Path, command: str, methods: Sequence[str]) -> Iterator[ReportFile]:
    """Give a report to fill; it appears at ``path`` only if the block ends without an exception."""
    if path.is_dir():  # found out before the work is done, not when the draft is moved there
        raise StorageError(f"{path} cannot be written: it is a folder")
    with complete_file(path) as draft, draft.open("w", encoding="utf-8") as stream:
        yield ReportFile(stream, command, methods)


def measure(model: LoadedModel, photo: Images, explanation: Explanation, target: int) -> report.Measured:
    """Measure curves of one photo: drop patches; where a model cannot do without a patch, paint pixels."""
    try:
        curves = perturbation_curves(model, photo, explanation, target_index=target)
    except UnsupportedModelError:
        curves = perturbation_curves(model, photo, explanation, target_index=target, by="pixels")
        return report.Measured(curves, "pixels")
    return report.Measured(curves, "patches")
