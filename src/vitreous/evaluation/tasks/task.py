"""What every task has in common: settings, metrics, the classes it needs maps for, and numbers per case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from vitreous.datasets.sample import Things
from vitreous.errors import VitreousError
from vitreous.evaluation.tasks.batch import Case, Passage, PhotoBatch, Picture, Seen, SeenT, TextBatch
from vitreous.metrics.metric import Metric

Values = dict[str, float]
Explained = Literal["predicted", "label"]  # the class whose map is measured

NINE = tuple(range(10, 100, 10))  # percent: the steps of most curves

_OF_THE_DATA = ("label", "largest object")  # classes to explain that a data set tells, not the model


class MissingAnnotationError(VitreousError, ValueError):
    """A photo or text comes without something that a task needs to know of it."""


BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class Task(ABC, Generic[SeenT, BatchT]):
    """A measurement. Its fields are its settings: plain values, all of which a run's key depends on."""

    kind: ClassVar[str]
    reads: ClassVar[Things]

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The numbers that it ends in."""

    @abstractmethod
    def targets(self, picture: SeenT) -> tuple[int, ...]:
        """The classes that have to be explained of a photo or text.

        Raises:
            MissingAnnotationError: it cannot be measured.
        """

    @abstractmethod
    def measure(self, batch: BatchT, cases: Sequence[Case]) -> list[Values]:
        """The columns of every case, in order; all have targets and finite maps."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What is kept of every photo or text and method."""
        return tuple(dict.fromkeys(column for metric in self.metrics for column in metric.columns))

    @property
    def uses_labels(self) -> bool:
        """Whether it takes a class that the data set names by its number for the model's output of that number."""
        explained = self.settings().get("explained", ())
        return any(each in _OF_THE_DATA for each in ((explained,) if isinstance(explained, str) else explained))

    def settings(self) -> dict[str, Any]:
        """All choices, as JSON values."""
        return {"task": self.kind, **asdict(self)}


class PhotoTask(Task[Picture, PhotoBatch]):
    """A measurement on photos."""

    reads: ClassVar[Things] = "photos"


class TextTask(Task[Passage, TextBatch]):
    """A measurement on texts."""

    reads: ClassVar[Things] = "texts"


def label_of(picture: Seen) -> int:
    """The class that is right.

    Raises:
        MissingAnnotationError: it is not known, or the model does not have it.
    """
    if picture.label is None:
        raise MissingAnnotationError("the photo has no label")
    if not 0 <= picture.label < picture.classes:
        raise MissingAnnotationError(f"the label {picture.label} is not one of the model's {picture.classes} classes")
    return picture.label


def explained_class(picture: Seen, explained: str) -> int:
    """The class to explain: the one ``predicted`` or the ``label``."""
    return picture.predicted if explained == "predicted" else label_of(picture)
