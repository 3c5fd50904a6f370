"""What has been found out about one photo with one model, so that nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitreous.explanation import Explanation
from vitreous.pictures.captions import percent
from vitreous.pictures.data.curves import Curves
from vitreous.web.photo import Photo
from vitreous.web.rows import BlockRows


@dataclass
class Record:
    """A photo, what the model says of it, and every map, row and curve of it so far.

    Attributes:
        photo: The photo.
        depth: How many blocks the model has.
        sample: The first explanation that was made: logits, grid, names and versions are the same for all maps.
        scores: Raw scores (patches,) by method and class.
        signed: Whether the sign of a method's scores means something.
        failed: Why a method cannot explain this model or photo.
        rows: What patches draw on, by block.
        curves: Deletion and insertion, by method and class.
        by: Whether curves go by patches or by pixels.
    """

    photo: Photo
    depth: int
    sample: Explanation | None = None
    scores: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    signed: dict[str, bool] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rows: dict[int, BlockRows] = field(default_factory=dict)
    curves: dict[tuple[str, int], Curves] = field(default_factory=dict)
    by: str = "patches"

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        maps = sum(scores.nbytes for scores in list(self.scores.values()))
        logits = 0 if self.sample is None else self.sample.logits.nbytes
        return self.photo.nbytes + maps + logits + sum(rows.nbytes for rows in list(self.rows.values()))

    @property
    def predicted(self) -> int:
        """The class that the model finds most likely."""
        assert self.sample is not None
        return int(self.sample.logits[0].argmax())

    def caption(self, class_index: int) -> str:
        """Name a class and tell how likely the model finds it."""
        assert self.sample is not None
        names = self.sample.class_names
        name = f"class {class_index}" if names is None else names[class_index].replace("_", " ")
        return f"{name} · {percent(float(self.sample.probabilities[0, class_index]))}"

    def missing(self, methods: Iterable[str], classes: Iterable[int]) -> list[str]:
        """Give the methods that have not been asked about all of the classes."""
        wanted = list(classes)
        return [
            method
            for method in dict.fromkeys(methods)
            if method not in self.failed and any((method, one) not in self.scores for one in wanted)
        ]

    def keep(self, explanation: Explanation) -> None:
        """Take over the maps of an explanation of this photo."""
        if self.sample is None:
            # A copy of the few numbers needed: a view would keep the whole run's memory alive.
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu(), images=(self.photo.seen,))
        for method in explanation.methods:
            self.signed[method] = explanation.signed[method]
            for number in range(explanation.classes_per_image):
                scores = explanation.scores_of(method, 0, number).clone().cpu()
                self.scores[method, explanation.class_index(0, number)] = scores

    def explanation(self, methods: Sequence[str], classes: Sequence[int]) -> Explanation:
        """Put maps that are there together as one explanation."""
        assert self.sample is not None
        provenance: Mapping[str, Any] = {**self.sample.provenance, "methods": list(methods)}
        scores = {method: torch.stack([self.scores[method, one] for one in classes])[None] for method in methods}
        return replace(
            self.sample,
            scores=scores,
            signed={method: self.signed[method] for method in methods},
            target=torch.tensor([list(classes)]),
            provenance=provenance,
        )
