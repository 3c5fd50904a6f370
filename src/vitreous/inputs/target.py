"""Targets in general: the base class, the context a target gets from a run, checked scores, and how targets are stored.

Class names are resolved here: numbers and names in any nesting, as callers give them, to indices of a model's outputs.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vitreous._utils.messages import errors_as, short_repr
from vitreous._utils.torch_state import special_kind
from vitreous.errors import TargetError
from vitreous.inputs.model_io import OutputActivation

_SUGGESTED = 3  # so many names are suggested at most


def class_indices(target: Any, class_names: Callable[[], Sequence[str] | None]) -> Any:
    """Replace every class name in ``target`` by its number; anything else stays as it is.

    Args:
        target: ``None``, a class, or classes nested as deep as the caller likes; tensors hold numbers only.
        class_names: gives the name of every class in index order, or ``None`` where they are not known. Called only
            where ``target`` holds a name.

    Raises:
        TargetError: a name is not known, or is that of several classes.
    """
    if isinstance(target, np.ndarray) and target.dtype.kind in "UO":
        target = target.tolist()
    if isinstance(target, str):
        return find_class(target, class_names())
    if isinstance(target, list | tuple) and _holds_names(target):
        names = class_names()
        return [class_indices(each, lambda: names) for each in target]
    return target


def _holds_names(target: Iterable[Any]) -> bool:
    return any(isinstance(each, str) or (isinstance(each, list | tuple) and _holds_names(each)) for each in target)


def find_class(text: str, class_names: Sequence[str] | None) -> int:
    """Give the number of a class that is written as a number or as a name.

    Upper and lower case are the same, and so are underscores, hyphens and spaces; of a name such as ``tabby, tabby
    cat`` every part is a name as well.

    Raises:
        TargetError: there is no such class, or several have that name.
    """
    if re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
        return int(text)
    if not class_names:
        raise TargetError(
            f"{text!r} is not a class number, and the names of this model's classes are not known: give the number"
        )
    wanted = _normal(text)
    whole = [number for number, name in enumerate(class_names) if _normal(name) == wanted]
    found = whole or [number for number, name in enumerate(class_names) if wanted in map(_normal, _synonyms(name))]
    if not found:
        raise TargetError(f"there is no class {text!r}; {_suggest(wanted, class_names)}")
    if len(found) > 1:
        numbers = " and ".join(map(str, found))
        raise TargetError(f"several classes are called {text!r}: {numbers}; give the number")
    return found[0]


def _normal(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", name.casefold().strip(" _-")))


def _synonyms(name: str) -> list[str]:
    return [part.strip() for part in name.split(",")]


def _suggest(wanted: str, class_names: Sequence[str]) -> str:
    """Name the classes that contain the words that were typed; where none does, those that are spelled most alike."""
    names = {_normal(synonym): synonym for name in reversed(class_names) for synonym in reversed(_synonyms(name))}
    names = dict(reversed(names.items()))  # in the model's order, and of equal ones the first
    words = set(wanted.split())
    found = [name for name in names if words and words <= set(name.split())]
    found = found or [name for name in names if len(wanted) >= 3 and wanted in name]
    found = found or get_close_matches(wanted, names)
    if not found:
        return f"the model has {len(class_names)} classes, such as {class_names[0]!r}"
    suggested = " or ".join(repr(names[name]) for name in found[:_SUGGESTED])
    more = f" ({len(found) - _SUGGESTED} more contain it)" if len(found) > _SUGGESTED else ""
    return f"did you mean {suggested}?{more}"


ClassNames = Sequence[str] | None

PREDICTED = "predicted"  # in a spelling, the most likely class
_STORED: dict[str, type[Target]] = {}


@dataclass(frozen=True)
class TargetContext:
    """What a target may look at once, before the images are run.

    Attributes:
        model: the ``LoadedModel`` or ``nn.Module`` that the caller gave.
        network: the network that is run, in evaluation mode.
        images: its input, (batch, 3, height, width).
        class_names: gives the name of every class, or ``None``.
        encode: the network's output for another picture (a path, a PIL image, an array or a tensor), without a graph.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Output, Target
        >>> class ToTheFirst(Target):
        ...     def prepare(self, context):
        ...         first = context.encode(context.images[:1])
        ...         return Output(lambda output: (output - first).norm(dim=1), "distance to the first image")
        ...     def score(self, output):
        ...         raise NotImplementedError
        >>> vitreous.explain(model, ["other.jpg", "demo.jpg"], "ixg", target=ToTheFirst()).label(1)
        'distance to the first image'
    """

    model: Any
    network: nn.Module
    images: Tensor
    class_names: Callable[[], ClassNames]
    encode: Callable[[Any], Any]

    def class_number(self, given: int | str) -> int:
        """The number of a class that is given by number or name.

        Raises:
            TargetError: there is no such class.
        """
        if isinstance(given, str):
            return find_class(given, self.class_names())
        return whole_number(given, "a class")


@dataclass(frozen=True)
class OriginalRun:
    """What the model gave for the images themselves: for targets that depend on what it predicts.

    Attributes:
        output: its output, as ``Target.score`` gets it.
        logits: the class scores in it, (batch, classes), without a graph; ``None`` where it has none.
        scale: what the class scores are; ``None`` for logits.
        image_size: height and width of the model's input.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Contrast, Target
        >>> class AgainstTheWorst(Target):
        ...     def resolve(self, original, image):
        ...         return Contrast(int(original.logits[image].argmax()), int(original.logits[image].argmin()))
        ...     def score(self, output):
        ...         raise NotImplementedError
        >>> vitreous.explain(model, "demo.jpg", "ixg", target=AgainstTheWorst()).value(1000) > 0
        True
    """

    output: Any
    logits: Tensor | None
    scale: OutputActivation | None
    image_size: tuple[int, int]

    def class_logits(self, target: Target, image: int) -> Tensor:
        """The class scores of an image, (classes,).

        Raises:
            TargetError: the model has none.
        """
        if self.logits is None:
            raise TargetError(f"{target} needs class scores (batch, classes), which this model's output does not have")
        return self.logits[image]


class Target(ABC):
    """What is explained: one number per image. Subclasses define ``score``; the rest has defaults.

    Examples:
        >>> import torch
        >>> import vitreous
        >>> from vitreous.targets import Target
        >>> class Entropy(Target):
        ...     def score(self, output):
        ...         return torch.distributions.Categorical(logits=output).entropy()
        >>> explanation = vitreous.explain(model, "demo.jpg", "gae", target=Entropy())
        >>> explanation.label()
        'Entropy'
    """

    reads_classes: ClassVar[bool] = False  # whether ``score`` reads the class scores and nothing else of the output

    @abstractmethod
    def score(self, output: Any) -> Tensor:
        """One number per image, (batch,), from what the model returns (or from the part that ``output=`` names).

        It has to be differentiable for methods that take gradients. A batch may be any images, in any order: the rows
        of an output say nothing about which of the explained images they belong to.
        """

    def prepare(self, context: TargetContext) -> Target:
        """The target with what it needs of the model: called once, before the images are run."""
        del context
        return self

    def module(self, network: nn.Module) -> nn.Module:
        """The module that is run instead of the network, such as one tower of two; called before ``prepare``."""
        return network

    def resolve(self, original: OriginalRun, image: int) -> Target:
        """Return the target of one image, given the model's outputs: called once, after the first run."""
        del original, image
        return self

    def label(self, class_names: ClassNames = None) -> str:
        """What captions call it."""
        del class_names
        return str(self)

    def __str__(self) -> str:
        return type(self).__name__


def whole_number(given: Any, what: str) -> int:
    """An integer of any kind as int.

    Raises:
        TargetError: it is none.
    """
    if isinstance(given, bool | np.bool_) or not isinstance(given, int | np.integer):
        if isinstance(given, Tensor) and given.dim() == 0 and not (given.is_floating_point() or given.is_complex()):
            return int(given)
        raise TargetError(f"{what} must be a whole number or a name, not {short_repr(given)}")
    return int(given)


def check_class(number: int, classes: int) -> None:
    """Raise unless a class exists."""
    if not 0 <= number < classes:
        raise TargetError(f"class {number} is not between 0 and {classes - 1}, the classes of this model")


def class_label(number: int | str | None, names: ClassNames) -> str:
    """What captions call a class."""
    if number is None or isinstance(number, str):
        return PREDICTED if number is None else number
    return names[number].replace("_", " ") if names is not None and 0 <= number < len(names) else f"class {number}"


@dataclass(frozen=True)
class StoredTarget(Target):
    """What is left of a function, or of a target of one's own, in a saved folder: its description.

    Attributes:
        description: what the target was called.
    """

    description: str

    def score(self, output: Any) -> Tensor:
        """Refuse: a function is not stored."""
        del output
        raise TargetError(
            f"{self.description!r} was loaded from a folder, which stores what a function is called and not the "
            "function: give the target again"
        )

    def __str__(self) -> str:
        return self.description


def score_of(target: Target, output: Any, batch: int) -> Tensor:
    """The numbers of a target, (batch,), checked.

    Raises:
        TargetError: the target's function fails, or returns something else.
    """
    with errors_as(TargetError, f"the target {target} fails on the model's output"):
        found = target.score(output)
    if not isinstance(found, Tensor) or tuple(found.shape) != (batch,):
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TargetError(
            f"the target {target} must return one number per image, a tensor of shape ({batch},), not {given}"
        )
    if found.is_complex() or special_kind(found) is not None:
        raise TargetError(f"the target {target} must return a plain tensor of real numbers, not {found.dtype}")
    if bool(found.isnan().any()):
        raise TargetError(f"the target {target} is NaN for some images")
    return found if found.is_floating_point() else found.to(torch.get_default_dtype())


def register_stored(kind: type[Target]) -> type[Target]:
    """Let a kind of target be saved and loaded: a dataclass whose fields are JSON values and tensors.

    Examples:
        >>> from dataclasses import dataclass
        >>> from vitreous.targets import Target, register_stored
        >>> @register_stored
        ... @dataclass(frozen=True)
        ... class Square(Target):
        ...     index: int
        ...     def score(self, output):
        ...         return output[:, self.index] ** 2
        >>> Square(3)
        Square(index=3)
    """
    _STORED[kind.__name__] = kind
    return kind


def store_target(target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A target as JSON values, and the tensors in it by field; a function by its description."""
    if _STORED.get(type(target).__name__) is not type(target):
        target = StoredTarget(str(target))
    values = {each.name: getattr(target, each.name) for each in dataclasses.fields(target)}  # type: ignore[arg-type]
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in values.items() if name not in tensors}
    return {"kind": type(target).__name__, "fields": plain, "tensors": sorted(tensors)}, tensors


def restore_target(stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Target:
    """The target that ``store_target`` described; of a kind that is not known, its description."""
    kind = _STORED.get(stored["kind"])
    if kind is None:
        return StoredTarget(str(stored["kind"]))
    return kind(**stored["fields"], **{name: tensors[name] for name in stored["tensors"]})


register_stored(StoredTarget)
