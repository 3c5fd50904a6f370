"""What every task has in common: settings, metrics, the classes it needs maps for, and numbers per photo and method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from vitreous.benchmark.tasks.batch import Batch, Case, Picture
from vitreous.errors import VitreousError
from vitreous.metrics.metric import Metric

Values = dict[str, float]


class MissingAnnotationError(VitreousError, ValueError):
    """A photo comes without something that a task needs to know of it."""


@dataclass(frozen=True)
class Task(ABC):
    """A measurement. Its fields are its settings: plain values, all of which a run's key depends on."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The numbers that it ends in."""

    @abstractmethod
    def targets(self, picture: Picture) -> tuple[int, ...]:
        """The classes that have to be explained of a photo.

        Raises:
            MissingAnnotationError: the photo cannot be measured.
        """

    @abstractmethod
    def measure(self, batch: Batch, cases: Sequence[Case]) -> list[Values]:
        """The columns of every case, in order; its photos have targets and its maps are finite."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What is kept of every photo and method."""
        return tuple(dict.fromkeys(column for metric in self.metrics for column in metric.columns))

    def settings(self) -> dict[str, Any]:
        """All choices, as JSON values."""
        return {"task": self.kind, **asdict(self)}


def label_of(picture: Picture) -> int:
    """The class that is right.

    Raises:
        MissingAnnotationError: it is not known, or the model does not have it.
    """
    if picture.label is None:
        raise MissingAnnotationError("the photo has no label")
    if not 0 <= picture.label < picture.classes:
        raise MissingAnnotationError(f"the label {picture.label} is not one of the model's {picture.classes} classes")
    return picture.label


def explained_class(picture: Picture, explained: str) -> int:
    """The class to explain: the one ``predicted`` or the ``label``."""
    return picture.predicted if explained == "predicted" else label_of(picture)
