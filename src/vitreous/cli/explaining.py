"""Photos explained one batch after the other; one that is broken is reported and the rest is done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import vitreous
from vitreous.class_names import find_class
from vitreous.cli.console import plain_warnings, say, say_error
from vitreous.cli.photos import each_once, photos_of
from vitreous.cli.progress import progress_bar, steps
from vitreous.defaults import DEFAULT_METHODS
from vitreous.errors import ImageError, InputError
from vitreous.explanation import ExplanationError
from vitreous.html.report import ReportError, report_file
from vitreous.images import read_image
from vitreous.models import load_model
from vitreous.outputs import given_outputs
from vitreous.pictures.comparison import comparison
from vitreous.spelling import parse
from vitreous.storage import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL import Image
    from rich.console import Console

    from vitreous.errors import VitreousError
    from vitreous.explanation import Explanation
    from vitreous.html.report import ReportFile
    from vitreous.models.loaded import LoadedModel
    from vitreous.outputs import OutputActivation

COMPARISON = "comparison.png"


@dataclass(frozen=True)
class Request:
    """What to do with every photo; without methods it is the usual ones that the model allows."""

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
class Explained:
    """A photo that is done: its explanation, without the photo itself, and the folder that holds everything."""

    photo: Path
    folder: Path
    explanation: Explanation


@dataclass(frozen=True)
class Outcome:
    """What became of the photos."""

    explained: list[Explained] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def run(arguments: Sequence[str], request: Request, console: Console) -> Outcome:
    """Explain the photos that ``arguments`` name and save each result in a folder of its own."""
    for spelling in request.methods or ():
        parse(spelling)  # a typing error should not wait for a model to be loaded
    session = _Session(request, console)
    photos = session.find(arguments)
    with plain_warnings(console):
        if photos and request.report is not None:
            with report_file(request.report, request.command, request.methods or DEFAULT_METHODS) as session.report:
                session.explain(photos)
                session.report.finish(session.outcome.failures)
        elif photos:
            session.explain(photos)
    return session.outcome


class _Session:
    """The photos of one call on their way from files to folders."""

    def __init__(self, request: Request, console: Console) -> None:
        self.request = request
        self.console = console
        self.methods = request.methods
        self.left_out: Mapping[str, str] = {}
        self.report: ReportFile | None = None
        self.outcome = Outcome()

    def find(self, arguments: Sequence[str]) -> list[Path]:
        """Give the photos that files, folders and the word ``demo`` stand for, each once."""
        found: list[Path] = []
        for argument in arguments:
            try:
                photos, left_out = photos_of(argument, recursive=self.request.recursive)
            except ImageError as error:
                self._report(argument, error)
                continue
            found += photos
            if left_out is not None and str(left_out):
                say(self.console, str(left_out))
        return each_once(found)

    def explain(self, photos: Sequence[Path]) -> None:
        """Explain photos batch by batch."""
        request = self.request
        with steps(self.console, f"loading {request.model}"):
            model = load_model(
                request.model, mean=request.mean, std=request.std, image_size=request.image_size, device=request.device
            )
        model = replace(given_outputs(model, request.outputs), stage=request.stage)
        targets = [find_class(text, model.class_names) for text in request.targets]
        folders = _folders(photos, request.out)
        with progress_bar(self.console, len(photos)) as advance:
            for batch in _batches(photos, request.batch_size):
                self._explain_batch(model, targets, self._read(batch), folders)
                advance(len(batch))

    def _read(self, photos: Sequence[Path]) -> dict[Path, Image.Image]:
        images = {}
        for photo in photos:
            try:
                images[photo] = read_image(photo)
            except ImageError as error:
                self._report(str(photo), error)
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
                target=target_of(targets, len(images)),
                topk=self.request.topk,
                precision=self.request.precision,
                compile=self.request.compile,
            )
        except (ImageError, InputError) as error:
            if len(images) == 1:
                self._report(str(next(iter(images))), error)
            else:  # one of them is to blame: it must not take the others with it
                for photo, image in images.items():
                    self._explain_batch(model, targets, {photo: image}, folders)
            return
        if self.methods is None:  # what the model does not allow is found out, and said, once
            self.methods, self.left_out = explanation.methods, explanation.left_out
        for index, (photo, image) in enumerate(images.items()):
            one = replace(explanation.select(index), left_out=self.left_out)
            if self._save(photo, one, folders[photo]) and self.report is not None:
                self._add_to(self.report, photo, image, one, model)

    def _save(self, photo: Path, explanation: Explanation, folder: Path) -> bool:
        try:
            explanation.save(folder, overwrite=True, pictures={COMPARISON: comparison(explanation)})
        except StorageError as error:
            self._report(str(photo), error)
            return False
        self.outcome.explained.append(Explained(photo, folder, explanation.without_images()))
        if left_out := _not_shown(explanation):
            names = ", ".join(left_out)
            self._report(
                str(photo), ExplanationError(f"{photo}: no map by {names}: the scores contain NaN or infinity")
            )
        return True

    def _add_to(
        self, report: ReportFile, photo: Path, image: Image.Image, explanation: Explanation, model: LoadedModel
    ) -> None:
        try:
            report.add(photo.name, image, explanation, model)
        except ReportError as error:
            self._report(str(photo), error)

    def _report(self, photo: str, error: VitreousError) -> None:
        before = self.outcome.failures.get(photo)
        self.outcome.failures[photo] = f"{before}; {error}" if before else str(error)
        say_error(str(error), self.console)


def _not_shown(explanation: Explanation) -> list[str]:
    """Give the methods with a map that cannot be drawn."""
    targets = range(explanation.classes_per_image)
    return [method for method in explanation.methods if not all(explanation.shows(method, 0, one) for one in targets)]


def target_of(classes: Sequence[int], images: int) -> int | list[list[int]] | None:
    """Give the classes in the form of the library: none, one for all photos, or several for each."""
    if not classes:
        return None
    return classes[0] if len(classes) == 1 else [list(classes)] * images


def _folders(photos: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Give each photo a folder named after it; photos of the same name get a number, also where only case differs."""
    folders: dict[Path, Path] = {}
    taken: set[str] = set()
    for photo in photos:
        stem = photo.stem.strip(". ") or "photo"  # "...jpg" has the stem "..", which would be the parent folder
        name, number = stem, 2
        while name.casefold() in taken:
            name, number = f"{stem}-{number}", number + 1
        taken.add(name.casefold())
        folders[photo] = out / name
    return folders


def _batches(photos: Sequence[Path], size: int) -> Iterator[Sequence[Path]]:
    for start in range(0, len(photos), size):
        yield photos[start : start + size]
