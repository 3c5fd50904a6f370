"""Whether a data set's labels are outputs of a model: asked before a run, for wrong ones give numbers all the same."""

from __future__ import annotations

from vitreous.evaluation.runner.photo_material import first_run
from vitreous.evaluation.runner.selection import empty_picture
from vitreous.evaluation.runner.workbench import Workbench
from vitreous.evaluation.store.run import RunError
from vitreous.models import LoadedModel
from vitreous.models.text_models import LoadedTextModel


def check_labels(bench: Workbench) -> None:
    """Raise where a protocol takes labels for outputs of the model and there are more or fewer of one than the other.

    Sets that do not say what their labels count are believed, and so are protocols that do not look at labels or that
    say themselves which output stands for which class.

    Raises:
        RunError: The labels are not those of the model's outputs.
    """
    counted = bench.data.classes
    if isinstance(bench.model, LoadedTextModel):
        return  # what its classes are called tells which of them the labels are, see label_outputs
    if counted is None or not any(task.uses_labels for task in bench.protocol.tasks):
        return
    outputs = count_outputs(bench.model)
    if outputs != counted:
        raise RunError(
            f"{bench.protocol.name} takes the labels of {bench.data.kind} for outputs of the model, but they tell "
            f"{counted} classes apart and the model {outputs}"
        )


def count_outputs(model: LoadedModel) -> int:
    """How many classes a model tells apart; one output, for yes or no, tells two."""
    _, logits = first_run(model, empty_picture(model))
    return max(2, logits.shape[1])
