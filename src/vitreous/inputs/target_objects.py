"""What is explained, as objects: a target maps the output of a model to one number per image.

``Class`` is the target of a class index. The others are any number that the output gives: a difference of two
classes, a similarity, a function. Every method explains that number by the same passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from vitreous._utils.messages import short_repr
from vitreous._utils.torch_state import at_least_float32, special_kind
from vitreous.errors import TargetError
from vitreous.inputs.model_io import OutputActivation, class_scores, embeddings, likelihood_slope, likelihoods
from vitreous.inputs.target import (
    PREDICTED,
    ClassNames,
    OriginalRun,
    Target,
    TargetContext,
    check_class,
    class_label,
    find_class,
    register_stored,
    whole_number,
)

NEXT = "next"  # in a spelling, the most likely class besides the other one
_AGAINST = " vs "


def _spelled(number: int | str | None) -> str:
    return PREDICTED if number is None else str(number)


@dataclass(frozen=True)
class _OfClass(Target):
    """A target that is about one class; ``None`` for the predicted one.

    Attributes:
        index: the class, by number, or by name where the model's class names are known.
    """

    reads_classes: ClassVar[bool] = True

    index: int | str | None = None

    def __post_init__(self) -> None:
        _check_given(self.index)

    def prepare(self, context: TargetContext) -> Self:
        """The same with the number of a class that was named."""
        return self if self.index is None else replace(self, index=context.class_number(self.index))

    def resolve(self, original: OriginalRun, image: int) -> Self:
        """The predicted class of an image where none is given; otherwise the class, if it exists."""
        logits = original.class_logits(self, image)
        if self.index is None:
            return replace(self, index=int(logits.argmax()))
        check_class(self._number, len(logits))
        return self

    @property
    def _number(self) -> int:
        if not isinstance(self.index, int):
            raise TargetError(f"which class {self} means shows only in a run: explain() finds it")
        return self.index

    def _logit(self, output: Any) -> Tensor:
        scores = class_scores(output)
        check_class(self._number, scores.shape[1])
        return scores[:, self._number]


def _check_given(index: Any) -> None:
    if index is not None and not isinstance(index, str):
        whole_number(index, "a class")


class Class(_OfClass):
    """A class, as a number or a name given to ``explain`` means it: every method explains the quantity of its paper.

    That is the logit for most methods and the probability for some (TokenTM). ``Logit`` and ``Probability`` say which.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Class
        >>> vitreous.explain(model, "demo.jpg", "gae", target=Class(3)).target.tolist()
        [3]
    """

    def score(self, output: Any) -> Tensor:
        """The class's logit."""
        return self._logit(output)

    def label(self, class_names: ClassNames = None) -> str:
        """The class's name."""
        return class_label(self.index, class_names)

    def __str__(self) -> str:
        return _spelled(self.index)


class Logit(_OfClass):
    """The logit of a class, for all methods.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Logit
        >>> vitreous.explain(model, "demo.jpg", "tokentm", target=Logit(3)).label()
        'logit of class 3'
    """

    def score(self, output: Any) -> Tensor:
        """The class's logit."""
        return self._logit(output)

    def label(self, class_names: ClassNames = None) -> str:
        """``logit of`` the class's name."""
        return f"logit of {class_label(self.index, class_names)}"

    def __str__(self) -> str:
        return f"logit({_spelled(self.index)})"


@dataclass(frozen=True)
class Probability(_OfClass):
    """The probability of a class, for all methods: softmax of the logits, or what the model's outputs say.

    Attributes:
        index: the class, by number or name; ``None`` for the predicted one.
        scale: what the model's outputs are, see ``vitreous.inputs.model_io``; found by itself where it is ``None``.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Probability
        >>> vitreous.explain(model, "demo.jpg", "ixg", target=Probability(3)).label()
        'probability of class 3'
    """

    scale: OutputActivation | None = None

    def resolve(self, original: OriginalRun, image: int) -> Probability:
        """The class of an image, and what the outputs are."""
        if original.scale == "value":
            raise TargetError(f"{self} has no meaning: the outputs of this model are values, which have no probability")
        return replace(super().resolve(original, image), scale=self.scale or original.scale)

    def score(self, output: Any) -> Tensor:
        """The class's probability."""
        scores = at_least_float32(class_scores(output))
        check_class(self._number, scores.shape[1])
        probability: Tensor = _Likelihood.apply(scores, self._number, self.scale)
        return probability

    def label(self, class_names: ClassNames = None) -> str:
        """``probability of`` the class's name."""
        return f"probability of {class_label(self.index, class_names)}"

    def __str__(self) -> str:
        return f"probability({_spelled(self.index)})"


class _Likelihood(torch.autograd.Function):
    """A probability whose gradient keeps its digits where it is nearly 1, see ``likelihood_slope``."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, number: int, scale: OutputActivation | None) -> Tensor:
        chosen = torch.full((len(logits),), number, device=logits.device)
        ctx.save_for_backward(likelihood_slope(logits.detach(), chosen, scale))
        return likelihoods(logits, scale)[:, number].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradient[:, None] * slope, None, None


@dataclass(frozen=True)
class Contrast(Target):
    """Why one class rather than another: y_c - weight y_d (Zhang et al., Finer-CAM, CVPR 2025).

    Attributes:
        index: the class c, by number or name; ``None`` for the predicted one.
        other: the class d; ``None`` for the most likely one besides c.
        weight: how much of y_d is subtracted.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Contrast
        >>> explanation = vitreous.explain(model, "demo.jpg", "decompx", target=Contrast(3, 1))
        >>> explanation.label()
        'class 3 rather than class 1'
    """

    reads_classes: ClassVar[bool] = True

    index: int | str | None = None
    other: int | str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_given(self.index)
        _check_given(self.other)
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise TargetError(f"the weight of a contrast must be a finite number, not {short_repr(self.weight)}")
        if self.index is not None and self.index == self.other:
            raise TargetError(f"a contrast needs two classes, not {self.index} twice")

    def prepare(self, context: TargetContext) -> Contrast:
        """The same with the numbers of classes that were named."""
        index = None if self.index is None else context.class_number(self.index)
        other = None if self.other is None else context.class_number(self.other)
        return replace(self, index=index, other=other)

    def resolve(self, original: OriginalRun, image: int) -> Contrast:
        """The predicted class of an image, and the most likely one besides it, where they are not given."""
        logits = original.class_logits(self, image)
        if len(logits) < 2:
            raise TargetError(f"{self} needs two classes, and this model has one output")
        for number in (self.index, self.other):
            if isinstance(number, int):
                check_class(number, len(logits))
        first, second = logits.topk(2).indices.tolist()
        index = first if self.index is None else self.index
        if self.other is not None:
            if index == self.other:
                raise TargetError(f"a contrast needs two classes, and the predicted one is {index} itself")
            return replace(self, index=index)
        return replace(self, index=index, other=second if index == first else first)

    def score(self, output: Any) -> Tensor:
        """y_c - weight y_d."""
        scores = class_scores(output)
        if not isinstance(self.index, int) or not isinstance(self.other, int):
            raise TargetError(f"which classes {self} means shows only in a run: explain() finds them")
        for number in (self.index, self.other):
            check_class(number, scores.shape[1])
        return scores[:, self.index] - self.weight * scores[:, self.other]

    def label(self, class_names: ClassNames = None) -> str:
        """``A rather than B``."""
        other = NEXT if self.other is None else class_label(self.other, class_names)
        times = "" if self.weight == 1 else f"{self.weight:g} x "
        return f"{class_label(self.index, class_names)} rather than {times}{other}"

    def __str__(self) -> str:
        other = NEXT if self.other is None else self.other
        times = "" if self.weight == 1 else f"{self.weight:g} x "
        return f"{_spelled(self.index)}{_AGAINST}{times}{other}"


@dataclass(frozen=True, eq=False)
class Similarity(Target):
    """The cosine similarity of the model's embedding to another one: why are these two images similar?

    The embedding is the model's output (batch, channels): of transformers' models ``image_embeds`` or
    ``pooler_output``, otherwise the mean over the last tokens. ``output=`` of ``explain`` names another part.

    Attributes:
        reference: a picture (path, PIL image, uint8 array, or a tensor (3, height, width) that is preprocessed), which
            the same model embeds; or an embedding (channels,).
        name: what captions call the reference.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Similarity
        >>> explanation = vitreous.explain(model, "demo.jpg", "ixg", target=Similarity("other.jpg"))
        >>> explanation.label()
        'similarity to other.jpg'
    """

    reference: Any
    name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.reference, np.ndarray) and self.reference.dtype.kind == "f":
            object.__setattr__(self, "reference", torch.from_numpy(self.reference))
        given = self.reference
        if isinstance(given, Tensor):
            if special_kind(given) is not None or not given.is_floating_point() or given.dim() not in {1, 3}:
                raise TargetError(
                    "a reference is an embedding (channels,) or an image (3, height, width) in floating point, not "
                    f"{given.dtype} {tuple(given.shape)}"
                )
            if not bool(given.isfinite().all()):
                raise TargetError("the reference holds NaN or infinite numbers")
            if given.dim() == 1 and not bool(given.any()):
                raise TargetError("the reference is 0 in all channels, so that it has no direction to compare with")

    @property
    def is_embedding(self) -> bool:
        """Whether the reference is an embedding already."""
        return isinstance(self.reference, Tensor) and self.reference.dim() == 1

    def prepare(self, context: TargetContext) -> Similarity:
        """The same with the embedding of an image."""
        if self.is_embedding:
            return self
        name = self.name or (str(self.reference) if isinstance(self.reference, str) else None)
        picture = self.reference[None] if isinstance(self.reference, Tensor) else self.reference
        return replace(self, reference=embeddings(context.encode(picture))[0], name=name)

    def score(self, output: Any) -> Tensor:
        """cos(embedding, reference)."""
        found = at_least_float32(embeddings(output))
        if not self.is_embedding:
            raise TargetError("the reference image is not embedded yet: explain() does that")
        if self.reference.shape[0] != found.shape[1]:
            raise TargetError(
                f"the reference has {self.reference.shape[0]} channels, and the embedding of this model "
                f"{found.shape[1]}"
            )
        reference = self.reference.to(found)
        return torch.nn.functional.cosine_similarity(found, reference.expand_as(found), dim=1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Similarity) or self.name != other.name:
            return False
        tensors = isinstance(self.reference, Tensor), isinstance(other.reference, Tensor)
        return torch.equal(self.reference, other.reference) if all(tensors) else self.reference is other.reference

    def __hash__(self) -> int:
        return hash((self.name, self.reference.shape if isinstance(self.reference, Tensor) else id(self.reference)))

    def label(self, class_names: ClassNames = None) -> str:
        """``similarity to`` the reference."""
        del class_names
        return f"similarity to {self.name or 'a reference'}"

    def __str__(self) -> str:
        return f"similarity({self.name or 'embedding'})"


@dataclass(frozen=True, eq=False)
class Output(Target):
    """Any function from the model's output to one number per image, (batch,).

    Attributes:
        function: takes what the model returns, or the part of it that ``output=`` names.
        name: what captions and provenance call it; the function's own name where it is ``None``.

    Examples:
        >>> import vitreous
        >>> from vitreous.targets import Output
        >>> margin = Output(lambda logits: logits[:, 3] - logits.logsumexp(dim=1), "log-probability of class 3")
        >>> vitreous.explain(model, "demo.jpg", "ixg", target=margin).label()
        'log-probability of class 3'
    """

    function: Callable[[Any], Tensor]
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TargetError(f"Output takes a function of the model's output, not {short_repr(self.function)}")

    def score(self, output: Any) -> Tensor:
        """What the function returns."""
        return self.function(output)

    def __str__(self) -> str:
        return self.name or str(getattr(self.function, "__name__", type(self.function).__name__))


def parse_target(text: str, class_names: ClassNames) -> int | Target:
    """The target that a text spells: a class by number or name, ``A vs B``, ``A vs next`` or ``predicted vs next``.

    Raises:
        TargetError: a class is not known.
    """
    lowered = text.casefold()
    if _AGAINST not in lowered or (class_names and text in class_names):
        return find_class(text, class_names)
    at = lowered.index(_AGAINST)
    first, second = text[:at].strip(), text[at + len(_AGAINST) :].strip()
    if not first or not second or _AGAINST in second.casefold() or first.casefold() == NEXT:
        raise TargetError(f"a contrast is two classes, 'A vs B', 'A vs next' or 'predicted vs next', not {text!r}")
    index = None if first.casefold() == PREDICTED else find_class(first, class_names)
    other = None if second.casefold() == NEXT else find_class(second, class_names)
    return Contrast(index, other)


def parse_targets(target: Any, class_names: Callable[[], ClassNames]) -> Any:
    """Replace every text in ``target`` that spells a contrast by it; anything else stays as it is."""
    if isinstance(target, str):
        return parse_target(target, class_names()) if _AGAINST in target.casefold() else target
    if isinstance(target, list | tuple):
        return [parse_targets(each, class_names) for each in target]
    return target


for _kind in (Class, Logit, Probability, Contrast, Similarity):
    register_stored(_kind)
