"""Looking at read-outs from inside: the whole matrix of a layer, of which the public functions show one row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.architecture import find_architecture
from vitreous.methods import Row, View
from vitreous.methods.spelling import parse
from vitreous.tape import Plan, record
from vitreous.tape.runner import ModelRunner


def whole_matrix(view: View, spelling: str, *, at_once: bool) -> Tensor:
    """All rows of a layer's matrix (batch, n, n), row by row, with the other rows left out or weighed by zero."""
    recipe = parse(spelling)
    (layer,) = recipe.aggregation.layers(view.depth)
    identity = torch.eye(view.layout.tokens, dtype=torch.float64)
    rows = []
    for index, entries in enumerate(identity):
        place = slice(None) if at_once else torch.tensor([index])
        weights = (entries if at_once else torch.ones(1, dtype=torch.float64)).expand(len(view.tape.logits), -1)
        rows.append(recipe.readout.row_times(view, layer, Row(weights, place)))
    return torch.stack(rows, dim=1)


class Recorded:
    """A view of a run that holds what a spelling needs."""

    def __init__(self, model: nn.Module, images: Tensor, spelling: str) -> None:
        architecture = find_architecture(model, images)
        plan = Plan(architecture.depth, parse(spelling).needs(architecture.depth))
        self.context = record(model, architecture, images, plan)
        self.runner = ModelRunner(model, images)

    def __enter__(self) -> View:
        tape = self.context.__enter__()
        return View(tape, {}, tape.logits.argmax(1), self.runner)

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)
