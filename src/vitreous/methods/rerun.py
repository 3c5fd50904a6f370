"""Asking the runner again, a bounded number of images at a time: for integrals, noise and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous._utils.tensors import exact
from vitreous.inputs.model_input import Inputs
from vitreous.inputs.targets import check_classes
from vitreous.methods.view import View
from vitreous.tape import Intervention, Needs, Tape
from vitreous.tape.runner import ModelRunner


@dataclass
class Unrecorded:
    """Images and targets of which no run was recorded, for methods that read only the runs they make themselves.

    Attributes:
        runner: the model and the images.
        target: the class that is explained of each image, (batch,).
        output: the model's output in the last run, of other images.
    """

    runner: ModelRunner
    target: Tensor
    output: Tensor | None = None

    def note(self, tape: Tape) -> None:
        """Keep what a run shows of every run: patch grid, number of classes, precision."""
        check_classes(self.target, tape.logits.shape[1])
        self.runner.note_layout(tape.layout)
        self.output = exact(tape.logits[:1])


@contextmanager
def rerun(
    view: View | Unrecorded, inputs: Inputs, needs: Needs, intervention: Intervention | None = None
) -> Iterator[View]:
    """What a method sees of another run, with the gradients of the same targets, until the context ends.

    The run's batch, that of an intervention's stream where there is one, is a multiple of the original: the images come
    in their order, over and over.
    """
    with view.runner.record(inputs, needs, intervention) as tape:
        if isinstance(view, Unrecorded):
            view.note(tape)
        target = view.target.repeat(len(tape.logits) // len(view.target))
        gradients = {backward: tape.backward(backward, target, part) for backward, part in needs.gradients.items()}
        yield View(tape, gradients, target, view.runner)


def rerun_scaled(
    view: View, scales: Tensor, needs: Needs, attention_scale: Mapping[int, Tensor] | None = None
) -> AbstractContextManager[View]:
    """What a method sees of runs on the pictures times every one of ``scales``.

    The numbers of a text's tokens cannot be scaled; its first block's tokens are, and have to be on the tape for that.
    """
    attention_scale = attention_scale or {}
    if not view.tape.reads_text:
        change = Intervention(attention_scale=attention_scale)
        return rerun(view, each_scaled(scales, view.runner.images), needs, change)
    stream = each_scaled(scales, view.tokens(0))
    return rerun(view, view.runner.inputs[:1], needs, Intervention(0, stream, attention_scale))


def few_at_once(view: View | Unrecorded, points: Tensor, *, room: int = 1) -> Iterator[Tensor]:
    """Cut what all images are varied by, (points, ...), so that images x points of one piece fit into one run.

    ``room`` times as many fit where a run takes so much less memory.
    """
    yield from torch.split(points, max(1, room * view.runner.at_once // len(view.target)))


def each_scaled(scales: Tensor, inputs: Tensor) -> Tensor:
    """The inputs (batch, ...) times every one of ``scales``: (scales x batch, ...), in their order, over and over."""
    scaled = scales.to(inputs).view(-1, *[1] * inputs.dim()) * inputs
    return scaled.flatten(0, 1)


def sum_of_variations(values: Tensor, batch: int) -> Tensor:
    """(variations x batch, ...) -> (batch, ...)."""
    return values.reshape(-1, batch, *values.shape[1:]).sum(dim=0)
