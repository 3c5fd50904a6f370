"""What is measured together, and what every task has in common."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vitreous.datasets.dataset import Things
from vitreous.errors import UnsupportedModelError, VitreousError
from vitreous.inputs.model_io import ClassOutputs
from vitreous.inputs.patch_geometry import PatchGeometry, Size, enlarge
from vitreous.inputs.target import Target
from vitreous.inputs.texts import TokenizedText
from vitreous.metrics.metric import Metric
from vitreous.models import LoadedModel
from vitreous.models.hf_models import LoadedTextModel
from vitreous.tape.runner import ModelRunner

# Images explained together: enough to keep a processor busy, few enough that the tapes of all blocks
# of a large model fit into memory.
EXPLAINED_TOGETHER = 8

ModelT = TypeVar("ModelT")
Values = dict[str, float]
Explained = Literal["predicted", "label"]  # the class whose map is measured
MapTarget = int | Target  # what a map explains: a class, or a target that does not depend on a run any more
NINE = tuple(range(10, 100, 10))  # percent: the steps of most curves
_OF_THE_DATA = ("label", "largest object")  # classes to explain that come from the data set, not from the model
BatchT = TypeVar("BatchT")
Purpose = Literal["localisation", "faithfulness", "other"]


@dataclass(frozen=True)
class Seen:
    """One image or text as the model sees it.

    Attributes:
        name: Of its sample.
        predicted: The predicted class.
        classes: How many classes the model has.
        label: The true class, where known.
    """

    name: str
    predicted: int
    classes: int
    label: int | None = None


@dataclass(frozen=True)
class Picture(Seen):
    """One image.

    Attributes:
        mask: At the model's resolution: 0 background, n the n-th object, -1 not counted.
        objects: The classes of object 1, 2, ..., where known.
        second: The most likely class besides the predicted one; None for a model with one output.
    """

    mask: NDArray[np.int16] | None = None
    objects: tuple[int | None, ...] = ()
    second: int | None = None


@dataclass(frozen=True, kw_only=True)
class Passage(Seen):
    """One text.

    Attributes:
        read: Its pieces and words, as far as the model takes them.
        rationale: For each of these words whether people marked it as a reason.
    """

    read: TokenizedText
    rationale: NDArray[np.bool_]

    @property
    def word_of_piece(self) -> NDArray[np.int64]:
        """The number of the word that each piece belongs to."""
        return np.array([piece.word for piece in self.read.pieces], dtype=np.int64)


class Case(NamedTuple):
    """One thing to measure: an image or text of a batch, by its position, and a method."""

    image: int
    method: str


SeenT = TypeVar("SeenT", bound=Seen)


@dataclass(frozen=True)
class Batch(Generic[ModelT, SeenT]):
    """Images or texts, and their maps.

    Attributes:
        model: The model with its name and preprocessing, or its tokenizer.
        runner: The model with these images or texts as its input.
        pictures: One per image or text.
        logits: The model's outputs for the originals, (images, classes).
        maps: For each image and method, maps by what they explain: (rows, columns), or (pieces,) of a text.
        memory: Outputs of the model that another task may need again.
    """

    model: ModelT
    runner: ModelRunner
    pictures: tuple[SeenT, ...]
    logits: Tensor
    maps: Mapping[Case, Mapping[MapTarget, Tensor]]
    memory: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def images(self) -> Tensor:
        """The model's input, (images, channel, height, width)."""
        return self.runner.images

    @property
    def outputs(self) -> ClassOutputs:
        """What the model's outputs are; as many probabilities as classes can be made of them.

        Raises:
            UnsupportedModelError: its outputs are no classes.
        """
        if self.runner.scale == "value":
            raise UnsupportedModelError(
                "the model's outputs are values (regression), which have neither a true class nor a probability"
            )
        return self.runner.scale or "logits"

    def map_of(self, case: Case, target: MapTarget) -> Tensor:
        """The map of a case for one class or other target, (rows, columns) or (pieces,)."""
        return self.maps[case][target]


ImageBatch = Batch[LoadedModel, Picture]
TextBatch = Batch[LoadedTextModel, Passage]


def enlarged(maps: Tensor, size: Size, mode: str, geometry: PatchGeometry | None = None) -> Tensor:
    """Maps (n, rows, columns) at another size, (n, height, width).

    Args:
        maps: One value for every patch, or for every pixel.
        size: Height and width of the model's input.
        mode: ``bilinear`` or ``nearest``.
        geometry: Where patches are centred; equal cells by default.
    """
    if tuple(maps.shape[-2:]) == size:
        return maps
    if mode == "nearest" and geometry is not None:
        return enlarge(maps, size, geometry, smooth=False)
    if mode == "nearest":
        return functional.interpolate(maps[:, None], size=size, mode="nearest-exact")[:, 0]
    for dimension, length in zip((1, 2), size, strict=True):
        lower, upper, weight = _neighbours(length, maps.shape[dimension], maps, geometry, dimension - 1)
        shape = (-1, 1) if dimension == 1 else (-1,)
        maps = torch.lerp(maps.index_select(dimension, lower), maps.index_select(dimension, upper), weight.view(shape))
    return maps


def _neighbours(
    length: int, cells: int, like: Tensor, geometry: PatchGeometry | None, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Between which two cells each of ``length`` pixels lies, and how far; beyond the outer centres nothing changes.

    The same numbers as torch's bilinear interpolation, up to the last digit: there, pixels between two equal cells
    differ by rounding, which then decides about their order and about what lies above a threshold. Here they are equal.
    """
    middles = torch.arange(length, dtype=torch.float64) + 0.5
    place = middles * cells / length if geometry is None else geometry.positions(axis, middles / length)
    place = (place - 0.5).clamp(0, cells - 1)
    lower = place.floor().long()
    upper = (lower + 1).clamp(max=cells - 1)
    return lower.to(like.device), upper.to(like.device), (place - lower).to(like)


def seed_of(name: str, purpose: str) -> int:
    """A seed that depends on nothing but a name, of a image or of a weight, and what it is for."""
    return int.from_bytes(hashlib.sha256(f"{purpose}|{name}".encode()).digest()[:8], "big") >> 1


def generator_of(name: str, purpose: str) -> torch.Generator:
    """A random generator on the processor, seeded by ``seed_of``."""
    return torch.Generator().manual_seed(seed_of(name, purpose))


class MissingAnnotationError(VitreousError, ValueError):
    """An image or text lacks an annotation that a task needs."""


@dataclass(frozen=True)
class Task(ABC, Generic[SeenT, BatchT]):
    """A measurement. Its fields are its settings: plain values, all of which a run's key depends on.

    Attributes:
        kind: What it is called in settings.
        reads: Images or texts.
        volumes: Whether it is defined for volumes and clips as well.
        purpose: What it says about a map: where relevance lies, what that does to the output, or something else.
    """

    kind: ClassVar[str]
    reads: ClassVar[Things]
    volumes: ClassVar[bool] = False
    purpose: ClassVar[Purpose] = "other"

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that it reports."""

    @abstractmethod
    def targets(self, picture: SeenT) -> tuple[MapTarget, ...]:
        """The classes or other targets to explain for an image or text.

        Raises:
            MissingAnnotationError: it cannot be measured.
        """

    @abstractmethod
    def measure(self, batch: BatchT, cases: Sequence[Case]) -> list[Values]:
        """The columns of every case, in order; all have targets and finite maps."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What is kept of every image or text and method."""
        return tuple(dict.fromkeys(column for metric in self.metrics for column in metric.columns))

    @property
    def uses_labels(self) -> bool:
        """Whether it takes a class that the data set names by its number for the model's output of that number."""
        explained = self.settings().get("explained", ())
        return any(each in _OF_THE_DATA for each in ((explained,) if isinstance(explained, str) else explained))

    def settings(self) -> dict[str, Any]:
        """All settings, as JSON values."""
        return {"task": self.kind, **asdict(self)}


class ImageTask(Task[Picture, ImageBatch]):
    """A measurement on images."""

    reads: ClassVar[Things] = "photos"


class TextTask(Task[Passage, TextBatch]):
    """A measurement on texts."""

    reads: ClassVar[Things] = "texts"


def label_of(picture: Seen) -> int:
    """The true class.

    Raises:
        MissingAnnotationError: it is not known, or the model does not have it.
    """
    if picture.label is None:
        raise MissingAnnotationError("the image has no label")
    if not 0 <= picture.label < picture.classes:
        raise MissingAnnotationError(f"the label {picture.label} is not one of the model's {picture.classes} classes")
    return picture.label


def explained_class(picture: Seen, explained: str) -> int:
    """The class to explain: the one ``predicted`` or the ``label``."""
    return picture.predicted if explained == "predicted" else label_of(picture)
