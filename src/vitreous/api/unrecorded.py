"""Methods that read only runs of their own (Integrated Gradients, SmoothGrad): with the class given, nothing else runs.

The logits are not needed then. They are computed when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import leaves_torch_as_it_was
from vitreous.api.output_detection import find_outputs
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.explanation.prediction import ExplanationError
from vitreous.inputs.outputs import OutputActivation, in_unit_interval
from vitreous.inputs.targets import AnyTarget, Targets, find_targets
from vitreous.methods.integrated import InputProcedure
from vitreous.methods.rerun import Unrecorded
from vitreous.methods.spelling import Recipe
from vitreous.tape import Layout
from vitreous.tape.output import CLASS_SCORES, OutputReader
from vitreous.tape.runner import ModelRunner

_ANY_CLASSES = 2**31 - 1  # as many as no model has


class DeferredLogits:
    """The model's output for images, computed when it is first read."""

    def __init__(self, network: nn.Module, runner: ModelRunner) -> None:
        self._network, self._runner = network, runner
        self._seen = list(_state(network, runner.images))

    @leaves_torch_as_it_was
    def compute(self) -> Tensor:
        """Run the model, in evaluation mode, also where it has been switched to training since.

        Raises:
            ExplanationError: model or images were changed since they were explained.
        """
        if list(_state(self._network, self._runner.images)) != self._seen:
            raise ExplanationError(
                "the model or the images were changed after they were explained, before the logits were read: with a "
                "target given these methods need no logits; read explanation.logits before you change the model"
            )
        return run_in_evaluation(
            self._network, lambda network: self._runner.with_model(network).logits(self._runner.images)
        )


class Found(NamedTuple):
    """What was found, see ``vitreous.api.run_methods.RawResult``."""

    logits: Tensor
    targets: Targets
    layout: Layout
    scores: dict[str, Tensor]
    scale: OutputActivation | None
    deferred: DeferredLogits | None


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
    black: Tensor | None,
    parts: Sequence[slice],
    *,
    outputs: OutputActivation | None,
    stage: int | None = None,
    reader: OutputReader = CLASS_SCORES,
) -> Found:
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
    whole = ModelRunner(network, images, targets.classes, black, stage=stage, _reader=reader)
    output = images[:1, 0, 0]
    for rows in parts:
        runner = ModelRunner(network, images[rows], targets.classes[rows], black, stage=stage, _reader=reader)
        for recipe in recipes:
            scored = [_scores(recipe, Unrecorded(runner, target)) for target in targets.classes[rows].unbind(dim=1)]
            output = scored[-1][1]
            maps = [scores for scores, _ in scored]
            found[recipe.spelling].append(torch.stack(maps, dim=1) if targets.several else maps[0])
        whole.note_layout(runner.layout)
    logits, deferred = output.expand(len(images), -1), DeferredLogits(network, whole)
    said = outputs or whole.scale
    recognising = said is None and in_unit_interval(logits)
    if recognising:
        logits = deferred.compute()
    return Found(
        logits=logits,
        targets=targets,
        layout=whole.layout,
        scores={name: torch.cat(maps) for name, maps in found.items()},
        scale=find_outputs(network, images, logits, said, reader),
        deferred=None if recognising else deferred,
    )


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


def _state(network: nn.Module, images: Tensor) -> Iterator[tuple[int, int, torch.dtype]]:
    """What changes with the numbers of a model or of images."""
    for tensor in (*network.parameters(), *network.buffers(), images):
        yield tensor.data_ptr(), tensor._version, tensor.dtype  # noqa: SLF001 - torch documents it for this purpose
