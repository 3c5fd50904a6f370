"""Reading a run in parts: texts of one length together and without their padding, pictures all at once.

Nobody looks at padding, so what a model computes of a text does not depend on it; but a mean over tokens, a softmax
over them or a rollout would. So every method reads texts as if they had been run without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from vitreous.inputs.model_input import Texts
from vitreous.methods import View
from vitreous.spelling import Recipe
from vitreous.tape import Gradients, Pass, Tape
from vitreous.tape.runner import ModelRunner


@dataclass(frozen=True)
class Part:
    """Some rows of a batch.

    Attributes:
        rows: which ones; ``None`` for all of them.
        tape: their run.
        runner: the model with their input.
    """

    rows: Tensor | None
    tape: Tape
    runner: ModelRunner

    def view(self, gradients: Mapping[Pass, Gradients], target: Tensor) -> View:
        """What a method sees of them; gradients and target are those of the whole batch."""
        if self.rows is None:
            return View(self.tape, gradients, target, self.runner)
        cut = {backward: found.cut(self.rows, self.tape.layout.tokens) for backward, found in gradients.items()}
        return View(self.tape, cut, target[self.rows], self.runner)


def parts_of(tape: Tape, runner: ModelRunner) -> list[Part]:
    """All rows of a batch, in as few parts as have no padding inside."""
    texts = runner.inputs
    if not isinstance(texts, Texts) or bool((texts.lengths == texts.tokens).all()):
        return [Part(None, tape, runner)]
    return [Part(rows, tape.cut(rows, length), runner.cut(rows, length)) for length, rows in texts.by_length()]


def scores_of(recipe: Recipe, views: Iterable[tuple[Part, View]], batch: int, patches: int) -> Tensor:
    """Scores of a method, (batch, patches), or of all pixels; 0 for padding."""
    whole: Tensor | None = None
    for part, view in views:
        scores = recipe.scores(view)
        if part.rows is None:
            return scores
        if whole is None:
            whole = scores.new_zeros(batch, patches)
        whole[part.rows, : scores.shape[1]] = scores
    assert whole is not None
    return whole
