"""Methods that read only runs of their own (Integrated Gradients, SmoothGrad): with the class given, nothing else runs.

The logits are not needed then. They are computed when they are first read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitreous.api.output_detection import find_outputs
from vitreous.api.runs import DeferredLogits, RawResult, RunSettings
from vitreous.inputs.outputs import in_unit_interval
from vitreous.inputs.targets import AnyTarget, find_targets
from vitreous.methods.integrated import InputProcedure
from vitreous.methods.rerun import Unrecorded
from vitreous.methods.spelling import Recipe
from vitreous.tape.runner import ModelRunner

_ANY_CLASSES = 2**31 - 1  # as many as no model has


def can_run_unrecorded(network: nn.Module, images: Tensor, recipes: Sequence[Recipe]) -> bool:
    """Whether all methods read only runs that they make themselves, of other pixels, and logits can wait.

    Methods of users are given a recorded run, as they may read it and are checked by it.
    """
    return all(map(_reads_own_runs, recipes)) and can_be_deferred(network, images)


def _reads_own_runs(recipe: Recipe) -> bool:
    if recipe.info.is_own or recipe.propagate is not None:
        return False
    return isinstance(recipe.readout, InputProcedure) and recipe.readout.at == "pixels"


def run_unrecorded(
    network: nn.Module,
    images: Tensor,
    recipes: Sequence[Recipe],
    target: AnyTarget,
    parts: Sequence[slice],
    settings: RunSettings,
) -> RawResult:
    """Run such methods for given classes, some images after the others.

    The logits are computed now only where nobody says what the outputs are, and they may be probabilities.

    Raises:
        TargetError: the target is wrong.
        UnsupportedModelError: the model has no gradients where they are needed.
        InputError: the outputs are not what they are said to be.
    """
    # How many classes there are shows in the first run, and is checked then.
    unknown = images.new_empty(1, 1).expand(len(images), _ANY_CLASSES)
    targets = find_targets(unknown, target, None)
    found: dict[str, list[Tensor]] = {recipe.spelling: [] for recipe in recipes}
    whole = _runner(network, images, targets.classes, settings)
    output = images[:1, 0, 0]
    for rows in parts:
        runner = _runner(network, images[rows], targets.classes[rows], settings)
        for recipe in recipes:
            scored = [_scores(recipe, Unrecorded(runner, target)) for target in targets.classes[rows].unbind(dim=1)]
            output = scored[-1][1]
            maps = [scores for scores, _ in scored]
            found[recipe.spelling].append(torch.stack(maps, dim=1) if targets.several else maps[0])
        whole.note_layout(runner.layout)
    logits, deferred = output.expand(len(images), -1), DeferredLogits(network, whole)
    said = settings.outputs or whole.scale
    recognising = said is None and in_unit_interval(logits)
    if recognising:
        logits = deferred.compute()
    return RawResult(
        logits=logits,
        targets=targets,
        layout=whole.layout,
        scores={name: torch.cat(maps) for name, maps in found.items()},
        family=type(network).__name__,
        scale=find_outputs(network, images, logits, said, settings.reader),
        deferred=None if recognising else deferred,
    )


def _runner(network: nn.Module, images: Tensor, classes: Tensor, settings: RunSettings) -> ModelRunner:
    return ModelRunner(network, images, classes, settings.black, stage=settings.stage, _reader=settings.reader)


def _scores(recipe: Recipe, seen: Unrecorded) -> tuple[Tensor, Tensor]:
    """The scores of a method, and the output of one of its runs."""
    assert isinstance(recipe.readout, InputProcedure)
    with torch.autocast(seen.target.device.type, enabled=False):  # it is for the model's run, not for reading it
        scores = recipe.readout.map(seen)
    assert seen.output is not None
    return scores.to(seen.output.dtype), seen.output


def can_be_deferred(network: nn.Module, images: Tensor) -> bool:
    """Whether it would show that a model or its images were changed in between."""
    return not any(tensor.is_inference() for tensor in (*network.parameters(), *network.buffers(), images))
