"""Draw the figures of ``vitreous figure``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

import vitreous
from vitreous.cli.console import print_line, stderr_console
from vitreous.cli.explain_images import as_target, drop_duplicates, find_image_files
from vitreous.cli.figure import find_figure_kind
from vitreous.datasets import Sample, open_dataset
from vitreous.errors import InputError, MethodError, TargetError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import FigureOptions, look_with
from vitreous.inputs.images import read_image
from vitreous.inputs.model_io import OutputActivation
from vitreous.inputs.target import Target
from vitreous.inputs.target_objects import Contrast, parse_target
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel, load_model
from vitreous.models.dual_encoder import load_dual_encoder
from vitreous.models.loaded import with_outputs
from vitreous.pictures import Look
from vitreous.pictures.canvas import Canvas, check_format, class_caption
from vitreous.pictures.charts import curves_figure, dataset_curves_figure, layer_curve_figure
from vitreous.pictures.curves import By, perturbation_curves
from vitreous.pictures.figures import (
    Shown,
    classes_figure,
    comparison_figure,
    overlay_figure,
    similar_figure,
    strips_figure,
    transformation_figure,
)
from vitreous.pictures.perturbations import Direction, dataset_curves, filmstrip, filmstrip_figure, layer_curves
from vitreous.pictures.strips import (
    Strip,
    depth_strip,
    heads_strip,
    slices_figure,
    start_layer_strip,
    token_transformation,
)
from vitreous.pictures.style import colour_map, page_style

_CLASSES = 3  # default number of classes of the figure that compares them
_STEPS, _FRAMES = 10, 5  # default numbers of steps of curves and of filmstrips

StripMaker = Callable[[LoadedModel, Image.Image, str, "int | Target | None"], Strip]


@dataclass(frozen=True)
class FigureRequest:
    """The options of one ``vitreous figure`` call."""

    name: str
    model: str
    methods: Sequence[str]
    targets: Sequence[str]
    topk: int | None
    prompts: Sequence[str]
    outputs: OutputActivation | None
    out: Path
    look: FigureOptions
    outline: Path | None
    data: str | None
    block: int
    by: By
    steps: int | None
    direction: Direction
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    image_size: tuple[int, int] | None
    device: str


def run(arguments: Sequence[str], request: FigureRequest) -> Path:
    """Draw the figure of the images named by ``arguments`` and return its file."""
    check_format(request.out)  # check the request before loading the model
    look = look_with(None, request.look)
    page_style(look)
    colour_map(signed=True, cmap=look.cmap)
    if find_figure_kind(request.name).images == "none":
        return _results_figure(arguments, request, look).save(request.out)
    _check_request(request)
    photos = _find_photos(arguments, request)
    model = _load_model(request)
    if request.prompts:
        targets: list[int | Target] = list(range(len(request.prompts)))
    else:
        targets = [parse_target(text, model.class_names) for text in request.targets]
    return _DRAWINGS[request.name](_FigureJob(request, model, photos, targets, look)).save(request.out)


def _check_request(request: FigureRequest) -> None:
    for spelling in request.methods:
        parse(spelling)
    several = find_figure_kind(request.name).several_classes or request.name in {"contrast", "prompts"}
    if not several and (len(request.targets) > 1 or (request.topk or 1) > 1 or len(request.prompts) > 1):
        raise TargetError(f"the figure {request.name!r} shows one class; classes, overlay and comparison show several")
    if request.methods and request.name == "transformation":
        raise MethodError("the figure 'transformation' shows the parts of TokenTM; omit --method")
    if request.name == "prompts" and not request.prompts:
        raise InputError("the figure 'prompts' needs a --prompt, and a model of images and texts such as demo-clip")
    if request.name == "contrast" and (len(request.targets) > 2 or request.topk):
        raise TargetError("the figure 'contrast' shows two classes: --target A --target B, or --target 'A vs B'")


@dataclass(frozen=True)
class _Photo:
    """An image with where it is from, and regions whose outline is drawn."""

    image: Image.Image
    file: Path | None = None
    mask: Any = None


def _find_photos(arguments: Sequence[str], request: FigureRequest) -> list[_Photo]:
    kind = find_figure_kind(request.name)
    if request.data is not None:
        photos = _samples(request.data, arguments)
    else:
        files = drop_duplicates(file for argument in arguments for file in find_image_files(argument)[0])
        if os.path.realpath(request.out) in map(os.path.realpath, files):
            raise InputError(f"{request.out} is one of the images; choose another --out")
        photos = [_Photo(read_image(file), file) for file in files]
    if kind.images == "one" and len(photos) > 1:
        raise InputError(f"the figure {request.name!r} shows one image, not {len(photos)}; comparison shows several")
    if kind.images == "two" and len(photos) < 2:
        raise InputError(f"the figure {request.name!r} needs two images: the first is compared with all others")
    if request.outline is not None:
        if len(photos) > 1:
            raise InputError("--outline is the mask of one image; --data has those of a data set")
        photos = [replace(photos[0], mask=read_image(request.outline))]
    return photos


def _samples(data: str, numbers: Sequence[str]) -> list[_Photo]:
    """The images of a data set by their numbers, with their masks."""
    opened = open_dataset(data)
    photos = []
    for number in numbers:
        if not number.isdecimal() or int(number) >= len(opened):
            raise InputError(f"with --data, images are numbers from 0 to {len(opened) - 1}, not {number!r}")
        sample = opened.load(int(number))
        if not isinstance(sample, Sample):
            raise InputError(f"{data} holds texts, and figures show images")
        photos.append(_Photo(sample.image, None, sample.mask))
    return photos


def _load_model(request: FigureRequest) -> LoadedModel:
    """Load the model; with prompts, as a model whose outputs are their scores."""
    options: dict[str, Any] = {
        "mean": request.mean, "std": request.std, "image_size": request.image_size, "device": request.device,
    }  # fmt: skip
    if request.prompts:
        dual = load_dual_encoder(request.model, **options)
        model = dual.loaded(dual.classifier(request.prompts), outputs="value")
        assert isinstance(model, LoadedModel)  # what is loaded by name has its preprocessing
        return model
    return with_outputs(load_model(request.model, **options), request.outputs)


@dataclass(frozen=True)
class _FigureJob:
    """A request with its model, images and targets."""

    request: FigureRequest
    model: LoadedModel
    photos: Sequence[_Photo]
    targets: Sequence[int | Target]
    all_looks: Look

    @property
    def image(self) -> Image.Image:
        """The image of figures that show one."""
        return self.photos[0].image

    @property
    def images(self) -> list[Image.Image]:
        """All images."""
        return [photo.image for photo in self.photos]

    @property
    def target(self) -> int | Target | None:
        """The class of figures that show one; ``None`` for the predicted class."""
        return self.targets[0] if self.targets else None

    @cached_property
    def look(self) -> Look:
        """How the figure of one image is drawn."""
        return replace(self.all_looks, mask=self.photos[0].mask)

    @property
    def steps(self) -> int:
        """Number of steps of curves."""
        return self.request.steps or _STEPS

    def explain(self, image: Image.Image, topk: int | None = None) -> Explanation:
        """Explain an image by the methods of the request."""
        target = as_target(self.targets, 1)
        topk = self.request.topk or (topk if target is None else None)
        return vitreous.explain(self.model, [image], self.request.methods, target, topk=topk)


def _overlay(job: _FigureJob) -> Canvas:
    return overlay_figure(job.explain(job.image), photo=job.image, look=job.look)


def _comparison(job: _FigureJob) -> Canvas:
    shown = [Shown(job.explain(photo.image), 0, photo.image, photo.mask) for photo in job.photos]
    return comparison_figure(shown, look=job.all_looks)


def _classes(job: _FigureJob) -> Canvas:
    explanation = job.explain(job.image, topk=_CLASSES)
    return classes_figure(explanation, photo=job.image, look=job.look)


def _prompts(job: _FigureJob) -> Canvas:
    return classes_figure(job.explain(job.image), photo=job.image, look=job.look)


def _contrast(job: _FigureJob) -> Canvas:
    """Two classes and their contrast."""
    first, second = _two_classes(job)
    targets: list[int | str | Target] = [first, second, Contrast(first, second)]
    explanation = vitreous.explain(job.model, [job.image], job.request.methods, [targets])
    return classes_figure(explanation, photo=job.image, look=job.look)


def _two_classes(job: _FigureJob) -> tuple[int, int]:
    if len(job.targets) == 2 and all(isinstance(target, int) for target in job.targets):
        first, second = job.targets
        assert isinstance(first, int)
        assert isinstance(second, int)
        return first, second
    target = job.target if isinstance(job.target, Target) else Contrast(job.target)
    if len(job.targets) == 2 or not isinstance(target, Contrast):
        raise TargetError("the figure 'contrast' shows two classes: --target A --target B, or --target 'A vs B'")
    found = vitreous.explain(job.model, [job.image], "ixg", target).targets[0]
    assert isinstance(found, Contrast)
    assert isinstance(found.index, int)
    assert isinstance(found.other, int)
    return found.index, found.other


def _similar(job: _FigureJob) -> Canvas:
    files = [photo.file for photo in job.photos]
    query, *others = [file for file in files if file is not None]
    if not others:
        raise InputError("the figure 'similar' compares image files; omit --data")
    found = vitreous.similar(job.model, query, others, job.request.methods, k=len(others))
    return similar_figure(found, query, look=job.all_looks)


def _strips(make: StripMaker) -> Callable[[_FigureJob], Canvas]:
    def draw(job: _FigureJob) -> Canvas:
        strips = [make(job.model, job.image, method, job.target) for method in job.request.methods]
        return strips_figure(strips, photo=job.image, look=job.look)

    return draw


def _filmstrip(job: _FigureJob) -> Canvas:
    explanation = job.explain(job.image)
    steps, direction = job.request.steps or _FRAMES, job.request.direction
    films = [
        filmstrip(job.model, job.image, explanation, method, direction=direction, steps=steps)
        for method in job.request.methods
    ]
    return filmstrip_figure(films, photo=job.image, look=job.look)


def _curves(job: _FigureJob) -> Canvas:
    explanation = job.explain(job.image)
    by = job.request.by
    curves = perturbation_curves(job.model, job.image, explanation, by=by, steps=job.steps)
    return curves_figure(curves, caption=class_caption(explanation), what=by, look=job.look)


def _dataset_curves(job: _FigureJob) -> Canvas:
    by = job.request.by
    curves = dataset_curves(job.model, job.images, job.request.methods, job.target, by=by, steps=job.steps)
    return dataset_curves_figure(curves, caption=_images(job), what=by, look=job.all_looks)


def _layer_curve(job: _FigureJob) -> Canvas:
    by = job.request.by
    curves = layer_curves(job.model, job.images, job.request.methods, job.target, by=by, steps=job.steps)
    return layer_curve_figure(curves, caption=_images(job), look=job.all_looks)


def _images(job: _FigureJob) -> str:
    """How many images were measured; in print that belongs into the caption of the figure."""
    return "" if job.all_looks.width is not None else f"{len(job.photos)} image{'s' if len(job.photos) > 1 else ''}"


def _transformation(job: _FigureJob) -> Canvas:
    parts = token_transformation(job.model, job.image, job.request.block, job.target)
    return transformation_figure(parts, photo=job.image, look=job.look)


def _results_figure(arguments: Sequence[str], request: FigureRequest, look: Look) -> Canvas:
    """Draw stored results; of several tables in a folder the first. Slices and frames: a stored explanation."""
    from vitreous.evaluation.report.results import discover_runs  # noqa: PLC0415  # imports pyarrow

    console = stderr_console()
    if len(arguments) > 1:
        raise InputError(f"the figure {request.name!r} shows one folder of results, not {len(arguments)}")
    if request.name in {"slices", "frames"}:
        explanation = Explanation.load(Path(arguments[0]).expanduser())
        return slices_figure(
            explanation, methods=request.methods or None, look=look, word=request.name.removesuffix("s")
        )
    found = discover_runs(Path(arguments[0]).expanduser(), lambda text: print_line(console, text))
    if len(found) > 1:
        print_line(console, f"{len(found)} tables are there; this is the first. Name the folder of a run for another.")
    return found[0].figure(request.name, methods=request.methods or None, look=look)


_DRAWINGS: Mapping[str, Callable[[_FigureJob], Canvas]] = {
    "overlay": _overlay,
    "comparison": _comparison,
    "classes": _classes,
    "contrast": _contrast,
    "prompts": _prompts,
    "similar": _similar,
    "depth": _strips(depth_strip),
    "heads": _strips(heads_strip),
    "layers": _strips(start_layer_strip),
    "filmstrip": _filmstrip,
    "curves": _curves,
    "dataset-curves": _dataset_curves,
    "layer-curve": _layer_curve,
    "transformation": _transformation,
}
