"""Caches of results: everything computed for one photo or text with one model, and a store of bounded size for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Lock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from vitreous.explanation.explanation import Explanation
from vitreous.explanation.prediction import Predicted
from vitreous.pictures.curves import Curves
from vitreous.text.explanation import TextExplanation
from vitreous.web.photos import Photo

_BYTES_PER_TOKEN = 400  # a token and its word as Python objects


class Sized(Protocol):
    """An object that knows its size in memory; the size may grow."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""


Value = TypeVar("Value", bound=Sized)


class BoundedCache(Generic[Value]):
    """A thread-safe LRU cache bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Memory of all values in bytes."""
        with self._lock:
            return sum(value.nbytes for value in self._values.values())

    def get(self, key: Hashable) -> Value | None:
        """Return a value and mark it as recently used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value, or account for its growth, and evict others. A value above the limit is not stored."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            total = sum(each.nbytes for each in self._values.values())
            while total > self.limit and self._values:
                _, dropped = self._values.popitem(last=False)
                total -= dropped.nbytes


@lru_cache(maxsize=4)
def _choices(names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, number) for number, name in enumerate(names))


Made = TypeVar("Made", bound=Predicted)


@dataclass(kw_only=True)
class ResultCache(Generic[Made]):
    """The prediction for one input and the scores of every method and class computed so far.

    Attributes:
        sample: The first explanation; its logits, class names and versions hold for all scores.
        scores: Raw scores by method and class, of patches or tokens.
        signed: By method, whether the sign of its scores has a meaning.
        failed: By method, why it cannot explain this model or input.
    """

    sample: Made | None = None
    scores: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    signed: dict[str, bool] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def predicted(self) -> int:
        """The most probable class."""
        assert self.sample is not None
        return int(self.sample.logits[0].argmax())

    def caption(self, class_index: int) -> str:
        """Return the name of a class and its probability."""
        assert self.sample is not None
        return f"{self.class_names()[class_index]} · {self.sample.format_output(class_index)}"

    def class_names(self) -> list[str]:
        """Return readable names of all classes."""
        assert self.sample is not None
        names = self.sample.class_names or [f"class {number}" for number in range(self.sample.logits.shape[1])]
        return [name.replace("_", " ") for name in names]

    def class_choices(self) -> list[tuple[str, int]]:
        """Return names and indices of all classes. Sessions share the tuples, because Gradio stores them."""
        return list(_choices(tuple(self.class_names())))

    def missing(self, methods: Iterable[str], classes: Iterable[int]) -> list[str]:
        """Return the methods without scores for some of the classes, except those that failed."""
        wanted = list(classes)
        return [
            method
            for method in dict.fromkeys(methods)
            if method not in self.failed and any((method, one) not in self.scores for one in wanted)
        ]


@dataclass(frozen=True)
class BlockRows:
    """Attention between the patches of one block.

    Attributes:
        block: The block's index.
        grid: Rows and columns of patches.
        attention: Attention averaged over heads, (patches, patches); a row sums to less than 1 where class or register
            tokens are attended to.
        contribution: Norms of the vectors that attention writes (``attin``), (patches, patches); ``None`` where the
            attention output does not reach the residual stream through a linear projection.
    """

    block: int
    grid: tuple[int, int]
    attention: Tensor
    contribution: Tensor | None

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.attention.nbytes + (0 if self.contribution is None else self.contribution.nbytes)


@dataclass
class ImageResults(ResultCache[Explanation]):
    """Maps, attention rows and curves of one photo with one model.

    Attributes:
        photo: The photo.
        depth: The number of blocks of the model.
        rows: Attention rows by block.
        curves: Deletion and insertion curves by method and class.
        by: Whether curves remove patches or pixels.
    """

    photo: Photo
    depth: int
    rows: dict[int, BlockRows] = field(default_factory=dict)
    curves: dict[tuple[str, int], Curves] = field(default_factory=dict)
    by: str = "patches"

    @property
    def has_curves(self) -> bool:
        """Whether the outputs are probabilities; curves of regression values are not defined."""
        return self.sample is None or self.sample.scale != "value"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        maps = sum(scores.nbytes for scores in list(self.scores.values()))
        logits = 0 if self.sample is None else self.sample.logits.nbytes
        return self.photo.nbytes + maps + logits + sum(rows.nbytes for rows in list(self.rows.values()))

    def add(self, explanation: Explanation) -> None:
        """Store the maps of an explanation of this photo."""
        if self.sample is None:
            # Clone: a view would keep the memory of the whole run alive.
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu(), images=(self.photo.seen,))
        for method in explanation.methods:
            self.signed[method] = explanation.signed[method]
            for number in range(explanation.classes_per_image):
                scores = explanation.scores_of(method, 0, number).clone().cpu()
                self.scores[method, explanation.class_index(0, number)] = scores

    def explanation(self, methods: Sequence[str], classes: Sequence[int]) -> Explanation:
        """Combine stored maps into one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: torch.stack([self.scores[method, one] for one in classes])[None] for method in methods},
            signed={method: self.signed[method] for method in methods},
            target=torch.tensor([list(classes)]),
            provenance={**self.sample.provenance, "methods": list(methods)},
        )


@dataclass
class TextResults(ResultCache[TextExplanation]):
    """Token scores of one text with one model.

    Attributes:
        text: The text.
        tokens: The number of its tokens.
        used_tokens: How many of them the model reads; fewer where the text was truncated.
    """

    text: str
    tokens: int
    used_tokens: int

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        scores = sum(scores.nbytes for scores in list(self.scores.values()))
        return 4 * len(self.text) + _BYTES_PER_TOKEN * self.tokens + scores

    def add(self, explanation: TextExplanation) -> None:
        """Store the scores of an explanation of this text."""
        if self.sample is None:
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu())
        for method in explanation.methods:
            self.signed[method] = explanation.signed[method]
            for number in range(explanation.classes_per_image):
                scores = explanation.piece_scores(method, 0, number).clone().cpu()
                self.scores[method, explanation.class_index(0, number)] = scores

    def explanation(self, methods: Sequence[str], classes: Sequence[int]) -> TextExplanation:
        """Combine stored scores into one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: (torch.stack([self.scores[method, one] for one in classes]),) for method in methods},
            signed={method: self.signed[method] for method in methods},
            target=torch.tensor([list(classes)]),
            provenance={**self.sample.provenance, "methods": list(methods)},
        )
