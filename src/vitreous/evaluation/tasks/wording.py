"""Asking a model about texts of which some words are removed or masked.

Words are removed with all their pieces, so that the text gets shorter and the cost falls; what the tokenizer puts
around a text always stays. Texts of about one length go through the model together, whatever text, method or curve they
belong to, and nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitreous.evaluation.tasks.batch import Case, Passage, TextBatch
from vitreous.float64 import float64_array
from vitreous.metrics.text import word_scores
from vitreous.models.text_models import LoadedTextModel
from vitreous.tape.runner import TOKENS_AT_ONCE, ModelRunner

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
    """What the model says of texts as rows of pieces, (rows, classes)."""
    new = [row for row in dict.fromkeys(rows) if row not in batch.memory]
    if new:
        batch.memory.update(zip(new, logits_of_rows(batch.model, new), strict=True))
    return torch.stack([batch.memory[row] for row in rows])


def logits_of_rows(model: LoadedTextModel, rows: Sequence[Row]) -> Tensor:
    """The same without a memory."""
    answers: list[Tensor] = [torch.empty(0)] * len(rows)
    for numbers in _alike([len(row) for row in rows]):
        inputs = model.reader.inputs([rows[number] for number in numbers])
        for number, answer in zip(numbers, ModelRunner(model.model, inputs).logits(inputs), strict=True):
            answers[number] = answer
    return torch.stack(answers)


def _alike(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Positions of about equal lengths, as many as run at once, so that hardly anything is padding."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    while order:
        together = max(1, TOKENS_AT_ONCE // max(1, lengths[order[0]]))
        yield order[:together]
        order = order[together:]
