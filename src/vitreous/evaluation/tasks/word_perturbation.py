"""What becomes of a model's answer while words of a text are removed or masked, or while few of them are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vitreous.evaluation.tasks.batch import Case, Passage, TextBatch
from vitreous.evaluation.tasks.task import NINE, Explained, TextTask, Values, explained_class
from vitreous.evaluation.tasks.wording import Row, Way, logits_of, perturbed, ranked_words
from vitreous.float64 import float64_array
from vitreous.metrics import perturbation, text
from vitreous.metrics.metric import Floats, Metric, row

ERASER_BINS = (1, 5, 10, 20, 50)


@dataclass(frozen=True)
class WordTask(TextTask):
    """What all curves over the words of a text have in common.

    Attributes:
        explained: The class whose scores are measured, and whose probability counts.
        percent: How many of the words are touched at each step, the highest first.
        count: Words at p percent.
        word: The score of a word, from those of its pieces; a word is touched with all its pieces.
        ties: Which of equal words ranks higher.
        special_tokens: Whether class token and separators stay.
    """

    explained: Explained = "predicted"
    percent: tuple[int, ...] = NINE
    count: Literal["ceil(words * p)"] = "ceil(words * p)"
    word: Literal["the highest of its pieces"] = "the highest of its pieces"
    ties: Literal["the earlier one"] = "the earlier one"
    special_tokens: Literal["stay"] = "stay"

    def targets(self, picture: Passage) -> tuple[int, ...]:
        return (explained_class(picture, self.explained),)

    def probabilities(self, batch: TextBatch, cases: Sequence[Case], ways: Sequence[Way]) -> list[tuple[float, Floats]]:
        """For every case p0, and pk in every way and at every step, (ways, steps)."""
        targets = [explained_class(batch.pictures[case.image], self.explained) for case in cases]
        rows: list[Row] = []
        for case, target in zip(cases, targets, strict=True):
            rows += self._rows(batch, batch.pictures[case.image], ranked_words(batch, case, target), ways)
        logits = float64_array(logits_of(batch, rows))
        shape = (len(cases), len(ways), len(self.percent), -1)
        along = perturbation.probabilities(logits.reshape(shape), outputs=batch.outputs)
        whole = perturbation.probabilities(float64_array(batch.logits), outputs=batch.outputs)
        return [
            (float(whole[case.image, target]), along[number, ..., target])
            for number, (case, target) in enumerate(zip(cases, targets, strict=True))
        ]

    def _rows(self, batch: TextBatch, passage: Passage, ranking: NDArray[np.int64], ways: Sequence[Way]) -> list[Row]:
        blank = batch.model.reader.blank
        counts = [-(-len(ranking) * percent // 100) for percent in self.percent]
        return [perturbed(passage, ranking[:count], way, blank) for way in ways for count in counts]


@dataclass(frozen=True)
class WordErasing(WordTask):
    """AOPC and LOdds: how the probability of the explained class falls while the highest words are taken away.

    Attributes:
        ways: ``removed``: the text gets shorter; ``masked``: every piece becomes the mask token.
        mask: What a masked piece becomes.
        aopc: Over the steps, p being the softmax over the classes, or the sigmoid where several may be right.
        log_odds: The same of the logarithm.
    """

    kind: ClassVar[str] = "probability while words are removed or masked"

    ways: tuple[Literal["removed", "masked"], ...] = ("removed", "masked")
    mask: Literal["the mask token, without one the unknown token, without both padding"] = (
        "the mask token, without one the unknown token, without both padding"
    )
    aopc: Literal["mean of p0 - pk"] = "mean of p0 - pk"
    log_odds: Literal["mean of log(pk / p0)"] = "mean of log(pk / p0)"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        found = []
        for way in self.ways:
            columns = self._drop_columns(way)
            description = f"Mean over texts and steps of the fall of the target's probability with words {way}."
            weights = [1 / len(columns)] * len(columns)
            name = f"AOPC, words {way}"
            found.append(perturbation.curve_metric(columns, weights, (-1.0, 1.0), name, "higher", description))
            found.append(perturbation.mean_log_odds(f"{way}_", f"LOdds, words {way}"))
        return tuple(found)

    def measure(self, batch: TextBatch, cases: Sequence[Case]) -> list[Values]:
        return [self._values(*found) for found in self.probabilities(batch, cases, self.ways)]

    def _values(self, before: float, along: Floats) -> Values:
        values: Values = {}
        for way, curve in zip(self.ways, along, strict=True):
            values |= row(self._drop_columns(way), perturbation.drops(before, curve))
            values[f"{way}_log_odds"] = float(perturbation.log_odds(before, curve))
        return values

    def _drop_columns(self, way: str) -> tuple[str, ...]:
        return perturbation.curve_columns(f"{way}_", "drop", [percent / 100 for percent in self.percent])


@dataclass(frozen=True)
class Erasure(WordTask):
    """The fall of the probability without the highest words (comprehensiveness) and with these alone (sufficiency)."""

    kind: ClassVar[str] = "comprehensiveness and sufficiency"

    percent: tuple[int, ...] = ERASER_BINS

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return text.mean_comprehensiveness(), text.mean_sufficiency()

    def measure(self, batch: TextBatch, cases: Sequence[Case]) -> list[Values]:
        found = self.probabilities(batch, cases, ("removed", "kept alone"))
        return [
            {
                "comprehensiveness": float(text.comprehensiveness(before, without)),
                "sufficiency": float(text.sufficiency(before, alone)),
            }
            for before, (without, alone) in found
        ]
