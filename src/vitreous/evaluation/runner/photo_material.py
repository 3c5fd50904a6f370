"""Photos as protocols read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitreous.datasets.sample import Sample
from vitreous.evaluation.protocols.protocol import Resize
from vitreous.evaluation.runner.material import Maps, Material
from vitreous.evaluation.tasks.batch import Case, PhotoBatch, Picture
from vitreous.explaining import black_pixel, explain_again
from vitreous.inputs.model_input import FAILURES
from vitreous.metrics.arrays import IGNORED
from vitreous.models import LoadedModel, Preprocessing, TwoSided
from vitreous.outputs import OutputActivation
from vitreous.pixels import find_pixels
from vitreous.tape.runner import ModelRunner


class PhotoMaterial(Material):
    """Photos, resized as the protocol says."""

    def __init__(self, model: LoadedModel, resize: Resize) -> None:
        self._model = replace(model, preprocessing=resized(model.preprocessing, resize))

    def prepare(self, sample: Sample) -> Tensor:
        """The model's input, (1, channel, height, width)."""
        return find_pixels(self._model, self._model.model, [sample.image])[0]

    def open(self, samples: Sequence[Sample], prepared: Sequence[Tensor]) -> PhotoBatch:
        pixels = torch.cat(list(prepared))
        runner, logits = first_run(self._model, pixels)
        # One output for "yes" has two answers that can be right, and be explained; a value is explained as it is.
        if logits.shape[1] == 1 and runner.scale != "value":
            # Kept for the next photos: of a model that is new, everything would have to be found out again.
            self._model = two_sided(self._model, runner.scale)
            runner, logits = first_run(self._model, pixels)
        pictures = tuple(self._picture(sample, row) for sample, row in zip(samples, logits, strict=True))
        return PhotoBatch(self._model, runner, pictures, logits, {})

    def maps(
        self, batch: PhotoBatch, images: Sequence[int], targets: Sequence[Sequence[int]], methods: Sequence[str]
    ) -> Maps:
        explanation = explain_again(batch.model, batch.images[list(images)], methods, target=torch.tensor(targets))
        batch.runner.geometry = explanation.geometry
        maps: Maps = {}
        for method, scores in explanation.scores.items():
            grids = scores.detach().reshape(len(images), -1, *explanation.grid_of(method))
            for image, grid, classes in zip(images, grids, targets, strict=True):
                maps[Case(image, method)] = dict(zip(classes, grid, strict=True))
        return maps

    def _picture(self, sample: Sample, logits: Tensor) -> Picture:
        mask = sample.mask
        return Picture(
            name=sample.name,
            predicted=int(logits.argmax()),
            classes=len(logits),
            label=sample.label,
            mask=None if mask is None else self._model.preprocessing.displayed_mask(mask, outside=IGNORED),
            objects=sample.objects,
        )


def two_sided(model: LoadedModel, outputs: OutputActivation | None) -> LoadedModel:
    """A model with one output for "yes" as one of two classes."""
    if outputs == "probabilities":
        return replace(model, model=TwoSided(model.model, probability=True).eval(), outputs="probabilities")
    return replace(model, model=TwoSided(model.model).eval(), outputs="sigmoid")


def resized(preprocessing: Preprocessing, resize: Resize) -> Preprocessing:
    """A model's preprocessing with the protocol's way to resize."""
    return preprocessing if resize == "model" else replace(preprocessing, resize="squash", resize_size=None)


def first_run(model: LoadedModel, pixels: Tensor) -> tuple[ModelRunner, Tensor]:
    """A model with photos, and what it says of them."""
    runner = ModelRunner(
        model.model, pixels, black=black_pixel(model, pixels), outputs=model.outputs, stage=model.stage
    )
    try:
        return runner, runner.logits(pixels)
    except FAILURES:
        _ = runner.layout  # a recorded run says what is wrong with the photos, if it is they
        raise
