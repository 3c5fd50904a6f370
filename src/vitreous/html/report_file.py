"""A report that is written photo by photo, so that a folder of thousands needs no more memory than one photo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from PIL import Image

from vitreous.errors import UnsupportedModelError, VitreousError
from vitreous.explanation import Explanation
from vitreous.html import page, report
from vitreous.models import LoadedModel
from vitreous.pictures.data.curves import perturbation_curves
from vitreous.pixels import Images
from vitreous.storage import StorageError, complete_file


class ReportError(VitreousError):
    """A photo cannot be shown in a report."""


class _NoPhoto(Exception):  # noqa: N818  # not an error: it makes the draft go
    """There is nothing to report on."""


class ReportFile:
    """A report on its way; see ``report_file``.

    Attributes:
        photos: How many photos it was given.
    """

    def __init__(self, stream: IO[str], command: str, methods: Sequence[str]) -> None:
        self._stream, self._command, self._methods = stream, command, methods
        self._provenance: Mapping[str, Any] = {}
        self._curves = True
        self.photos = 0
        stream.write(page.opening("Why did the model say this?", style=report.STYLE))

    def add(self, name: str, photo: Image.Image, explanation: Explanation, model: LoadedModel) -> None:
        """Write about one photo; its curves are measured now.

        Raises:
            ReportError: it cannot be shown; nothing is written about it, and others can be added.
        """
        self.photos += 1
        self._curves = explanation.scale != "value"
        self._provenance, self._methods = explanation.provenance, explanation.methods
        try:
            section = self._section(name, photo, explanation, model)
        except Exception as error:  # whatever it was, the work on all other photos must not be lost with it
            said = str(error) if isinstance(error, VitreousError) else f"unexpected {type(error).__name__}: {error}"
            raise ReportError(f"{name} is not in the report: {said}") from error
        self._stream.write(section)

    def _section(self, name: str, photo: Image.Image, explanation: Explanation, model: LoadedModel) -> str:
        targets = range(explanation.classes_per_image if self._curves else 0)
        measured = [measure(model, photo, explanation, target) for target in targets]
        return report.photo_section(name, photo, explanation, measured)

    def finish(self, failures: Mapping[str, str]) -> None:
        """Write what concerns all photos."""
        self._stream.write(report.failures_section(failures))
        self._stream.write(report.methods_section(self._methods, curves=self._curves))
        self._stream.write(report.making_section(self._provenance, self._command))
        self._stream.write(page.CLOSING)


@contextmanager
def report_file(path: Path, command: str, methods: Sequence[str]) -> Iterator[ReportFile]:
    """Give a report to fill; it appears at ``path`` only if the block ends without an exception and gave it a photo."""
    if path.is_dir():  # found out before the work is done, not when the draft is moved there
        raise StorageError(f"{path} cannot be written: it is a folder")
    with suppress(_NoPhoto), complete_file(path) as draft, draft.open("w", encoding="utf-8") as stream:
        report = ReportFile(stream, command, methods)
        yield report
        if not report.photos:
            raise _NoPhoto  # an earlier report is worth more than a page about nothing


def measure(model: LoadedModel, photo: Images, explanation: Explanation, target: int) -> report.Measured:
    """Measure curves of one photo: drop patches; where a model cannot do without a patch, paint pixels."""
    try:
        curves = perturbation_curves(model, photo, explanation, target_index=target)
    except UnsupportedModelError:
        curves = perturbation_curves(model, photo, explanation, target_index=target, by="pixels")
        return report.Measured(curves, "pixels")
    return report.Measured(curves, "patches")
