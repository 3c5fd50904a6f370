"""Texts as protocols read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitreous.datasets.sample import Review
from vitreous.evaluation.runner.label_outputs import label_outputs
from vitreous.evaluation.runner.material import Maps, Material
from vitreous.evaluation.tasks.batch import Case, Passage, TextBatch
from vitreous.evaluation.tasks.wording import logits_of_rows
from vitreous.explaining import find_recipes
from vitreous.models.text_models import LoadedTextModel
from vitreous.tape.runner import ModelRunner
from vitreous.text_explaining import explain_read
from vitreous.texts import ReadText, Word


class TextMaterial(Material):
    """Texts, cut where the model ends."""

    def __init__(self, model: LoadedTextModel) -> None:
        self._model = model

    def prepare(self, sample: Review) -> ReadText:
        """The pieces of a text, as many as the model takes."""
        read = self._model.reader.read(" ".join(sample.words), f"the text {sample.name}")
        capacity = self._model.reader.capacity
        return read if capacity is None else read.shortened(capacity)

    def open(self, samples: Sequence[Review], prepared: Sequence[ReadText]) -> TextBatch:
        model = self._model
        rows = [read.numbers for read in prepared]
        logits = logits_of_rows(model, rows)
        outputs = label_outputs(model, logits.shape[1])
        passages = tuple(_passage(*each, outputs) for each in zip(samples, prepared, logits, strict=True))
        runner = ModelRunner(model.model, model.reader.inputs(rows), outputs=model.outputs)
        return TextBatch(model, runner, passages, logits, {})

    def maps(
        self, batch: TextBatch, images: Sequence[int], targets: Sequence[Sequence[int]], methods: Sequence[str]
    ) -> Maps:
        read = [batch.pictures[image].read for image in images]
        found, *_ = explain_read(batch.model, read, find_recipes(methods), [list(classes) for classes in targets])
        return {
            Case(image, method): dict(zip(classes, scores.detach(), strict=True))
            for image, classes, result in zip(images, targets, found, strict=True)
            for method, scores in result.scores.items()
        }


def _passage(sample: Review, read: ReadText, logits: Tensor, outputs: Sequence[int]) -> Passage:
    return Passage(
        name=sample.name,
        predicted=int(logits.argmax()),
        classes=len(logits),
        label=outputs[sample.label],
        read=read,
        rationale=sample.rationale[places_of(sample, read.words)],
    )


def places_of(sample: Review, words: Sequence[Word]) -> NDArray[np.int64]:
    """Which of a sample's words these are, by where they stand in the text."""
    starts = np.cumsum([0, *(len(word) + 1 for word in sample.words)])  # words are joined by blanks
    return np.searchsorted(starts, [word.start for word in words], side="right") - 1
