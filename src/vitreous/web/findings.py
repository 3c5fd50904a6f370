"""What methods have found out about one photo or text with one model, so that nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

from torch import Tensor

from vitreous.predicted import Predicted

Made = TypeVar("Made", bound=Predicted)


@lru_cache(maxsize=4)
def _choices(names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, number) for number, name in enumerate(names))


@dataclass(kw_only=True)
class Findings(Generic[Made]):
    """What the model says, and the scores of every method and class so far.

    Attributes:
        sample: The first explanation that was made: logits, names and versions are the same for all scores.
        scores: Raw scores by method and class, of patches or word pieces.
        signed: Whether the sign of a method's scores means something.
        failed: Why a method cannot explain this model or input.
    """

    sample: Made | None = None
    scores: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    signed: dict[str, bool] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def predicted(self) -> int:
        """The class that the model finds most likely."""
        assert self.sample is not None
        return int(self.sample.logits[0].argmax())

    def caption(self, class_index: int) -> str:
        """Name a class and tell how likely the model finds it."""
        assert self.sample is not None
        return f"{self.class_names()[class_index]} · {self.sample.format_output(class_index)}"

    def class_names(self) -> list[str]:
        """Name all classes, for people to read."""
        assert self.sample is not None
        names = self.sample.class_names or [f"class {number}" for number in range(self.sample.logits.shape[1])]
        return [name.replace("_", " ") for name in names]

    def class_choices(self) -> list[tuple[str, int]]:
        """Give all classes with their numbers, the same objects for all visitors of a model: Gradio keeps them."""
        return list(_choices(tuple(self.class_names())))

    def missing(self, methods: Iterable[str], classes: Iterable[int]) -> list[str]:
        """Give the methods that have not been asked about all of the classes."""
        wanted = list(classes)
        return [
            method
            for method in dict.fromkeys(methods)
            if method not in self.failed and any((method, one) not in self.scores for one in wanted)
        ]
