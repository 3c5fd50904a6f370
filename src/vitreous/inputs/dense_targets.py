"""Targets of outputs that have more than one row per image: tokens, pixels of a dense head, boxes of a detector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vitreous._utils.messages import short_repr
from vitreous._utils.torch_state import special_kind
from vitreous.errors import TargetError
from vitreous.inputs.model_io import described_output, named_part
from vitreous.inputs.target import (
    ClassNames,
    OriginalRun,
    Target,
    TargetContext,
    check_class,
    class_label,
    register_stored,
    whole_number,
)

_MAPS = ("logits", "out", "predicted_depth", "reconstruction")
_DEPTH = "predicted_depth"
_ROWS = ("logits", "pred_logits", "last_hidden_state")
_QUERIES = ("logits", "pred_logits")
_BOXES = ("pred_boxes", "boxes")


def _find(output: Any, names: tuple[str, ...], dims: tuple[int, ...], what: str) -> Tensor:
    """The tensor of so many dimensions in what a model returns: the first of these names, or the tensor itself."""
    given = output
    if not isinstance(given, Tensor):
        named = (named_part(output, name) for name in names)
        fitting = (value for value in named if isinstance(value, Tensor) and value.dim() in dims)
        first = output[0] if isinstance(output, tuple | list) and len(output) else output
        given = next(fitting, first)
    if not isinstance(given, Tensor) or given.dim() not in dims:
        raise TargetError(f"{what}, but the model returned {described_output(output)}")
    return given


def _prepared_class(index: Any, context: TargetContext) -> int | None:
    return None if index is None else context.class_number(index)


def _check_index(index: Any) -> None:
    if index is not None and not isinstance(index, str):
        whole_number(index, "a class")


@dataclass(frozen=True)
class Token(Target):
    """One token of an output that has a row for every token, (batch, tokens, classes or channels).

    Attributes:
        token: which token, from 0; below 0, from the end.
        index: the class (or channel) of its row, by number or name. ``None`` for the predicted one where the output has
            ``logits``, and for the length of the row where it holds embeddings (``last_hidden_state``, or a tensor).

    Examples:
        >>> from vitreous.targets import Token
        >>> str(Token(5, 3))
        'token 5: 3'
    """

    token: int
    index: int | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", whole_number(self.token, "a token"))
        _check_index(self.index)

    def prepare(self, context: TargetContext) -> Self:
        """The same with the number of a class that was named."""
        return replace(self, index=_prepared_class(self.index, context))

    def resolve(self, original: OriginalRun, image: int) -> Self:
        """The predicted class of the token, where logits are there and none is given."""
        rows = self._rows(original.output)
        if self.index is not None:
            check_class(int(self.index), rows.shape[2])
        elif any(isinstance(named_part(original.output, name), Tensor) for name in _QUERIES):
            return replace(self, index=int(rows[image, self.token].argmax()))
        return self

    def _rows(self, output: Any) -> Tensor:
        rows = _find(output, _ROWS, (3,), f"{self} needs an output of shape (batch, tokens, channels)")
        if not -rows.shape[1] <= self.token < rows.shape[1]:
            raise TargetError(f"token {self.token} does not exist: the output has {rows.shape[1]} tokens")
        return rows

    def score(self, output: Any) -> Tensor:
        """The entry of the class, or the length of the row."""
        row = self._rows(output)[:, self.token]
        if self.index is None:
            length: Tensor = torch.linalg.vector_norm(row, dim=1)
            return length
        check_class(int(self.index), row.shape[1])
        return row[:, int(self.index)]

    def label(self, class_names: ClassNames = None) -> str:
        """``token 5: cat``."""
        return f"token {self.token}" + ("" if self.index is None else f": {class_label(self.index, class_names)}")

    def __str__(self) -> str:
        return f"token {self.token}" + ("" if self.index is None else f": {self.index}")


@dataclass(frozen=True, eq=False)
class Pixels(Target):
    """A class over some pixels of a dense output (batch, classes, height, width): the sum of its logits inside a mask.

    Attributes:
        mask: the pixels, (height, width) of the output or of the model's input, which is then brought to the size of
            the output by nearest neighbour: booleans, or weights.
        index: the class, by number or name; ``None`` for the one whose logits in the mask have the largest sum. An
            output (batch, height, width), such as depth, has one class.

    Examples:
        >>> import torch
        >>> from vitreous.targets import Pixels
        >>> mask = torch.zeros(32, 32, dtype=torch.bool)
        >>> mask[8:24, 8:24] = True
        >>> Pixels(mask, 3).label(("wall", "floor", "tree", "cat"))
        'cat in 256 pixels'
    """

    mask: Any
    index: int | str | None = None

    def __post_init__(self) -> None:
        _check_index(self.index)
        mask = torch.from_numpy(self.mask) if isinstance(self.mask, np.ndarray) else self.mask
        if not isinstance(mask, Tensor) or mask.dim() != 2 or special_kind(mask) is not None or mask.is_complex():
            given = tuple(mask.shape) if isinstance(mask, Tensor) else short_repr(self.mask)
            raise TargetError(f"a mask is a tensor or array (height, width), not {given}")
        if mask.is_floating_point() and not bool(mask.isfinite().all()):
            raise TargetError("the mask holds NaN or infinite numbers")
        if not bool(mask.any()):
            raise TargetError("the mask is empty: it selects no pixel")
        object.__setattr__(self, "mask", mask)

    def prepare(self, context: TargetContext) -> Self:
        """The same with the number of a class that was named."""
        return replace(self, index=_prepared_class(self.index, context))

    def resolve(self, original: OriginalRun, image: int) -> Self:
        """The mask in the size of the output, and the class that is most likely in it."""
        maps = self._maps(original.output)
        size = (maps.shape[2], maps.shape[3])
        mask = self.mask
        if tuple(mask.shape) != size:
            if tuple(mask.shape) != original.image_size:
                given, wanted = (" x ".join(map(str, shape)) for shape in (mask.shape, size))
                of_image = " x ".join(map(str, original.image_size))
                raise TargetError(
                    f"the mask is {given} pixels, and has to be {wanted} as the model's output, or {of_image} as its "
                    "input"
                )
            resized = torch.nn.functional.interpolate(mask[None, None].double(), size, mode="nearest-exact")
            mask = resized[0, 0].to(mask.dtype)
            if not bool(mask.any()):
                raise TargetError(f"the mask is empty in the {size[0]} x {size[1]} pixels of the model's output")
        found = replace(self, mask=mask)
        if self.index is not None:
            check_class(int(self.index), maps.shape[1])
            return found
        sums = (maps[image] * mask.to(maps)).sum(dim=(1, 2))
        return replace(found, index=int(sums.argmax()))

    def _maps(self, output: Any) -> Tensor:
        what = f"{self} needs a dense output of shape (batch, classes, height, width)"
        depth = named_part(output, _DEPTH) if not isinstance(output, Tensor) else output
        if isinstance(depth, Tensor) and depth.dim() == 3:
            return depth[:, None]
        return _find(output, _MAPS, (4,), what)

    def score(self, output: Any) -> Tensor:
        """The sum of the class's logits in the mask."""
        maps = self._maps(output)
        if not isinstance(self.index, int):
            raise TargetError(f"which class {self} means shows only in a run: explain() finds it")
        check_class(self.index, maps.shape[1])
        if maps.shape[2:] != self.mask.shape:
            raise TargetError(f"the mask is {tuple(self.mask.shape)}, and the model's output {tuple(maps.shape[2:])}")
        total: Tensor = (maps[:, self.index] * self.mask.to(maps)).sum(dim=(1, 2))
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pixels) and self.index == other.index and torch.equal(self.mask, other.mask)

    def __hash__(self) -> int:
        return hash((self.index, self.mask.shape, self.mask.dtype))

    def label(self, class_names: ClassNames = None) -> str:
        """``cat in 256 pixels``."""
        count = int((self.mask != 0).sum())
        return f"{class_label(self.index, class_names)} in {count} pixel{'' if count == 1 else 's'}"

    def __str__(self) -> str:
        return f"pixels({int((self.mask != 0).sum())}, {'predicted' if self.index is None else self.index})"


@dataclass(frozen=True)
class Query(Target):
    """A class of one query of a detector, (batch, queries, classes): YOLOS, DETR and their like.

    Attributes:
        query: which query, from 0.
        index: the class, by number or name; ``None`` for the query's most likely one. The last class, which means that
            there is no object, is left out then.

    Examples:
        >>> from vitreous.targets import Query
        >>> Query(7, 1).label(("person", "cat"))
        'query 7: cat'
    """

    query: int
    index: int | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "query", whole_number(self.query, "a query"))
        _check_index(self.index)

    def prepare(self, context: TargetContext) -> Self:
        """The same with the number of a class that was named."""
        return replace(self, index=_prepared_class(self.index, context))

    def resolve(self, original: OriginalRun, image: int) -> Self:
        """The class that the query most likely shows, where none is given."""
        rows = self._rows(original.output)
        if self.index is None:
            return replace(self, index=_most_likely_object(rows[image, self.query]))
        check_class(int(self.index), rows.shape[2])
        return self

    def _rows(self, output: Any) -> Tensor:
        rows = _queries(output, self)
        if not 0 <= self.query < rows.shape[1]:
            raise TargetError(f"query {self.query} is not between 0 and {rows.shape[1] - 1}, the queries of this model")
        return rows

    def score(self, output: Any) -> Tensor:
        """The logit of the class."""
        row = self._rows(output)[:, self.query]
        if not isinstance(self.index, int):
            raise TargetError(f"which class {self} means shows only in a run: explain() finds it")
        check_class(self.index, row.shape[1])
        return row[:, self.index]

    def label(self, class_names: ClassNames = None) -> str:
        """``query 7: cat``."""
        return f"query {self.query}" + ("" if self.index is None else f": {class_label(self.index, class_names)}")

    def __str__(self) -> str:
        return f"query {self.query}" + ("" if self.index is None else f": {self.index}")


@dataclass(frozen=True)
class Box(Target):
    """The query of a detector whose box overlaps a given one most (intersection over union), and a class of it.

    Attributes:
        left: the box in fractions of the image's width and height, from 0 to 1.
        top: see ``left``.
        right: see ``left``.
        bottom: see ``left``.
        index: the class; ``None`` for the query's most likely one.

    Examples:
        >>> from vitreous.targets import Box
        >>> str(Box(0.1, 0.2, 0.5, 0.9))
        'box(0.1, 0.2, 0.5, 0.9)'
    """

    left: float
    top: float
    right: float
    bottom: float
    index: int | str | None = None

    def __post_init__(self) -> None:
        _check_index(self.index)
        if not (0 <= self.left < self.right <= 1 and 0 <= self.top < self.bottom <= 1):
            raise TargetError(
                "a box is left, top, right and bottom in fractions of the image, from 0 to 1, left < right and "
                f"top < bottom, not {self._corners}"
            )

    @property
    def _corners(self) -> tuple[float, float, float, float]:
        return self.left, self.top, self.right, self.bottom

    def prepare(self, context: TargetContext) -> Self:
        """The same with the number of a class that was named."""
        return replace(self, index=_prepared_class(self.index, context))

    def resolve(self, original: OriginalRun, image: int) -> Target:
        """The query of an image whose box is nearest."""
        _queries(original.output, self)
        boxes = _find(original.output, _BOXES, (3,), f"{self} needs boxes (batch, queries, 4) in the output")
        overlap = _overlaps(boxes[image].detach().double(), self._corners)
        if not bool((overlap > 0).any()):
            raise TargetError(f"no predicted box of image {image} overlaps {self}")
        return Query(int(overlap.argmax()), self.index).resolve(original, image)

    def score(self, output: Any) -> Tensor:
        """Refuse: which query is meant shows in a run."""
        del output
        raise TargetError(f"which query {self} means shows only in a run: explain() finds it")

    def __str__(self) -> str:
        return f"box({', '.join(f'{side:g}' for side in self._corners)})"


def _queries(output: Any, target: Target) -> Tensor:
    return _find(output, _QUERIES, (3,), f"{target} needs an output of shape (batch, queries, classes)")


def _most_likely_object(logits: Tensor) -> int:
    """The most likely class (classes,) besides the last, "no object", where there are several."""
    return int(logits[:-1].argmax()) if len(logits) > 1 else 0


def _overlaps(boxes: Tensor, corners: tuple[float, float, float, float]) -> Tensor:
    """Intersection over union of boxes (boxes, 4), given by centre and size, with one given by its corners."""
    left, top, right, bottom = corners
    centre, size = boxes[:, :2], boxes[:, 2:].clamp(min=0)
    low, high = centre - size / 2, centre + size / 2
    wide = (high[:, 0].clamp(max=right) - low[:, 0].clamp(min=left)).clamp(min=0)
    tall = (high[:, 1].clamp(max=bottom) - low[:, 1].clamp(min=top)).clamp(min=0)
    common = wide * tall
    return common / (size.prod(dim=1) + (right - left) * (bottom - top) - common).clamp(min=1e-12)


for _kind in (Token, Pixels, Query, Box):
    register_stored(_kind)
