"""Whether the words that a method scores highest are those that people marked as the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.evaluation.tasks.batch import Case, Passage, TextBatch
from vitreous.evaluation.tasks.task import MissingAnnotationError, TextTask, Values, label_of
from vitreous.float64 import float64_array
from vitreous.metrics import text
from vitreous.metrics.metric import Metric, row


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
            raise MissingAnnotationError("no word of a rationale is in the part of the text that the model takes")
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
