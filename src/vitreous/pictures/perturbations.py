"""Perturbation beyond one curve: several images with their spread, start layers, and filmstrips of the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitreous._utils.torch_state import in_float64, preserves_torch_state
from vitreous.api.explain import explain
from vitreous.errors import InputError, TargetError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import FigureOptions, Look, framed_maps, look_with
from vitreous.inputs.model_io import likelihoods, percent
from vitreous.inputs.patch_geometry import plane
from vitreous.inputs.targets import AnyTarget
from vitreous.methods.spelling import Rollout, parse
from vitreous.models.pixels import Images, Model, Photo, find_model
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.canvas import Canvas, short_names, target_caption
from vitreous.pictures.curves import NO_CURVES, By, area, open_runner, patch_order, perturbation_curves
from vitreous.pictures.figures import NARROW, NARROW_STRIP_COLUMNS, STRIP_TILE
from vitreous.pictures.strips import depth_of, start_layer_spellings
from vitreous.pictures.style import page_style
from vitreous.pictures.tiles import Row, Tile, prepare, tiled

Floats = NDArray[np.float64]
Direction = Literal["deletion", "insertion"]

_REMOVED = (140, 140, 140)  # patches that the model does not see
_NORMAL_95 = 1.959964  # quantile of the normal distribution


@dataclass(frozen=True)
class MeanCurves:
    """Deletion and insertion by one method's maps of several images.

    Attributes:
        method: The spelling.
        fractions: Share of an image that is deleted or inserted, from 0 to 1.
        deletion: Probability of the class, (images, fractions).
        insertion: The same for insertion.

    Examples:
        >>> from vitreous.pictures import dataset_curves
        >>> (one,) = dataset_curves(model, ["demo.jpg", "other.jpg"], ["gae"], steps=2)
        >>> one.deletion.shape
        (2, 3)
    """

    method: str
    fractions: Floats
    deletion: Floats
    insertion: Floats


@dataclass(frozen=True)
class LayerCurve:
    """The areas under deletion and insertion curves by the block that a method starts at.

    Attributes:
        method: The spelling that is varied.
        layers: The start layers.
        deletion: Area under the deletion curve, (images, layers); lower is better.
        insertion: Area under the insertion curve, (images, layers); higher is better.
        skipplus: The start layer of SkipPLUS; ``None`` for methods that are not summed over blocks.

    Examples:
        >>> from vitreous.pictures import layer_curves
        >>> (one,) = layer_curves(model, ["demo.jpg"], ["ixg"], steps=2)
        >>> one.layers, one.deletion.shape, one.skipplus
        ((0, 1, 2, 3, 4, 5), (1, 6), 3)
    """

    method: str
    layers: tuple[int, ...]
    deletion: Floats
    insertion: Floats
    skipplus: int | None = None


@preserves_torch_state
def dataset_curves(
    model: Model,
    images: Sequence[Images],
    methods: Sequence[str],
    target: AnyTarget = None,
    *,
    by: By = "patches",
    steps: int = 10,
) -> tuple[MeanCurves, ...]:
    """Measure deletion and insertion curves of several images, one after the other.

    Args:
        model: The model, in any form that ``explain`` takes.
        images: The images.
        methods: The spellings.
        target: The class that is explained and followed; the predicted one of every image by default.
        by: See ``perturbation_curves``.
        steps: See ``perturbation_curves``.

    Examples:
        >>> from vitreous.pictures import dataset_curves
        >>> curves = dataset_curves(model, ["demo.jpg", "other.jpg"], ["gae", "rollout"], steps=4)
        >>> [one.method for one in curves], curves[0].fractions.tolist()
        (['gae', 'rollout'], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    if not len(images):
        raise InputError("there is no image to measure")
    loaded = find_model(model, images[0])
    found = []
    for image in images:
        explanation = explain(loaded, image, list(methods), target)
        found.append(perturbation_curves(loaded, image, explanation, by=by, steps=steps))
    return tuple(
        MeanCurves(
            every[0].method,
            every[0].fractions,
            np.stack([one.deletion for one in every]),
            np.stack([one.insertion for one in every]),
        )
        for every in zip(*found, strict=True)
    )


@preserves_torch_state
def layer_curves(
    model: Model,
    images: Sequence[Images],
    methods: Sequence[str],
    target: AnyTarget = None,
    *,
    by: By = "patches",
    steps: int = 10,
) -> tuple[LayerCurve, ...]:
    """Measure how good a method's maps are by the block that they start at.

    After figure 7 of [mehri2024skipplus][]. A rollout starts at the block; every other method is summed over the blocks
    from it on (PLUS). All start layers of an image share its forward pass.

    Args:
        model: The model, in any form that ``explain`` takes.
        images: The images.
        methods: Methods with layers.
        target: See ``dataset_curves``.
        by: See ``perturbation_curves``.
        steps: See ``perturbation_curves``.

    Examples:
        >>> from vitreous.pictures import layer_curves
        >>> [one.method for one in layer_curves(model, ["demo.jpg"], ["ixg", "tokentm"], steps=2)]
        ['ixg', 'tokentm']
    """
    if not len(images):
        raise InputError("there is no image to measure")
    loaded = find_model(model, images[0])
    depth = depth_of(loaded, images[0])
    curves = []
    for method in methods:
        spellings = start_layer_spellings(method, depth)
        measured = dataset_curves(loaded, images, list(spellings.values()), target, by=by, steps=steps)
        curves.append(
            LayerCurve(
                method,
                tuple(spellings),
                np.stack([areas(one.fractions, one.deletion) for one in measured], axis=1),
                np.stack([areas(one.fractions, one.insertion) for one in measured], axis=1),
                None if isinstance(parse(method).aggregation, Rollout) else math.ceil(depth / 2),
            )
        )
    return tuple(curves)


def areas(fractions: Floats, values: Floats) -> Floats:
    """Return the area under every curve (images, fractions); see ``vitreous.pictures.curves.area``."""
    return np.array([area(fractions, row) for row in values])


def mean_band(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mean of (images, points) and the ends of its 95% interval by the normal distribution.

    Points that are missing in an image do not count; the interval of a single image is its value.
    """
    known = np.isfinite(values)
    count = known.sum(axis=0)
    safe = np.maximum(count, 1)
    total = np.where(known, values, 0.0).sum(axis=0)
    mean = np.where(count > 0, total / safe, np.nan)
    squares = np.where(known, (values - mean) ** 2, 0.0).sum(axis=0)
    error = np.sqrt(squares / np.maximum(count - 1, 1) / safe)
    return mean, mean - _NORMAL_95 * error, mean + _NORMAL_95 * error


@dataclass(frozen=True)
class Filmstrip:
    """The steps of deletion or insertion by one map.

    Attributes:
        method: The spelling.
        direction: ``deletion`` or ``insertion``.
        explanation: The explanation of the image.
        fractions: Share of the patches that is deleted or inserted at each step.
        kept: Which patches the model sees, (steps, patches).
        probabilities: Of the explained class at each step; NaN where the model cannot run.
        predicted: The most likely class at each step; -1 where the model cannot run.
        predicted_probabilities: Their probabilities.

    Examples:
        >>> from vitreous.pictures import filmstrip
        >>> film = filmstrip(model, "demo.jpg", explanation, "gae", steps=2)
        >>> film.fractions.tolist(), bool(film.kept[0].all())
        ([0.0, 0.5, 1.0], True)
    """

    method: str
    direction: Direction
    explanation: Explanation
    fractions: NDArray[np.float64]
    kept: Tensor
    probabilities: NDArray[np.float64]
    predicted: tuple[int, ...]
    predicted_probabilities: NDArray[np.float64]


@preserves_torch_state
def filmstrip(
    model: Model,
    image: Images,
    explanation: Explanation,
    method: str | None = None,
    *,
    direction: Direction = "deletion",
    steps: int = 5,
    target_index: int = 0,
) -> Filmstrip:
    """Delete or insert the most relevant patches of an image step by step, and keep what the model predicts.

    Patches are dropped after the positional embedding, as in ``perturbation_curves``.

    Args:
        model: The model that was explained.
        image: One image.
        explanation: Its explanation.
        method: Whose map orders the patches; the first method by default.
        direction: ``deletion`` or ``insertion``.
        steps: Number of equal steps.
        target_index: Which of the explained classes is followed.

    Examples:
        >>> from vitreous.pictures import filmstrip, filmstrip_figure
        >>> film = filmstrip(model, "demo.jpg", explanation, direction="insertion", steps=2)
        >>> canvas = filmstrip_figure([film], photo="demo.jpg")
    """
    if direction not in {"deletion", "insertion"}:
        raise InputError(f"a filmstrip shows deletion or insertion, not {direction!r}")
    if steps < 1:
        raise InputError(f"a filmstrip needs at least one step, not {steps}")
    spelling = method or explanation.methods[0]
    _check_followed(explanation, spelling, target_index)
    runner = open_runner(find_model(model, image), image)
    if len(runner.images) != 1:
        raise InputError(f"a filmstrip shows one image, not {len(runner.images)}")
    order = patch_order(explanation, spelling, 0, target_index)
    counts = list(dict.fromkeys(len(order) * step // steps for step in range(steps + 1)))
    target = explanation.class_index(0, target_index)
    kept = torch.zeros(len(counts), len(order), dtype=torch.bool)
    followed, predicted, probabilities = [], [], []
    for number, count in enumerate(counts):
        left = order[count:] if direction == "deletion" else order[:count]
        kept[number, left] = True
        try:
            logits = runner.logits_of_kept(runner.images, left[None])
        except UnsupportedModelError:
            if len(left):
                raise
            likely = None  # no input is left
        else:
            likely = likelihoods(in_float64(logits), explanation.scale)[0].cpu()
        followed.append(float("nan") if likely is None else float(likely[target]))
        predicted.append(-1 if likely is None else int(likely.argmax()))
        probabilities.append(float("nan") if likely is None else float(likely.max()))
    return Filmstrip(
        spelling,
        direction,
        explanation,
        np.array(counts) / len(order),
        kept,
        np.array(followed),
        tuple(predicted),
        np.array(probabilities),
    )


def _check_followed(explanation: Explanation, method: str, target_index: int) -> None:
    """Raise unless there is a probability to follow, and a map that orders the patches."""
    if explanation.scale == "value":
        raise InputError(NO_CURVES)
    if not explanation.is_class(0, target_index):
        name = explanation.target_name(0, target_index)
        raise TargetError(f"a filmstrip follows the probability of a class, and {name!r} is none")
    if not explanation.shows(method, 0, target_index):
        raise InputError(f"the map of {method} contains NaN or infinity, so that patches have no order")


def filmstrip_figure(
    films: Sequence[Filmstrip],
    *,
    photo: Photo | None = None,
    look: Look | None = None,
    tile: float = STRIP_TILE,
    **options: Unpack[FigureOptions],
) -> Canvas:
    """Draw what the model still sees at each step of deletion or insertion, and what it predicts then.

    Args:
        films: The filmstrips of one image, see ``filmstrip``.
        photo: The photo before preprocessing; by default the image as the model saw it.
        look: How it is drawn.
        tile: Width of a picture where the page has no given width, in units of 1/100 inch.
        **options: Fields of ``Look`` to change.

    Examples:
        >>> from vitreous.pictures import filmstrip, filmstrip_figure
        >>> films = [filmstrip(model, "demo.jpg", explanation, method, steps=2) for method in explanation.methods]
        >>> canvas = filmstrip_figure(films, photo="demo.jpg", width="6.9in")
    """
    if not films:
        raise InputError("there is no filmstrip to draw")
    look = look_with(look, options)
    style = page_style(look)
    across = max(len(film.fractions) for film in films)
    narrow = style.inner is not None and style.inner < NARROW
    columns = min(look.columns or (NARROW_STRIP_COLUMNS if narrow else across), across)
    tile = style.tile(tile, columns)
    base = prepare(BaseImage.of(films[0].explanation, 0, photo), look, style, tile)
    names = look.labelled([film.method for film in films])
    rows = [
        Row(_frames(film, base), label=f"{name}: {film.direction}" if name else film.direction)
        for film, name in zip(films, names, strict=True)
    ]
    return tiled(rows, tile=tile, columns=columns, note=base.note, style=style)


def _frames(film: Filmstrip, base: BaseImage) -> list[Tile]:
    names = film.explanation.class_names
    named = None if names is None else short_names(names)
    target = film.explanation.class_index()
    done = "deleted" if film.direction == "deletion" else "inserted"
    frames = []
    for step, fraction in enumerate(film.fractions):
        caption = f"{fraction:.0%} {done}"
        explained = target_caption(film.explanation)
        number = film.predicted[step]
        if number >= 0:
            name = f"class {number}" if named is None else named[number].replace("_", " ")
            caption += f"\n{name} · {percent(film.predicted_probabilities[step])}"
            if number != target:
                caption += f"\n{explained} · {percent(film.probabilities[step])}"
        frames.append(Tile(_kept_picture(film.kept[step], plane(film.explanation.grid), base), caption))
    return frames


def _kept_picture(kept: Tensor, grid: tuple[int, int], base: BaseImage) -> Image.Image:
    """The photo with the patches painted over that the model does not see."""
    span = (0.0, 1.0)
    seen = framed_maps(
        kept.float(), grid, base.frame, signed=False, smooth=False, span=span, geometry=base.geometry
    ).numpy()
    whole = np.asarray(base.photo.convert("RGB")).copy()
    part = whole[base.frame.rows, base.frame.columns]
    part[seen < 0.5] = _REMOVED
    return Image.fromarray(whole)
