"""Perturbation curves: the probability of a class as the most relevant parts of an image are deleted or inserted.

``recorded`` gives figures the tokens, attention and gradients of one image, as methods see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitreous._utils.torch_state import in_float64, preserves_torch_state
from vitreous.api.explain import black_pixel, declared_outputs, find_wanted, network_of, stage_of
from vitreous.api.run_methods import target_reader
from vitreous.api.runs import RunSettings, find_outputs
from vitreous.architecture import find_architecture
from vitreous.errors import InputError, TargetError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import display_maps
from vitreous.inputs.model_io import OutputActivation, likelihoods
from vitreous.inputs.targets import AnyTarget, TargetObjects, find_targets
from vitreous.methods import View
from vitreous.methods.readout import patch_means
from vitreous.methods.spelling import Recipe
from vitreous.models import LoadedModel
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.tape import Plan, record
from vitreous.tape.output import CLASS_SCORES, OutputReader, TargetReader
from vitreous.tape.runner import ModelRunner


def open_runner(model: nn.Module | LoadedModel, images: Images) -> ModelRunner:
    """Wrap a model and its images so that it can run again with fewer tokens or other pixels."""
    network = network_of(model)
    pixels, _ = find_pixels(model, network, images)
    black = black_pixel(model, pixels)
    return ModelRunner(network, pixels, black=black, outputs=declared_outputs(model), stage=stage_of(model))


@contextmanager
def recorded(
    model: nn.Module | LoadedModel, images: Images, recipe: Recipe, target: AnyTarget = None
) -> Iterator[View]:
    """Run the model and yield what a recipe reads, for one class per image; it is valid inside the context."""
    network = network_of(model)
    pixels, _ = find_pixels(model, network, images)
    architecture = find_architecture(network, pixels, stage_of(model))
    needs = recipe.needs(architecture.depth)
    network, wanted = find_wanted(model, network, pixels, target, None, None)
    declared = declared_outputs(model)
    reader: OutputReader = CLASS_SCORES
    classes_wanted: AnyTarget = None
    if isinstance(wanted, TargetObjects):
        reader = target_reader(network, pixels, wanted, RunSettings(outputs=declared))
    else:
        classes_wanted = wanted
    with record(network, architecture, pixels, Plan(architecture.depth, needs), reader) as tape:
        if isinstance(reader, TargetReader):
            outputs, targets = reader.found.scale, reader.found.numbers_on(pixels.device)
        else:
            outputs = find_outputs(network, pixels, tape.logits, declared or architecture.scale)
            targets = find_targets(tape.logits, classes_wanted, None).classes
        tape.architecture = tape.architecture.with_outputs(outputs)
        classes = targets[:, 0]
        gradients = {backward: tape.backward(backward, classes, part) for backward, part in needs.gradients.items()}
        runner = ModelRunner(
            network, pixels, classes[:, None], _architecture=tape.architecture, _layout=tape.layout, _reader=reader
        )
        with torch.autocast(pixels.device.type, enabled=False):
            yield View(tape, gradients, classes, runner)


By = Literal["patches", "pixels"]

NO_CURVES = "there are no curves: they follow a probability, and the outputs of this model are values (regression)"


@dataclass(frozen=True)
class Curves:
    """Deletion and insertion by one method's map.

    Attributes:
        method: The spelling.
        fractions: Share of the image that is deleted or inserted, from 0 to 1.
        deletion: Probability of the class without the most relevant part; a good map makes it fall early.
        insertion: Probability of the class with the most relevant part alone; a good map makes it rise early.

    Examples:
        >>> from vitreous.pictures import perturbation_curves
        >>> (curve,) = perturbation_curves(model, "demo.jpg", explanation.select(0), steps=2)[:1]
        >>> 0 <= curve.deletion_area <= 1 and 0 <= curve.insertion_area <= 1
        True
    """

    method: str
    fractions: NDArray[np.float64]
    deletion: NDArray[np.float64]
    insertion: NDArray[np.float64]

    @property
    def deletion_area(self) -> float:
        """The area under the deletion curve, by the trapezoid rule; lower is better."""
        return area(self.fractions, self.deletion)

    @property
    def insertion_area(self) -> float:
        """The area under the insertion curve; higher is better."""
        return area(self.fractions, self.insertion)


@preserves_torch_state
def perturbation_curves(
    model: Model,
    image: Images,
    explanation: Explanation,
    *,
    index: int = 0,
    target_index: int = 0,
    by: By = "patches",
    steps: int = 10,
) -> tuple[Curves, ...]:
    """Delete and insert the most relevant parts of one image, for every method of its explanation.

    Deletion and insertion of [petsiuk2018rise][].

    Args:
        model: The model that was explained.
        image: One image, volume or clip, in any form that ``explain`` takes.
        explanation: Its explanation.
        index: Which image of the explanation it is.
        target_index: Which of the explained classes is followed.
        by: ``patches`` drops tokens after the positional embedding; ``pixels`` paints pixels of the smooth map black,
            or 0 when the model's preprocessing is not known.
        steps: Number of equal steps, as far as whole patches or pixels allow.

    Returns:
        Curves with steps + 1 points, fewer if there are fewer patches. A point is NaN where the model cannot run, which
        is the case without any patch in models that read nothing but patches. All points are NaN for a map with NaN or
        infinity, which has no order.

    Raises:
        InputError: The outputs of the model are values (regression), which have no probability to follow.

    Examples:
        >>> from vitreous.pictures import perturbation_curves
        >>> curves = perturbation_curves(model, "demo.jpg", explanation, steps=2)
        >>> [curve.method for curve in curves] == list(explanation.methods)
        True
        >>> curves[0].fractions.tolist()
        [0.0, 0.5, 1.0]
    """
    if by not in {"patches", "pixels"}:
        raise InputError(f"curves go by patches or by pixels, not by {by!r}")
    if steps < 1:
        raise InputError(f"a curve needs at least one step, not {steps}")
    runner = open_runner(find_model(model, image), image)
    if explanation.scale == "value":
        raise InputError(NO_CURVES)
    if len(runner.images) != 1:
        raise InputError(f"curves are drawn of one photo at a time, not of {len(runner.images)}")
    if not explanation.is_class(index, target_index):
        name = explanation.target_name(index, target_index)
        raise TargetError(f"perturbation curves follow the probability of a class, and {name!r} is none")
    target = explanation.class_index(index, target_index)
    orders = torch.stack([_order(explanation, method, index, target_index, by) for method in explanation.methods])
    probability = _probability_of_kept(runner, explanation.scale, target, by)
    parts = orders.shape[1]
    counts = list(dict.fromkeys(parts * step // steps for step in range(steps + 1)))
    deletion = np.stack([probability(orders[:, count:]) for count in counts], axis=1)
    insertion = np.stack([probability(orders[:, :count]) for count in counts], axis=1)
    unordered = [not explanation.shows(method, index, target_index) for method in explanation.methods]
    deletion[unordered] = insertion[unordered] = np.nan
    fractions = np.array(counts) / parts  # the share in whole patches, not the one requested
    return tuple(
        Curves(method, fractions, deletion[row], insertion[row]) for row, method in enumerate(explanation.methods)
    )


def area(fractions: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Integrate a curve over 0 to 1 by the trapezoid rule, over its finite points."""
    known = np.isfinite(values)
    if known.sum() < 2:
        return float("nan")
    across, up = fractions[known], values[known]
    return float(np.sum(np.diff(across) * (up[1:] + up[:-1]) / 2) / (across[-1] - across[0]))


def _order(explanation: Explanation, method: str, index: int, target_index: int, by: By) -> Tensor:
    """Sort the patches or pixels of one map, the most relevant first; ties in reading order."""
    scores = explanation.scores_of(method, index, target_index).cpu()
    grid = explanation.grid_of(method)
    if by == "pixels":
        # Scaling keeps the order.
        signed = explanation.signed[method]
        size, geometry = explanation.image_size, explanation.geometry
        scores = display_maps(scores, grid, size, signed=signed, smooth=True, geometry=geometry).flatten()
        return scores.argsort(descending=True, stable=True)
    return patch_order(explanation, method, index, target_index)


def patch_order(explanation: Explanation, method: str, index: int = 0, target_index: int = 0) -> Tensor:
    """Sort the patches of one map, the most relevant first; ties in reading order."""
    scores, grid = explanation.scores_of(method, index, target_index).cpu(), explanation.grid_of(method)
    if grid != explanation.grid:
        scores = patch_means(scores, grid, explanation.grid, explanation.geometry)
    return scores.argsort(descending=True, stable=True)


def _probability_of_kept(
    runner: ModelRunner, outputs: OutputActivation | None, target: int, by: By
) -> Callable[[Tensor], NDArray[np.float64]]:
    """Make the function from kept patches or pixels (methods, count) to the probability of the target (methods,)."""

    def probability(kept: Tensor) -> NDArray[np.float64]:
        try:
            logits = _logits(runner, kept, by)
        except UnsupportedModelError:
            if kept.shape[1]:
                raise
            return np.full(len(kept), np.nan)  # no input is left
        return likelihoods(in_float64(logits), outputs)[:, target].cpu().numpy()

    return probability


def _logits(runner: ModelRunner, kept: Tensor, by: By) -> Tensor:
    images = runner.images.expand(len(kept), *runner.images.shape[1:])
    if by == "patches":
        return runner.logits_of_kept(images, kept)
    mask = torch.zeros(len(kept), math.prod(runner.size), dtype=torch.bool)
    mask.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
    paint = runner.images.new_zeros(1) if runner.black is None else runner.black
    seen = mask.view(len(kept), *runner.size).unsqueeze(runner.channel_axis).to(images.device)
    return runner.logits(torch.where(seen, images, runner.colour(paint)))
