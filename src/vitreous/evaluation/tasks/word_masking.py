"""Tasks on texts: words that are removed or masked in the order of their scores, and agreement with human rationales.

A word is removed with all its pieces, so that the text gets shorter and the cost falls; the tokenizer's special tokens
stay. Texts of similar length are run together, whatever text, method or curve they belong to; no input is run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitreous._utils.torch_state import float64_array
from vitreous.evaluation.tasks.task import (
    NINE,
    Case,
    Explained,
    MissingAnnotationError,
    Passage,
    TextBatch,
    TextTask,
    Values,
    explained_class,
    label_of,
)
from vitreous.metrics import perturbation, text
from vitreous.metrics.metric import Curve, Floats, Metric, row
from vitreous.metrics.text import word_scores
from vitreous.models.hf_models import LoadedTextModel
from vitreous.tape.runner import TOKENS_AT_ONCE, ModelRunner

ERASER_BINS = (1, 5, 10, 20, 50)

Way = Literal["removed", "masked", "kept alone"]
Row = tuple[int, ...]


def ranked_words(batch: TextBatch, case: Case, target: int) -> NDArray[np.int64]:
    """The numbers of a text's words, the highest first; of equal ones the earlier is first."""
    scores = float64_array(batch.map_of(case, target))
    words = word_scores(scores, batch.pictures[case.image].word_of_piece, clamped=False)
    return np.argsort(-words, kind="stable")


def perturbed(passage: Passage, words: NDArray[np.int64], way: Way, blank: int) -> Row:
    """The pieces of a text after something was done to some of its words."""
    touched = np.isin(passage.word_of_piece, words)
    if way == "masked":
        return tuple(np.where(touched, blank, passage.read.numbers).tolist())
    return tuple(np.array(passage.read.numbers)[touched if way == "kept alone" else ~touched].tolist())


def logits_of(batch: TextBatch, rows: Sequence[Row]) -> Tensor:
    """The model's outputs for texts given as rows of pieces, (rows, classes)."""
    new = [pieces for pieces in dict.fromkeys(rows) if pieces not in batch.memory]
    if new:
        batch.memory.update(zip(new, logits_of_rows(batch.model, new), strict=True))
    return torch.stack([batch.memory[pieces] for pieces in rows])


def logits_of_rows(model: LoadedTextModel, rows: Sequence[Row]) -> Tensor:
    """The same without a cache."""
    answers: list[Tensor] = [torch.empty(0)] * len(rows)
    for numbers in _alike([len(pieces) for pieces in rows]):
        inputs = model.reader.inputs([rows[number] for number in numbers])
        for number, answer in zip(numbers, ModelRunner(model.model, inputs).logits(inputs), strict=True):
            answers[number] = answer
    return torch.stack(answers)


def _alike(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Positions of similar lengths, as many as run at once, to keep padding small."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    while order:
        together = max(1, TOKENS_AT_ONCE // max(1, lengths[order[0]]))
        yield order[:together]
        order = order[together:]


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
            curve = self._curve(way)
            description = f"Mean over texts and steps of the fall of the target's probability with words {way}."
            weights = [1 / len(curve.steps)] * len(curve.steps)
            name = f"AOPC, words {way}"
            found.append(perturbation.curve_metric([curve], weights, (-1.0, 1.0), name, "higher", description))
            found.append(self._log_odds(way))
        return tuple(found)

    def _log_odds(self, way: str) -> Metric:
        return perturbation.mean_log_odds(f"{way}_", f"LOdds, words {way}")

    def measure(self, batch: TextBatch, cases: Sequence[Case]) -> list[Values]:
        return [self._values(*found) for found in self.probabilities(batch, cases, self.ways)]

    def _values(self, before: float, along: Floats) -> Values:
        values: Values = {}
        for way, curve in zip(self.ways, along, strict=True):
            values |= row(self._curve(way).columns, perturbation.drops(before, curve))
            values |= self._log_odds(way).row(float(perturbation.log_odds(before, curve)))
        return values

    def _curve(self, way: str) -> Curve:
        return perturbation.curve_of(f"{way}_", "drop", [percent / 100 for percent in self.percent])


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
        without_words, words_alone = self.metrics
        return [
            without_words.row(float(text.comprehensiveness(before, without)))
            | words_alone.row(float(text.sufficiency(before, alone)))
            for before, (without, alone) in found
        ]


@dataclass(frozen=True)
class Rationales(TextTask):
    """Token-F1 of the words with the highest scores against a human rationale, in every text, averaged over texts.

    Attributes:
        explained: The class whose scores are measured.
        tops: How many words are taken; a text that has fewer is taken whole.
        older_tops: The same in an earlier program.
        word: The score of a word, from those of its pieces.
        ties: Which of equal words ranks higher.
        rationale: What of it counts.
    """

    kind: ClassVar[str] = "token-F1 against rationales"

    explained: Literal["label"] = "label"
    tops: tuple[int, ...] = text.GRADTOKEN_TOP
    older_tops: tuple[int, ...] = text.OLDER_TOP
    word: Literal["the highest of its pieces, and not below 0"] = "the highest of its pieces, and not below 0"
    ties: Literal["the earlier one"] = "the earlier one"
    rationale: Literal["the words that the model takes"] = "the words that the model takes"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            text.average_token_f1(self.tops),
            text.average_token_f1(self.older_tops, name="token-F1, older sizes"),
        )

    def targets(self, picture: Passage) -> tuple[int, ...]:
        if not picture.rationale.any():
            raise MissingAnnotationError("no word of the rationale is within the model's maximum length")
        return (label_of(picture),)

    def measure(self, batch: TextBatch, cases: Sequence[Case]) -> list[Values]:
        tops = sorted({*self.tops, *self.older_tops})
        found = []
        for case in cases:
            passage = batch.pictures[case.image]
            pieces = float64_array(batch.map_of(case, label_of(passage)))
            scores = text.word_scores(pieces, passage.word_of_piece)
            values = [text.token_f1(scores, passage.rationale, top) for top in tops]
            found.append(row(text.token_f1_columns(tops), values))
        return found
