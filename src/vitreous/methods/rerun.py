"""Run the model again in batches of bounded size, for integrals, noise and masks."""

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
    """Images and targets without a recorded run, for methods that only read their own runs.

    Attributes:
        runner: the model and the images.
        target: the explained class of each image, (batch,).
        output: the model's output in the last run, for other images.
    """

    runner: ModelRunner
    target: Tensor
    output: Tensor | None = None

    def note(self, tape: Tape) -> None:
        """Record what is the same in every run: patch grid, number of classes, precision."""
        check_classes(self.target, tape.logits.shape[1])
        self.runner.note_layout(tape.layout)
        self.output = exact(tape.logits[:1])


@contextmanager
def rerun(
    view: View | Unrecorded, inputs: Inputs, needs: Needs, intervention: Intervention | None = None
) -> Iterator[View]:
    """Run the model on other inputs and yield the view of that run, with gradients of the same targets.

    The batch of the run, or of the stream of an intervention, is a multiple of the original batch: variations of all
    images in their order.
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
    """Run the model on the images multiplied by each of ``scales``.

    For texts the first block's tokens are scaled, which must be on the tape; token ids cannot be scaled.
    """
    attention_scale = attention_scale or {}
    if not view.tape.reads_text:
        change = Intervention(attention_scale=attention_scale)
        return rerun(view, each_scaled(scales, view.runner.images), needs, change)
    stream = each_scaled(scales, view.tokens(0))
    return rerun(view, view.runner.inputs[:1], needs, Intervention(0, stream, attention_scale))


def few_at_once(view: View | Unrecorded, points: Tensor, *, room: int = 1) -> Iterator[Tensor]:
    """Split the variations (points, ...), so that images x points of one piece fit into one run.

    ``room`` times as many fit if a run takes that much less memory.
    """
    yield from torch.split(points, max(1, room * view.runner.at_once // len(view.target)))


def each_scaled(scales: Tensor, inputs: Tensor) -> Tensor:
    """Multiply the inputs (batch, ...) by each of ``scales``: (scales x batch, ...), scales outermost."""
    scaled = scales.to(inputs).view(-1, *[1] * inputs.dim()) * inputs
    return scaled.flatten(0, 1)


def sum_of_variations(values: Tensor, batch: int) -> Tensor:
    """Sum over variations: (variations x batch, ...) -> (batch, ...)."""
    return values.reshape(-1, batch, *values.shape[1:]).sum(dim=0)
