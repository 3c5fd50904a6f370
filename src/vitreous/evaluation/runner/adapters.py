"""How samples become a model's input and how methods explain them, for images and for texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitreous.api.explain import black_pixel, explain_again, find_recipes
from vitreous.datasets.dataset import IGNORED, DataSet, Review, Sample, VolumeSample
from vitreous.datasets.eraser_movies import LABELS
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.protocol import Protocol, Resize
from vitreous.evaluation.run import RunError
from vitreous.evaluation.tasks.task import Batch, Case, ImageBatch, MapTarget, Passage, Picture, TextBatch
from vitreous.evaluation.tasks.word_masking import logits_of_rows
from vitreous.inputs.model_io import FAILURES, OutputActivation, scale_of
from vitreous.inputs.texts import TokenizedText, Word
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel, Preprocessing, TwoSided
from vitreous.models.dual_encoder import DualEncoder, ZeroShotClassifier
from vitreous.models.hf_models import LoadedTextModel
from vitreous.models.pixels import find_pixels
from vitreous.tape.runner import ModelRunner
from vitreous.text.explain import explain_read

# How models call what the movie reviews call NEG and POS.
_CALLED = {"neg": 0, "negative": 0, "pos": 1, "positive": 1}

Maps = dict[Case, dict[MapTarget, Tensor]]


def label_outputs(model: LoadedTextModel, outputs: int | None = None) -> tuple[int, ...]:
    """The number of the model's output for each of the labels NEG and POS.

    Args:
        model: a text classifier; it may have further classes, such as neutral, where its names tell which are which.
        outputs: how many outputs it has, where that was seen; otherwise as many as its names or configuration say.

    Raises:
        UnsupportedModelError: neither the names nor the number of the outputs tell.
    """
    count = outputs or _count(model)
    if count == 1:
        raise UnsupportedModelError("the model has one output; a protocol for texts needs one for every class")
    if (model.outputs or scale_of(model.model)) == "value":
        raise UnsupportedModelError("the model's outputs are values (regression); a protocol for texts needs classes")
    names = model.class_names or ()
    if len(names) != count or all(_is_placeholder(name, number) for number, name in enumerate(names)):
        if count != len(LABELS):
            raise UnsupportedModelError(
                f"the model has {count} classes without names, so it is not known which of them are {_listed(LABELS)}"
            )
        return tuple(range(len(LABELS)))
    meant = [_CALLED.get(name.strip().casefold()) for name in names]
    if any(meant.count(label) != 1 for label in range(len(LABELS))):
        raise UnsupportedModelError(
            f"the model's class names are {_listed(names)}, so it is not known which of them are {_listed(LABELS)}"
        )
    return tuple(meant.index(label) for label in range(len(LABELS)))


def _count(model: LoadedTextModel) -> int:
    """How many outputs a model says to have; where it says nothing, the run will show."""
    if model.class_names is not None:
        return len(model.class_names)
    config: Any = getattr(model.model, "config", None)
    return int(getattr(config, "num_labels", len(LABELS)))


def _is_placeholder(name: str, number: int) -> bool:
    return name.strip().casefold() in {str(number), f"label_{number}", f"label{number}"}


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


class SampleAdapter(ABC):
    """Turns images or texts into inputs of one model, and explains them."""

    def spelling(self, method: str) -> str:
        """What a method is called in rows, without surrounding blanks.

        Raises:
            MethodError: there is no such method.
        """
        return parse(method).spelling

    @abstractmethod
    def prepare(self, sample: Any) -> Any:
        """Prepare one sample as input of the model.

        Raises:
            VitreousError: it cannot be used.
        """

    @abstractmethod
    def open(self, samples: Sequence[Any], prepared: Sequence[Any]) -> Batch[Any, Any]:
        """Run the model on samples and return the batch, without maps."""

    @abstractmethod
    def maps(
        self,
        batch: Batch[Any, Any],
        images: Sequence[int],
        targets: Sequence[Sequence[MapTarget]],
        methods: Sequence[str],
    ) -> Maps:
        """Explain some samples of a batch, each for equally many targets, in one run for all methods."""


class ImageAdapter(SampleAdapter):
    """Images, or volumes, resized as the protocol defines."""

    def __init__(self, model: LoadedModel, resize: Resize) -> None:
        self._model = replace(model, preprocessing=resized(model.preprocessing, resize))

    def prepare(self, sample: Sample | VolumeSample) -> Tensor:
        """The model's input, (1, channel, height, width), or with one axis more."""
        source: Any = sample.file if isinstance(sample, VolumeSample) else sample.image
        return find_pixels(self._model, self._model.model, [source])[0]

    def open(self, samples: Sequence[Sample | VolumeSample], prepared: Sequence[Tensor]) -> ImageBatch:
        pixels = torch.cat(list(prepared))
        runner, logits = first_run(self._model, pixels)
        # A single logit has two classes, both of which can be explained; a value is explained as it is.
        if logits.shape[1] == 1 and runner.scale != "value":
            # Reuse the wrapper: caches are keyed by module.
            self._model = two_sided(self._model, runner.scale)
            runner, logits = first_run(self._model, pixels)
        pictures = tuple(self._picture(sample, row) for sample, row in zip(samples, logits, strict=True))
        return ImageBatch(self._model, runner, pictures, logits, {})

    def maps(
        self, batch: ImageBatch, images: Sequence[int], targets: Sequence[Sequence[MapTarget]], methods: Sequence[str]
    ) -> Maps:
        classes = all(isinstance(target, int) for row in targets for target in row)
        wanted: Any = torch.tensor(targets) if classes else [list(row) for row in targets]
        explanation = explain_again(batch.model, batch.images[list(images)], methods, target=wanted)
        batch.runner.geometry = explanation.geometry
        maps: Maps = {}
        for method, scores in explanation.scores.items():
            grids = scores.detach().reshape(len(images), -1, *explanation.grid_of(method))
            for image, grid, explained in zip(images, grids, targets, strict=True):
                maps[Case(image, method)] = dict(zip(explained, grid, strict=True))
        return maps

    def _picture(self, sample: Sample | VolumeSample, logits: Tensor) -> Picture:
        mask, objects = (sample.mask, sample.objects) if isinstance(sample, Sample) else (None, ())
        predicted = int(logits.argmax())
        others = logits.index_fill(0, logits.argmax(), -torch.inf)
        return Picture(
            name=sample.name,
            predicted=predicted,
            classes=len(logits),
            label=sample.label,
            second=int(others.argmax()) if len(logits) > 1 else None,
            mask=None if mask is None else self._model.preprocessing.displayed_mask(mask, outside=IGNORED),
            objects=objects,
        )


def prompted_model(dual: DualEncoder, data: DataSet, template: str, stage: int | None = None) -> LoadedModel:
    """A dual encoder as a classifier of a data set's classes: output n is the score of the image with class n's prompt.

    Prompts of classes without a sample are not embedded; their output is the logit bias, or 0.

    Raises:
        RunError: the data set does not name its classes, or the model's preprocessing is not known.
    """
    names = data.class_names
    if names is None:
        raise RunError(f"prompts need the names of the classes, which {data.kind}:{data.path} does not have")
    if dual.preprocessing is None:
        raise RunError(f"the preprocessing of {dual.name} is not known: give (model, preprocessing, tokenizer)")
    labels = data.labels()
    present = range(len(names)) if labels is None else sorted({label for label in labels if label is not None})
    embeddings = dual.embed_texts([template.replace("{}", prompt_name(names[label])) for label in present])
    weights = embeddings.new_zeros(len(names), embeddings.shape[1])
    weights[list(present)] = embeddings
    network = ZeroShotClassifier(dual.image_tower, weights, dual.scale, dual.bias, names).eval()
    return LoadedModel(dual.name, network, dual.preprocessing, names, outputs="value", stage=stage)


def prompt_name(class_name: str) -> str:
    """The name of a class as it stands in a prompt: the first of several, without underscores."""
    return class_name.partition(",")[0].replace("_", " ").strip()


def two_sided(model: LoadedModel, outputs: OutputActivation | None) -> LoadedModel:
    """A model with one output for "yes" as one of two classes."""
    if outputs == "probabilities":
        return replace(model, model=TwoSided(model.model, probability=True).eval(), outputs="probabilities")
    return replace(model, model=TwoSided(model.model).eval(), outputs="sigmoid")


def resized(preprocessing: Preprocessing, resize: Resize) -> Preprocessing:
    """A model's preprocessing with the protocol's way to resize."""
    return preprocessing if resize == "model" else replace(preprocessing, resize="squash", resize_size=None)


def first_run(model: LoadedModel, pixels: Tensor) -> tuple[ModelRunner, Tensor]:
    """A runner for the images, and the model's outputs."""
    runner = ModelRunner(
        model.model, pixels, black=black_pixel(model, pixels), outputs=model.outputs, stage=model.stage
    )
    try:
        return runner, runner.logits(pixels)
    except FAILURES:
        _ = runner.layout  # a recorded run raises the error that names what is wrong with the images
        raise


class TextAdapter(SampleAdapter):
    """Texts, truncated to the model's maximum length."""

    def __init__(self, model: LoadedTextModel) -> None:
        self._model = model

    def prepare(self, sample: Review) -> TokenizedText:
        """The pieces of a text, truncated to the model's maximum length."""
        read = self._model.reader.read(" ".join(sample.words), f"the text {sample.name}")
        capacity = self._model.reader.capacity
        return read if capacity is None else read.shortened(capacity)

    def open(self, samples: Sequence[Review], prepared: Sequence[TokenizedText]) -> TextBatch:
        model = self._model
        rows = [read.numbers for read in prepared]
        logits = logits_of_rows(model, rows)
        outputs = label_outputs(model, logits.shape[1])
        passages = tuple(_passage(*each, outputs) for each in zip(samples, prepared, logits, strict=True))
        runner = ModelRunner(model.model, model.reader.inputs(rows), outputs=model.outputs)
        return TextBatch(model, runner, passages, logits, {})

    def maps(
        self, batch: TextBatch, images: Sequence[int], targets: Sequence[Sequence[MapTarget]], methods: Sequence[str]
    ) -> Maps:
        read = [batch.pictures[image].read for image in images]
        found, *_ = explain_read(batch.model, read, find_recipes(methods), [list(classes) for classes in targets])
        return {
            Case(image, method): dict(zip(classes, scores.detach(), strict=True))
            for image, classes, result in zip(images, targets, found, strict=True)
            for method, scores in result.scores.items()
        }


def _passage(sample: Review, read: TokenizedText, logits: Tensor, outputs: Sequence[int]) -> Passage:
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


def adapter_for(model: LoadedModel | LoadedTextModel, protocol: Protocol) -> SampleAdapter:
    """The adapter of a model for the samples of a protocol."""
    return TextAdapter(model) if isinstance(model, LoadedTextModel) else ImageAdapter(model, protocol.resize)
