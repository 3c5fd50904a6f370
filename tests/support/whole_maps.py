"""Scores of all tokens, prefix tokens included, which public maps leave out: sums over tokens mean something there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitreous.architecture import find_architecture
from vitreous.methods import View
from vitreous.methods.spelling import Recipe, parse
from vitreous.tape import Plan, record
from vitreous.tape.runner import ModelRunner


@contextmanager
def opened(model: nn.Module, images: Tensor, spelling: str, target: Tensor) -> Iterator[tuple[Recipe, View]]:
    """A spelling's recipe and the view that it reads, one class per image."""
    recipe, architecture = parse(spelling), find_architecture(model, images)
    needs = recipe.needs(architecture.depth)
    with record(model, architecture, images, Plan(architecture.depth, needs)) as tape:
        gradients = {each: tape.backward(each, target, part) for each, part in needs.gradients.items()}
        yield recipe, View(tape, gradients, target, ModelRunner(model, images))


def all_token_scores(model: nn.Module, images: Tensor, spelling: str, target: Tensor | int) -> tuple[Tensor, Tensor]:
    """Scores (batch, tokens) and the explained logits (batch,)."""
    target = torch.as_tensor(target).expand(len(images))
    with opened(model, images, spelling, target) as (recipe, view):
        return recipe.aggregation.combine(recipe.readout, view), view.tape.logits.gather(1, target[:, None])[:, 0]
