"""What protocols read: how samples of one kind become a model's input, and how methods explain them.

All else is the same for photos and texts: which classes are asked for, what becomes of errors, and how rows are made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vitreous.evaluation.tasks.batch import Batch, Case

Maps = dict[Case, dict[int, Tensor]]


class Material(ABC):
    """Photos or texts for one model."""

    @abstractmethod
    def prepare(self, sample: Any) -> Any:
        """What the model takes of one sample.

        Raises:
            VitreousError: it cannot be used.
        """

    @abstractmethod
    def open(self, samples: Sequence[Any], prepared: Sequence[Any]) -> Batch[Any, Any]:
        """Ask the model about samples, and give what is known of them; there are no maps yet."""

    @abstractmethod
    def maps(
        self, batch: Batch[Any, Any], images: Sequence[int], targets: Sequence[Sequence[int]], methods: Sequence[str]
    ) -> Maps:
        """Explain some samples of a batch, each for equally many classes, in one run for all methods."""
