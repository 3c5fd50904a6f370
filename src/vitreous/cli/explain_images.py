"""Explain image files in batches and save the results. A broken image is reported and the others are explained.

Images are named as files, as folders, or as ``demo`` and ``demo-two``, the images that are shipped. A model of volumes
or clips takes files of volumes and folders of frames.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import vitreous
from vitreous._utils.defaults import AUTO, DEFAULT_METHODS
from vitreous._utils.storage import StorageError
from vitreous.cli.console import plain_warnings, print_error, print_line, progress_bar, steps
from vitreous.errors import ImageError, InputError, TargetError
from vitreous.explanation.explanation import ExplanationError, with_origin
from vitreous.explanation.folder import file_names
from vitreous.html.report import ReportError, report_file
from vitreous.inputs.dense_targets import Pixels
from vitreous.inputs.images import SUFFIXES, find_images, read_image
from vitreous.inputs.target import Target
from vitreous.inputs.target_objects import Similarity, parse_target
from vitreous.inputs.volumes import VolumeWindow, is_volume_file
from vitreous.methods.spelling import parse
from vitreous.models import demo, load_model
from vitreous.models.dual_encoder import load_dual_encoder
from vitreous.models.loaded import LoadedModel, with_outputs
from vitreous.models.preprocessing import VolumePreprocessing
from vitreous.pictures.base_image import comparison

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL import Image
    from rich.console import Console
    from torch import Tensor

    from vitreous._utils.defaults import OutputActivation
    from vitreous.errors import VitreousError
    from vitreous.explanation.explanation import Explanation
    from vitreous.explanation.trust import Trust
    from vitreous.html.report import ReportFile


_SHIPPED = {"demo": demo.PHOTO, "demo-two": demo.TWO_PHOTO}
_LISTED_SUBFOLDERS = 5
_MAX_FOLDERS = 10_000  # visited only to report what was skipped
_NO_REPORT = "reports show images: leave out --report for volumes and clips, whose slices are drawn in the folder"


@dataclass(frozen=True)
class SkippedFiles:
    """Files of a folder that were not used.

    Attributes:
        folder: the folder.
        others: number of files directly inside it that do not have the suffix of an image; hidden files do not count.
        subfolders: number of images in each subfolder, by relative path.
    """

    folder: Path
    others: int = 0
    subfolders: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """One sentence; empty if nothing was skipped."""
        parts = []
        if self.others:
            parts.append(f"{_count(self.others, 'file')} without an image suffix")
        if self.subfolders:
            images = _count(sum(self.subfolders.values()), "image")
            parts.append(f"{images} in {self.listed_subfolders} (use --recursive to include them)")
        return f"{self.folder}: skipped {' and '.join(parts)}" if parts else ""

    @property
    def listed_subfolders(self) -> str:
        """The number of subfolders, with the first few by name."""
        named = [f"{name}: {count}" for name, count in self.subfolders.items()]
        more = len(named) - _LISTED_SUBFOLDERS
        listed = ", ".join(named[:_LISTED_SUBFOLDERS]) + (f", and {more} more" if more > 0 else "")
        return f"{_count(len(named), 'subfolder')} ({listed})"


def find_image_files(argument: str, *, recursive: bool = False) -> tuple[list[Path], SkippedFiles | None]:
    """Return the images that a file, a folder or the word ``demo`` names, and what was skipped in a folder.

    Args:
        argument: what was typed.
        recursive: include images in subfolders; hidden subfolders and links to folders are never followed.

    Raises:
        ImageError: A folder cannot be listed or contains no image, or the name is empty.
    """
    if not argument:
        raise ImageError("the name of an image is empty; use . for the current folder")
    path = _SHIPPED[argument] if argument in _SHIPPED and not Path(argument).exists() else Path(argument)
    if not os.path.isdir(path):  # noqa: PTH112  # does not raise on names that no file can have
        return find_images([path]), None
    inside, *below = _walk(path) if recursive else islice(_walk(path), _MAX_FOLDERS)
    skipped = _skipped_files(path, inside, [] if recursive else below)
    if recursive:
        found = sorted(file for files in (inside, *below) for file in files if _is_image(file))
        if found:
            return found, skipped
    try:
        return find_images([path]), skipped
    except ImageError as error:
        if not skipped.subfolders:
            raise
        raise ImageError(
            f"{error}; there are images in {skipped.listed_subfolders}: use --recursive to include them"
        ) from error


def volume_files(folder: Path) -> list[Path]:
    """The volumes directly inside a folder, by name; hidden files do not count."""
    return sorted(file for file in folder.iterdir() if is_volume_file(file.name) and not file.name.startswith("."))


def drop_duplicates(files: Iterable[Path]) -> list[Path]:
    """Drop files that were named before, also by another path. A link to itself is kept as it is."""
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(os.path.realpath(file), file)
    return list(first.values())


def _walk(folder: Path) -> Iterator[list[Path]]:
    """Yield the files of a folder, then those of every subfolder; a folder that cannot be read is empty."""
    empty = True
    for place, subfolders, names in os.walk(folder):
        empty = False
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield [Path(place) / name for name in names if not name.startswith(".")]
    if empty:
        yield []


def _skipped_files(folder: Path, inside: list[Path], below: list[list[Path]]) -> SkippedFiles:
    counts = {
        str(files[0].parent.relative_to(folder)): count for files in below if (count := sum(map(_is_image, files)))
    }
    return SkippedFiles(folder, sum(not _is_image(file) for file in inside), counts)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


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
    image_size: tuple[int, ...] | None
    batch_size: int
    device: str
    outputs: OutputActivation | None = None
    output: str | None = None
    similar_to: Sequence[str] = ()
    mask: Path | None = None
    precision: str = "model"
    compile: bool = False
    stage: int | None = None
    report: Path | None = None
    command: str = ""
    recursive: bool = False
    prompts: Sequence[str] = ()
    trust: bool = False
    window: VolumeWindow = None


@dataclass(frozen=True)
class ExplainedImage:
    """An image that is done: its explanation, without the pixels, the folder of its results, and trust on request."""

    image: Path
    folder: Path
    explanation: Explanation
    trust: Trust | None = None
    picture: str = COMPARISON

    @property
    def comparison(self) -> Path:
        """The picture that shows all methods side by side; of a volume or clip, its slices or frames with the maps."""
        return self.folder / self.picture

    @property
    def image_file(self) -> Path:
        """The image as the model saw it."""
        return self.folder / "image-0.png"

    def map_file(self, method: str, target_index: int) -> Path | None:
        """Return the overlay of a method and target; None where there is none."""
        name = file_names(self.explanation.methods)[method]
        file = self.folder / f"overlay-0-{target_index}-{name}.png"
        return file if file.is_file() else None


@dataclass(frozen=True)
class ExplainResult:
    """Images that are done, and by image the reasons of those that failed."""

    explained: list[ExplainedImage] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def run(arguments: Sequence[str], request: ExplainRequest, console: Console) -> ExplainResult:
    """Explain the images named by ``arguments`` and save each result in its own folder."""
    for spelling in () if request.methods is None or list(request.methods) == [AUTO] else request.methods:
        parse(spelling)  # report a misspelled method before loading the model
    job = _ExplainJob(request, console)
    images = job.find(arguments)
    with plain_warnings(console):
        if images and request.report is not None and any(is_volume_file(file.name) for file in images):
            raise InputError(_NO_REPORT)
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
        self.arguments = list(arguments)
        for argument in arguments:
            if is_volume_file(argument) and os.path.isfile(argument):  # noqa: PTH113  # too long a name is no file
                found.append(Path(argument))
                continue
            try:
                images, skipped = find_image_files(argument, recursive=self.request.recursive)
                if skipped is None and not os.path.exists(images[0]):  # noqa: PTH110  # as above
                    read_image(images[0])  # says what is wrong before the model is loaded
            except ImageError as error:
                if os.path.isdir(argument) and (volumes := volume_files(Path(argument))):  # noqa: PTH112
                    found += volumes
                    continue
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
            model = _load_model(request)
        model = replace(with_outputs(model, request.outputs), stage=request.stage)
        files = self._volumes(model, files) if model.takes_volumes else files
        targets = _Targets.of(request, model)
        folders = _output_folders(files, request.out)
        with progress_bar(self.console, len(files)) as advance:
            for batch in _batches(files, request.batch_size):
                self._explain_batch(model, targets, self._read(model, batch), folders)
                advance(len(batch))

    def _volumes(self, model: LoadedModel, files: Sequence[Path]) -> list[Path]:
        """Return the volumes that the arguments name: a folder of image files is one clip, its files are frames."""
        if self.request.report is not None:
            raise InputError(_NO_REPORT)
        folders = [Path(argument) for argument in self.arguments if os.path.isdir(argument)]  # noqa: PTH112
        clips = [folder for folder in folders if not volume_files(folder)]
        images = [file for file in files if not is_volume_file(file.name)]
        if alone := [file for file in images if file.parent not in clips]:
            raise InputError(
                f"{model.name} takes volumes or clips: give .nii, .npy or DICOM files, or folders of frames, "
                f"not single images ({alone[0].name})"
            )
        return drop_duplicates([*(file for file in files if is_volume_file(file.name)), *clips])

    def _read(self, model: LoadedModel, files: Sequence[Path]) -> dict[Path, Any]:
        images: dict[Path, Any] = {}
        for file in files:
            try:
                images[file] = _read_file(model, file)
            except (ImageError, InputError) as error:
                self._add_failure(str(file), error)
        return images

    def _explain_batch(
        self,
        model: LoadedModel,
        targets: _Targets,
        images: Mapping[Path, Any],
        folders: Mapping[Path, Path],
    ) -> None:
        if not images:
            return
        try:
            explanation = vitreous.explain(
                model,
                list(images.values()),
                methods=self.methods,
                target=targets.of_images(list(images.values())),
                topk=self.request.topk,
                output=self.request.output,
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
            alone = explanation.select(index)
            one = with_origin(replace(alone, left_out=self.left_out), alone.origin)
            trust = vitreous.trust(model, [image], one)[0] if self.request.trust else None
            if self._save(model, file, one, folders[file], trust) and self.report is not None:
                self._add_to(self.report, file, image, one, model, trust)

    def _save(
        self, model: LoadedModel, file: Path, explanation: Explanation, folder: Path, trust: Trust | None
    ) -> bool:
        name, drawn = COMPARISON, comparison(explanation)
        if isinstance(model.preprocessing, VolumePreprocessing):
            name = "frames.png" if model.preprocessing.clip else "slices.png"
            drawn = explanation.figure(name.removesuffix(".png")).image()
        try:
            explanation.save(folder, overwrite=True, pictures={name: drawn})
        except StorageError as error:
            self._add_failure(str(file), error)
            return False
        self.result.explained.append(ExplainedImage(file, folder, explanation.without_images(), trust, name))
        if methods := _methods_without_map(explanation):
            message = f"{file}: no map by {', '.join(methods)}: the scores contain NaN or infinity"
            self._add_failure(str(file), ExplanationError(message))
        return True

    def _add_to(
        self,
        report: ReportFile,
        file: Path,
        image: Image.Image,
        explanation: Explanation,
        model: LoadedModel,
        trust: Trust | None,
    ) -> None:
        try:
            report.add(file.name, image, explanation, model, trust)
        except ReportError as error:
            self._add_failure(str(file), error)

    def _add_failure(self, image: str, error: VitreousError) -> None:
        before = self.result.failures.get(image)
        self.result.failures[image] = f"{before}; {error}" if before else str(error)
        print_error(str(error), self.console)


def _read_file(model: LoadedModel, file: Path) -> Any:
    """Read an image; of a model of volumes or clips, a tensor (channels, depth, height, width)."""
    if isinstance(model.preprocessing, VolumePreprocessing):
        return model.preprocessing.read(file)
    if is_volume_file(file.name):
        raise ImageError(
            f"{file}: this is a volume, and {model.name} takes images; read_nifti and read_dicom of "
            "vitreous.integrations.medical give its slices as images"
        )
    return read_image(file)


def _load_model(request: ExplainRequest) -> LoadedModel:
    """Load the model; with prompts, as a model whose outputs are their scores."""
    options: dict[str, Any] = {
        "mean": request.mean, "std": request.std, "image_size": request.image_size, "device": request.device,
    }  # fmt: skip
    if not request.prompts:
        model = load_model(request.model, **options)
        if isinstance(model.preprocessing, VolumePreprocessing) and request.window is not None:
            return replace(model, preprocessing=replace(model.preprocessing, window=request.window))
        if request.window is not None:
            raise InputError(f"--window is for models of volumes, and {request.model} takes images")
        return model
    dual = load_dual_encoder(request.model, **options)
    prompted = dual.loaded(dual.classifier(request.prompts), outputs="value")
    assert isinstance(prompted, LoadedModel)  # what is loaded by name has its preprocessing
    return prompted


def _methods_without_map(explanation: Explanation) -> list[str]:
    """Return the methods of which at least one map cannot be drawn."""
    targets = range(explanation.classes_per_image)
    return [method for method in explanation.methods if not all(explanation.shows(method, 0, one) for one in targets)]


@dataclass(frozen=True)
class _Targets:
    """What is explained of every image: classes and contrasts, similarities, or pixels inside of a mask."""

    model: LoadedModel
    given: Sequence[Any]
    mask: Image.Image | None = None

    @classmethod
    def of(cls, request: ExplainRequest, model: LoadedModel) -> _Targets:
        """Read what the options name.

        Raises:
            TargetError: A class is not known, or the options do not go together.
            ImageError: An image cannot be read.
        """
        if request.prompts:  # the model's outputs are their scores
            return cls(model, list(range(len(request.prompts))))
        names = None if request.output is not None else model.class_names
        given: list[int | Target] = [parse_target(text, names) for text in request.targets]
        if request.mask is None:
            return cls(model, [*given, *(Similarity(read_image(name), Path(name).name) for name in request.similar_to)])
        if request.similar_to or not all(isinstance(target, int) for target in given):
            raise TargetError("--mask takes classes of --target, no contrasts and no --similar-to")
        return cls(model, given, read_image(request.mask))

    def of_images(self, images: Sequence[Any]) -> Any:
        """Return the ``target`` argument of ``explain``."""
        if self.mask is not None and self.model.takes_volumes:
            raise TargetError("--mask is an image, and this model takes volumes or clips")
        if self.mask is None:
            return as_target(self.given, len(images))
        masks = [self._mask_of(image) for image in images]
        if len(self.given) < 2:
            return [Pixels(mask, next(iter(self.given), None)) for mask in masks]
        return [[Pixels(mask, index) for index in self.given] for mask in masks]

    def _mask_of(self, image: Image.Image) -> Tensor:
        """Cut the mask out as the image is; one as large as the model's input is taken as it is."""
        assert self.mask is not None
        inside = np.asarray(self.mask.convert("L")) > 0
        if self.mask.size == image.size:
            inside = self.model.preprocessing.displayed_mask(inside.astype(np.uint8), outside=0) > 0
        elif inside.shape != self.model.preprocessing.image_size:
            height, width = self.model.preprocessing.image_size
            raise InputError(
                f"the mask is {self.mask.width} x {self.mask.height} pixels, and has to be {image.width} x "
                f"{image.height} as the image, or {width} x {height} as the model's input"
            )
        return torch.from_numpy(inside)


def as_target(targets: Sequence[int | Target], images: int) -> Any:
    """Return the ``target`` argument of ``explain``: none, one for all images, or several for each image."""
    if not targets:
        return None
    return targets[0] if len(targets) == 1 else [list(targets)] * images


def _output_folders(files: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Name a folder after each image; equal names, also if only case differs, get a number."""
    folders: dict[Path, Path] = {}
    used: set[str] = set()
    for file in files:
        stem = (
            file.stem.removesuffix(".nii").strip(". ") or "photo"
        )  # "...jpg" has the stem "..", which would be the parent folder
        name, number = stem, 2
        while name.casefold() in used:
            name, number = f"{stem}-{number}", number + 1
        used.add(name.casefold())
        folders[file] = out / name
    return folders


def _batches(files: Sequence[Path], size: int) -> Iterator[Sequence[Path]]:
    for start in range(0, len(files), size):
        yield files[start : start + size]
