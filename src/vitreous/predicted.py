"""What explanations of pictures and of texts have in common: what the model said, and which classes are explained."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from vitreous.errors import MethodError, VitreousError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ExplanationError(VitreousError, ValueError):
    """The parts of an explanation do not fit together, or a part is asked for that it does not have."""


class Prediction(NamedTuple):
    """One class a model considers for an image."""

    class_index: int
    label: str
    probability: float


class Predicted:
    """Logits (batch, classes), the classes explained (batch,) or (batch, k), and scores by method."""

    things: ClassVar[str]
    scores: Mapping[str, Any]
    target: Tensor
    logits: Tensor
    class_names: tuple[str, ...] | None

    def __len__(self) -> int:
        """Give the number of images or texts."""
        return self.logits.shape[0]

    @property
    def methods(self) -> tuple[str, ...]:
        """The method spellings, in the order they were asked for."""
        return tuple(self.scores)

    @property
    def classes_per_image(self) -> int:
        """How many classes are explained for each image."""
        return self.target.shape[1] if self.target.ndim == 2 else 1

    @property
    def probabilities(self) -> Tensor:
        """The softmax of the logits (batch, classes), at least in float32."""
        return self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).softmax(dim=-1)

    def class_index(self, index: int = 0, target_index: int = 0) -> int:
        """Give the number of the class that is explained for an image."""
        index, target_index = self._position(index, target_index)
        return int(self.target.reshape(len(self), -1)[index, target_index])

    def label(self, index: int = 0, target_index: int = 0) -> str:
        """Give the name of the class that is explained for an image, or its number where names are not known."""
        return self._label(self.class_index(index, target_index))

    def top(self, k: int = 5, *, index: int = 0) -> tuple[Prediction, ...]:
        """Give the ``k`` most likely classes of an image, the most likely first."""
        if k < 1:
            raise ExplanationError(f"k must be at least 1, not {k}")
        index, _ = self._position(index, 0)
        likely = self.probabilities[index].topk(min(k, self.logits.shape[1]))
        return tuple(
            Prediction(number, self._label(number), probability)
            for number, probability in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        )

    def _scores_of(self, method: str) -> Any:
        if method not in self.scores:
            close = get_close_matches(method, self.methods, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(self.methods)}"
            raise MethodError(f"this explanation has no method {method!r}; {hint}")
        return self.scores[method]

    def _position(self, index: int, target_index: int) -> tuple[int, int]:
        counts = ((index, len(self), self.things), (target_index, self.classes_per_image, "classes"))
        for position, count, what in counts:
            if not 0 <= position < count:
                raise ExplanationError(f"index {position} is out of range: this explanation has {count} {what}")
        return int(index), int(target_index)

    def _label(self, class_index: int) -> str:
        return str(class_index) if self.class_names is None else self.class_names[class_index]


def check_predictions(explanation: Predicted) -> None:
    """Raise unless logits, target and class names belong to one prediction."""
    logits, target, names = explanation.logits, explanation.target, explanation.class_names
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        raise ExplanationError(f"logits must be floating (batch, classes), not {logits.dtype} {tuple(logits.shape)}")
    if target.dtype != torch.int64 or target.ndim not in {1, 2} or target.shape[0] != len(logits) or 0 in target.shape:
        raise ExplanationError(
            f"target must be int64 (batch,) or (batch, k) for {len(logits)} {explanation.things}, "
            f"not {target.dtype} {tuple(target.shape)}"
        )
    if target.min() < 0 or target.max() >= logits.shape[1]:
        raise ExplanationError(f"target must name one of the {logits.shape[1]} classes")
    if names is not None and (len(names) != logits.shape[1] or not all(isinstance(name, str) for name in names)):
        raise ExplanationError(f"class_names must be one text for each of the {logits.shape[1]} classes")
