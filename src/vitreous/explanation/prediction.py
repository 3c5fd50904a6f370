"""What explanations of images and texts share: predictions and explained classes; and the checks of their fields."""

from __future__ import annotations

import json
import math
import operator
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import torch

from vitreous._utils.messages import close_match, error_message
from vitreous.errors import MethodError, VitreousError
from vitreous.inputs.model_io import OutputActivation, likelihoods, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from PIL import Image
    from torch import Tensor

    from vitreous.explanation.explanation import Explanation
    from vitreous.inputs.target import Target


class ExplanationError(VitreousError, ValueError):
    """The parts of an explanation do not fit together, or it does not have the requested part."""


class Prediction(NamedTuple):
    """One class with its probability; ``None`` when the model's outputs are values (regression)."""

    class_index: int
    label: str
    probability: float | None


@dataclass(frozen=True)
class Origin:
    """What an explanation was made of, so that more can be measured; neither saved nor copied.

    Attributes:
        model: Gives the model that was explained, as ``explain`` takes it; ``None`` when it is gone.
        pixels: The model's input.
        layout: How the tokens of the run are laid out.
        unchanged: Tells whether weights and input still have the numbers that were explained.
    """

    model: Callable[[], Any]
    pixels: Tensor
    layout: Any
    unchanged: Callable[[], bool]


class Predicted:
    """Logits (batch, classes), the classes explained (batch,) or (batch, k), and scores by method.

    A number in ``target`` from the number of classes on is that of a target which is not a class: ``targets`` in order.
    """

    noun: ClassVar[str]
    scores: Mapping[str, Any]
    target: Tensor
    logits: Tensor
    class_names: tuple[str, ...] | None
    scale: OutputActivation | None
    targets: tuple[Target, ...] = ()
    target_values: Tensor | None = None

    def __len__(self) -> int:
        """Number of images or texts."""
        return self.target.shape[0]

    @property
    def methods(self) -> tuple[str, ...]:
        """The method spellings, in the order they were given."""
        return tuple(self.scores)

    @property
    def classes_per_image(self) -> int:
        """Number of classes explained per image or text."""
        return self.target.shape[1] if self.target.ndim == 2 else 1

    @property
    def outputs(self) -> OutputActivation:
        """What the model's outputs are, see ``vitreous.inputs.model_io``: ``logits`` by default."""
        return self.scale or "logits"

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of all classes (batch, classes), at least in float32.

        Softmax or sigmoid of the logits, or the outputs themselves when they are probabilities.

        Raises:
            ExplanationError: The outputs are values (regression).
        """
        if self.scale == "value":
            raise ExplanationError("the outputs of this model are values (regression), which have no probability")
        return self._likelihoods

    @property
    def _likelihoods(self) -> Tensor:
        return likelihoods(self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)), self.scale)

    def probability(self, class_index: int, index: int = 0) -> float | None:
        """Give the probability of a class of an image; ``None`` for other targets and for values (regression)."""
        index, _ = self.position(index)
        classes = self.logits.shape[1]
        if self._object(class_index) is not None:
            return None
        if not 0 <= class_index < classes:
            raise ExplanationError(f"class {class_index} does not exist: the model has {classes}")
        return None if self.scale == "value" else float(self.probabilities[index, class_index])

    @property
    def quantity(self) -> str:
        """Column heading for ``format_output``: ``probability`` or ``value``."""
        return "value" if self.scale == "value" else "probability"

    def format_output(self, class_index: int, index: int = 0) -> str:
        """Format the probability of a class of an image, or the number itself when it is a value or another target."""
        likely = self.probability(class_index, index)
        return f"{self.value(class_index, index):.3g}" if likely is None else percent(likely)

    def value(self, class_index: int, index: int = 0) -> float:
        """Give the logit of a class of an image, or the number that a target which is not a class has there."""
        index, _ = self.position(index)
        if self._object(class_index) is None:
            return float(self.logits[index, class_index])
        assert self.target_values is not None
        (found, *_) = torch.where(self.target.reshape(len(self), -1)[index] == class_index)[0].tolist() or (None,)
        if found is None:
            raise ExplanationError(f"{self._label(class_index)} is not explained for image {index}")
        return float(self.target_values.reshape(len(self), -1)[index, found])

    def _object(self, number: int) -> Target | None:
        """The target which is not a class that has this number."""
        place = number - self.logits.shape[1] if self.targets else -1
        return self.targets[place] if 0 <= place < len(self.targets) else None

    def saying(self, class_index: int, index: int = 0) -> str:
        """Do what ``format_output`` does; the former name."""
        warnings.warn("saying is called format_output now", DeprecationWarning, stacklevel=2)
        return self.format_output(class_index, index)

    def class_index(self, index: int = 0, target_index: int = 0) -> int:
        """Give the index of a class that is explained for an image."""
        index, target_index = self.position(index, target_index)
        return int(self.target.reshape(len(self), -1)[index, target_index])

    def label(self, index: int = 0, target_index: int = 0) -> str:
        """Give the name of a class that is explained for an image, or its index when names are not known."""
        return self._label(self.class_index(index, target_index))

    def target_name(self, index: int = 0, target_index: int = 0) -> str:
        """Give what captions call a target: a class by its name or as ``class 3``, another target by its label."""
        number = self.class_index(index, target_index)
        if self._object(number) is not None or self.class_names is not None:
            return self._label(number).replace("_", " ")
        return f"class {number}"

    def is_class(self, index: int = 0, target_index: int = 0) -> bool:
        """Tell whether a target is a class, which has a logit of its own."""
        return self._object(self.class_index(index, target_index)) is None

    def top(self, k: int = 5, *, index: int = 0) -> tuple[Prediction, ...]:
        """Give the ``k`` most likely classes of an image, the most likely first."""
        if k < 1:
            raise ExplanationError(f"k must be at least 1, not {k}")
        index, _ = self.position(index)
        likely = self._likelihoods[index].topk(min(k, self.logits.shape[1])).indices.tolist()
        return tuple(Prediction(number, self._label(number), self.probability(number, index)) for number in likely)

    def position(self, index: int, target_index: int = 0) -> tuple[int, int]:
        """Check the index of an image or text and of one of its classes.

        Raises:
            ExplanationError: There is no such image or class.
        """
        counts = ((index, len(self), self.noun), (target_index, self.classes_per_image, "classes"))
        for position, count, what in counts:
            if not 0 <= position < count:
                raise ExplanationError(f"index {position} is out of range: this explanation has {count} {what}")
        return int(index), int(target_index)

    def _scores_of(self, method: str) -> Any:
        if method not in self.scores:
            hint = close_match(method, self.methods) or f"; it has {', '.join(self.methods)}"
            raise MethodError(f"this explanation has no method {method!r}{hint}")
        return self.scores[method]

    def _label(self, class_index: int) -> str:
        target = self._object(class_index)
        if target is not None:
            return target.label(self.class_names)
        return str(class_index) if self.class_names is None else self.class_names[class_index]


def check_predictions(explanation: Predicted) -> None:
    """Raise unless logits, target and class names belong to one prediction."""
    logits, target, names = explanation.logits, explanation.target, explanation.class_names
    # A model with a dense output has no class scores.
    empty = 0 in logits.shape[:1] or (0 in logits.shape and not explanation.targets)
    if logits.ndim != 2 or empty or not logits.is_floating_point():
        raise ExplanationError(f"logits must be floating (batch, classes), not {logits.dtype} {tuple(logits.shape)}")
    if target.dtype != torch.int64 or target.ndim not in {1, 2} or target.shape[0] != len(logits) or 0 in target.shape:
        raise ExplanationError(
            f"target must be int64 (batch,) or (batch, k) for {len(logits)} {explanation.noun}, "
            f"not {target.dtype} {tuple(target.shape)}"
        )
    if target.min() < 0 or target.max() >= logits.shape[1] + len(explanation.targets):
        raise ExplanationError(f"target must name one of the {logits.shape[1]} classes")
    values = explanation.target_values
    if (values is None and explanation.targets) or (values is not None and values.shape != target.shape):
        raise ExplanationError(f"target_values must be one number for each target, {tuple(target.shape)}")
    kinds = get_args(OutputActivation)
    if explanation.scale not in (None, *kinds):
        raise ExplanationError(f"scale must be one of {', '.join(kinds)}, not {explanation.scale!r}")
    classes = logits.shape[1] or len(names or ())  # names of a dense output's classes go with no class scores
    if names is not None and (len(names) != classes or not all(isinstance(name, str) for name in names)):
        raise ExplanationError(f"class_names must be one text for each of the {logits.shape[1]} classes")


def plain_fields(explanation: Explanation) -> dict[str, Any]:
    """Normalise the fields: tensors without a graph, tuples of ints, RGB images, JSON values."""
    names, images = explanation.class_names, explanation.images
    try:
        return {
            "scores": {_spelling(method): scores.detach() for method, scores in explanation.scores.items()},
            "signed": {method: bool(signed) for method, signed in explanation.signed.items()},
            "target": explanation.target.detach(),
            "logits": explanation.logits.detach(),
            "targets": tuple(explanation.targets),
            "target_values": None if explanation.target_values is None else explanation.target_values.detach(),
            "grid": _size(explanation.grid),
            "image_size": _size(explanation.image_size),
            "class_names": None if names is None else tuple(names),
            "images": None if images is None else tuple(_rgb(image) for image in images),
            "images_note": None if explanation.images_note is None else str(explanation.images_note),
            "left_out": {_spelling(method): str(reason) for method, reason in explanation.left_out.items()},
            "provenance": json.loads(json.dumps(dict(explanation.provenance), allow_nan=False)),
        }
    except Exception as error:  # forged values can raise any exception
        raise ExplanationError(f"a part of the explanation is not valid: {error_message(error)}") from error


def _size(size: tuple[int, ...]) -> tuple[int, ...]:
    lengths = tuple(operator.index(length) for length in size)
    if len(lengths) not in (2, 3) or min(lengths) < 1:
        raise ValueError(f"{size} is not a size")
    return lengths


def _spelling(method: str) -> str:
    if not isinstance(method, str):
        raise TypeError(f"a method is named by a text, not by {method!r}")
    return method


def _rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def check_scores(explanation: Explanation) -> None:
    """Raise unless every method has scores for every target and patch, and a sign."""
    if len(explanation.grid) != len(explanation.image_size):
        raise ExplanationError(f"a grid of {explanation.grid} patches does not fit a size of {explanation.image_size}")
    if not explanation.scores:
        raise ExplanationError("an explanation needs the scores of at least one method")
    if set(explanation.signed) != set(explanation.scores):
        raise ExplanationError("signed must have exactly the methods that scores has")
    for method, scores in explanation.scores.items():
        if not scores.ndim:
            raise ExplanationError(f"the scores of {method!r} must be those of patches, not one number")
        expected = (*explanation.target.shape, math.prod(explanation.grid_of(method)))
        if tuple(scores.shape) != expected or not scores.is_floating_point():
            raise ExplanationError(
                f"the scores of {method!r} must be floating {expected}, not {scores.dtype} {tuple(scores.shape)}"
            )


def check_images(explanation: Explanation) -> None:
    """Raise unless there is one displayed image per image."""
    images = explanation.images
    if images is not None and len(images) != len(explanation):
        raise ExplanationError(f"images must hold one image for each of the {len(explanation)} explained ones")
