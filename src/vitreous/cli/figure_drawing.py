"""Draw the figures of ``vitreous figure``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

import vitreous
from vitreous.cli.explain_images import as_target, drop_duplicates, find_image_files
from vitreous.cli.figure import find_figure_kind
from vitreous.errors import InputError, MethodError, TargetError
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.images import read_image
from vitreous.inputs.outputs import OutputActivation
from vitreous.inputs.target import Target
from vitreous.inputs.target_objects import parse_target
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel, load_model
from vitreous.models.loaded import with_outputs
from vitreous.pictures import Look
from vitreous.pictures.canvas import Canvas, check_format
from vitreous.pictures.captions import class_caption
from vitreous.pictures.curves import By, perturbation_curves
from vitreous.pictures.figures import (
    Shown,
    classes_figure,
    comparison_figure,
    curves_figure,
    overlay_figure,
    strips_figure,
    transformation_figure,
)
from vitreous.pictures.strips import Strip, depth_strip, heads_strip, start_layer_strip, token_transformation

_CLASSES = 3  # default number of classes of the figure that compares them

StripMaker = Callable[[LoadedModel, Image.Image, str, "int | Target | None"], Strip]


@dataclass(frozen=True)
class FigureRequest:
    """The options of one ``vitreous figure`` call."""

    name: str
    model: str
    methods: Sequence[str]
    targets: Sequence[str]
    topk: int | None
    outputs: OutputActivation | None
    out: Path
    smooth: bool
    opacity: float
    block: int
    by: By
    steps: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    image_size: tuple[int, int] | None
    device: str


def run(arguments: Sequence[str], request: FigureRequest) -> Path:
    """Draw the figure of the images named by ``arguments`` and return its file."""
    check_format(request.out)  # check the request before loading the model
    for spelling in request.methods:
        parse(spelling)
    kind = find_figure_kind(request.name)
    if not kind.several_classes and (len(request.targets) > 1 or (request.topk or 1) > 1):
        raise TargetError(f"the figure {request.name!r} shows one class; classes, overlay and comparison show several")
    if request.methods and request.name == "transformation":
        raise MethodError("the figure 'transformation' shows the parts of TokenTM; omit --method")
    files = drop_duplicates(file for argument in arguments for file in find_image_files(argument)[0])
    if os.path.realpath(request.out) in map(os.path.realpath, files):
        raise InputError(f"{request.out} is one of the images; choose another --out")
    if len(files) > 1 and not kind.several_images:
        raise InputError(f"the figure {request.name!r} shows one image, not {len(files)}; comparison shows several")
    images = [read_image(file) for file in files]
    model = load_model(
        request.model, mean=request.mean, std=request.std, image_size=request.image_size, device=request.device
    )
    model = with_outputs(model, request.outputs)
    targets = [parse_target(text, model.class_names) for text in request.targets]
    return _DRAWINGS[request.name](_FigureJob(request, model, images, targets)).save(request.out)


@dataclass(frozen=True)
class _FigureJob:
    """A request with its model, images and class indices."""

    request: FigureRequest
    model: LoadedModel
    images: Sequence[Image.Image]
    targets: Sequence[int | Target]

    @property
    def image(self) -> Image.Image:
        """The image of figures that show one."""
        return self.images[0]

    @property
    def target(self) -> int | Target | None:
        """The class of figures that show one; ``None`` for the predicted class."""
        return self.targets[0] if self.targets else None

    @cached_property
    def look(self) -> Look:
        """How maps are drawn."""
        return Look(smooth=self.request.smooth, opacity=self.request.opacity)

    def explain(self, image: Image.Image, topk: int | None = None) -> Explanation:
        """Explain an image by the methods of the request."""
        target = as_target(self.targets, 1)
        topk = self.request.topk or (topk if target is None else None)
        return vitreous.explain(self.model, [image], self.request.methods, target, topk=topk)


def _overlay(job: _FigureJob) -> Canvas:
    return overlay_figure(job.explain(job.image), photo=job.image, look=job.look)


def _comparison(job: _FigureJob) -> Canvas:
    return comparison_figure([Shown(job.explain(image), 0, image) for image in job.images], look=job.look)


def _classes(job: _FigureJob) -> Canvas:
    explanation = job.explain(job.image, topk=_CLASSES)
    return classes_figure(explanation, photo=job.image, look=job.look)


def _strips(make: StripMaker) -> Callable[[_FigureJob], Canvas]:
    def draw(job: _FigureJob) -> Canvas:
        strips = [make(job.model, job.image, method, job.target) for method in job.request.methods]
        return strips_figure(strips, photo=job.image, look=job.look)

    return draw


def _curves(job: _FigureJob) -> Canvas:
    explanation = job.explain(job.image)
    by = job.request.by
    curves = perturbation_curves(job.model, job.image, explanation, by=by, steps=job.request.steps)
    return curves_figure(curves, caption=class_caption(explanation), what=by)


def _transformation(job: _FigureJob) -> Canvas:
    parts = token_transformation(job.model, job.image, job.request.block, job.target)
    return transformation_figure(parts, photo=job.image, look=job.look)


_DRAWINGS: Mapping[str, Callable[[_FigureJob], Canvas]] = {
    "overlay": _overlay,
    "comparison": _comparison,
    "classes": _classes,
    "depth": _strips(depth_strip),
    "heads": _strips(heads_strip),
    "layers": _strips(start_layer_strip),
    "curves": _curves,
    "transformation": _transformation,
}
