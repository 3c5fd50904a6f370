"""Methods that read only the runs they make themselves: with the class given, no other run is recorded for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.deferred_logits import DeferredLogits, can_be_deferred
from vitreous.methods.integrated import InputProcedure
from vitreous.methods.rerun import Unrecorded
from vitreous.spelling import Recipe
from vitreous.subject import Subject
from vitreous.tape import Layout
from vitreous.targets import Target, Targets, find_targets

_ANY_CLASSES = 2**31 - 1  # as many as no model has


class Found(NamedTuple):
    """What was found, see ``vitreous.explaining.Answer``."""

    logits: Tensor
    targets: Targets
    layout: Layout
    scores: dict[str, Tensor]
    deferred: DeferredLogits


def can_run_alone(network: nn.Module, images: Tensor, recipes: Sequence[Recipe]) -> bool:
    """Whether all methods read only runs that they make themselves, of other pixels, and logits can wait."""
    alone = all(
        isinstance(recipe.readout, InputProcedure) and recipe.readout.at == "pixels" and recipe.propagate is None
        for recipe in recipes
    )
    return alone and can_be_deferred(network, images)


def run_alone(
    network: nn.Module,
    anatomy: Anatomy,
    images: Tensor,
    recipes: Sequence[Recipe],
    target: Target,
    black: Tensor | None,
    parts: Sequence[slice],
) -> Found:
    """Run such methods for given classes, some images after the others.

    Raises:
        TargetError: the target is wrong.
        UnsupportedModelError: the model has no gradients where they are needed.
    """
    # How many classes there are shows in the first run, and is checked then.
    unknown = images.new_empty(1, 1).expand(len(images), _ANY_CLASSES)
    targets = find_targets(unknown, target, None)
    found: dict[str, list[Tensor]] = {recipe.spelling: [] for recipe in recipes}
    whole = Subject(network, anatomy, images, targets.classes, black)
    output = images[:1, 0, 0]
    for rows in parts:
        subject = Subject(network, anatomy, images[rows], targets.classes[rows], black)
        for recipe in recipes:
            scored = [_scores(recipe, Unrecorded(subject, target)) for target in targets.classes[rows].unbind(dim=1)]
            output = scored[-1][1]
            maps = [scores for scores, _ in scored]
            found[recipe.spelling].append(torch.stack(maps, dim=1) if targets.several else maps[0])
        whole.note_layout(subject.layout)
    return Found(
        logits=output.expand(len(images), -1),
        targets=targets,
        layout=whole.layout,
        scores={name: torch.cat(maps) for name, maps in found.items()},
        deferred=DeferredLogits(network, whole),
    )


def _scores(recipe: Recipe, seen: Unrecorded) -> tuple[Tensor, Tensor]:
    """The scores of a method, and the output of one of its runs."""
    assert isinstance(recipe.readout, InputProcedure)
    with torch.autocast(seen.target.device.type, enabled=False):  # it is for the model's run, not for reading it
        scores = recipe.readout.map(seen)
    assert seen.output is not None
    return scores.to(seen.output.dtype), seen.output
