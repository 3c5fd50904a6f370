"""What has been found out about one photo with one model, so that nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vitreous.explanation import Explanation
from vitreous.pictures.curves import Curves
from vitreous.web.findings import Findings
from vitreous.web.photo import Photo
from vitreous.web.rows import BlockRows


@dataclass
class Record(Findings[Explanation]):
    """A photo, what the model says of it, and every map, row and curve of it so far.

    Attributes:
        photo: The photo.
        depth: How many blocks the model has.
        rows: What patches draw on, by block.
        curves: Deletion and insertion, by method and class.
        by: Whether curves go by patches or by pixels.
    """

    photo: Photo
    depth: int
    rows: dict[int, BlockRows] = field(default_factory=dict)
    curves: dict[tuple[str, int], Curves] = field(default_factory=dict)
    by: str = "patches"

    @property
    def has_curves(self) -> bool:
        """Whether the model's outputs are probabilities, which curves follow, and not values."""
        return self.sample is None or self.sample.scale != "value"

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        maps = sum(scores.nbytes for scores in list(self.scores.values()))
        logits = 0 if self.sample is None else self.sample.logits.nbytes
        return self.photo.nbytes + maps + logits + sum(rows.nbytes for rows in list(self.rows.values()))

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
