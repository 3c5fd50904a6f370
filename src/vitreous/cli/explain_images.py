"""Explain image files in batches and save the results. A broken image is reported and the others are explained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import vitreous
from vitreous._utils.defaults import DEFAULT_METHODS
from vitreous._utils.storage import StorageError
from vitreous.cli.console import plain_warnings, print_error, print_line
from vitreous.cli.image_files import drop_duplicates, find_image_files
from vitreous.cli.progress import progress_bar, steps
from vitreous.errors import ImageError, InputError
from vitreous.explanation.explanation import ExplanationError
from vitreous.html.report import ReportError, report_file
from vitreous.inputs.class_names import find_class
from vitreous.inputs.images import read_image
from vitreous.methods.spelling import parse
from vitreous.models import load_model
from vitreous.models.loaded import given_outputs
from vitreous.pictures.comparison import comparison

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL import Image
    from rich.console import Console

    from vitreous._utils.defaults import OutputActivation
    from vitreous.errors import VitreousError
    from vitreous.explanation.explanation import Explanation
    from vitreous.html.report import ReportFile
    from vitreous.models.loaded import LoadedModel

COMPARISON = "comparison.png"


@dataclass(frozen=True)
class ExplainRequest:
    """The options of one ``vitreous explain`` call. Without methods, the defaults that the model supports are used."""

    model: str
    methods: Sequence[str] | None
    targets: Sequence[str]
    topk: int | None
    out: Path
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    image_size: tuple[int, int] | None
    batch_size: int
    device: str
    outputs: OutputActivation | None = None
    precision: str = "model"
    compile: bool = False
    stage: int | None = None
    report: Path | None = None
    command: str = ""
    recursive: bool = False


@dataclass(frozen=True)
class ExplainedImage:
    """An image that is done: its explanation, without the pixels, and the folder of its results."""

    image: Path
    folder: Path
    explanation: Explanation

    @property
    def comparison(self) -> Path:
        """The picture that shows all methods side by side."""
        return self.folder / COMPARISON


@dataclass(frozen=True)
class ExplainResult:
    """Images that are done, and by image the reasons of those that failed."""

    explained: list[ExplainedImage] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def run(arguments: Sequence[str], request: ExplainRequest, console: Console) -> ExplainResult:
    """Explain the images named by ``arguments`` and save each result in its own folder."""
    for spelling in request.methods or ():
        parse(spelling)  # report a misspelled method before loading the model
    job = _ExplainJob(request, console)
    images = job.find(arguments)
    with plain_warnings(console):
        if images and request.report is not None:
            with report_file(request.report, request.command, request.methods or DEFAULT_METHODS) as job.report:
                job.explain(images)
                job.report.finish(job.result.failures)
        elif images:
            job.explain(images)
    return job.result


class _ExplainJob:
    """The state of one call: from image files to folders of results."""

    def __init__(self, request: ExplainRequest, console: Console) -> None:
        self.request = request
        self.console = console
        self.methods = request.methods
        self.left_out: Mapping[str, str] = {}
        self.report: ReportFile | None = None
        self.result = ExplainResult()

    def find(self, arguments: Sequence[str]) -> list[Path]:
        """Return the images that files, folders and the word ``demo`` name, without duplicates."""
        found: list[Path] = []
        for argument in arguments:
            try:
                images, skipped = find_image_files(argument, recursive=self.request.recursive)
            except ImageError as error:
                self._add_failure(argument, error)
                continue
            found += images
            if skipped is not None and str(skipped):
                print_line(self.console, str(skipped))
        return drop_duplicates(found)

    def explain(self, files: Sequence[Path]) -> None:
        """Explain images batch by batch."""
        request = self.request
        with steps(self.console, f"loading {request.model}"):
            model = load_model(
                request.model, mean=request.mean, std=request.std, image_size=request.image_size, device=request.device
            )
        model = replace(given_outputs(model, request.outputs), stage=request.stage)
        targets = [find_class(text, model.class_names) for text in request.targets]
        folders = _output_folders(files, request.out)
        with progress_bar(self.console, len(files)) as advance:
            for batch in _batches(files, request.batch_size):
                self._explain_batch(model, targets, self._read(batch), folders)
                advance(len(batch))

    def _read(self, files: Sequence[Path]) -> dict[Path, Image.Image]:
        images = {}
        for file in files:
            try:
                images[file] = read_image(file)
            except ImageError as error:
                self._add_failure(str(file), error)
        return images

    def _explain_batch(
        self,
        model: LoadedModel,
        targets: Sequence[int],
        images: Mapping[Path, Image.Image],
        folders: Mapping[Path, Path],
    ) -> None:
        if not images:
            return
        try:
            explanation = vitreous.explain(
                model,
                list(images.values()),
                methods=self.methods,
                target=as_target(targets, len(images)),
                topk=self.request.topk,
                precision=self.request.precision,
                compile=self.request.compile,
            )
        except (ImageError, InputError) as error:
            if len(images) == 1:
                self._add_failure(str(next(iter(images))), error)
            else:  # explain one by one, so that only the faulty image fails
                for file, image in images.items():
                    self._explain_batch(model, targets, {file: image}, folders)
            return
        if self.methods is None:  # later batches use the defaults that the model was found to support
            self.methods, self.left_out = explanation.methods, explanation.left_out
        for index, (file, image) in enumerate(images.items()):
            one = replace(explanation.select(index), left_out=self.left_out)
            if self._save(file, one, folders[file]) and self.report is not None:
                self._add_to(self.report, file, image, one, model)

    def _save(self, file: Path, explanation: Explanation, folder: Path) -> bool:
        try:
            explanation.save(folder, overwrite=True, pictures={COMPARISON: comparison(explanation)})
        except StorageError as error:
            self._add_failure(str(file), error)
            return False
        self.result.explained.append(ExplainedImage(file, folder, explanation.without_images()))
        if methods := _methods_without_map(explanation):
            message = f"{file}: no map by {', '.join(methods)}: the scores contain NaN or infinity"
            self._add_failure(str(file), ExplanationError(message))
        return True

    def _add_to(
        self, report: ReportFile, file: Path, image: Image.Image, explanation: Explanation, model: LoadedModel
    ) -> None:
        try:
            report.add(file.name, image, explanation, model)
        except ReportError as error:
            self._add_failure(str(file), error)

    def _add_failure(self, image: str, error: VitreousError) -> None:
        before = self.result.failures.get(image)
        self.result.failures[image] = f"{before}; {error}" if before else str(error)
        print_error(str(error), self.console)


def _methods_without_map(explanation: Explanation) -> list[str]:
    """Return the methods of which at least one map cannot be drawn."""
    targets = range(explanation.classes_per_image)
    return [method for method in explanation.methods if not all(explanation.shows(method, 0, one) for one in targets)]


def as_target(classes: Sequence[int], images: int) -> int | list[list[int]] | None:
    """Return the ``target`` argument of ``explain``: none, one class for all images, or several for each image."""
    if not classes:
        return None
    return classes[0] if len(classes) == 1 else [list(classes)] * images


def _output_folders(files: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Name a folder after each image; equal names, also if only case differs, get a number."""
    folders: dict[Path, Path] = {}
    used: set[str] = set()
    for file in files:
        stem = file.stem.strip(". ") or "photo"  # "...jpg" has the stem "..", which would be the parent folder
        name, number = stem, 2
        while name.casefold() in used:
            name, number = f"{stem}-{number}", number + 1
        used.add(name.casefold())
        folders[file] = out / name
    return folders


def _batches(files: Sequence[Path], size: int) -> Iterator[Sequence[Path]]:
    for start in range(0, len(files), size):
        yield files[start : start + size]
