"""A data set in random order, so that its first photos or texts are a fair sample of all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from vitreous.datasets.dataset import DataSet
from vitreous.datasets.sample import Review, Sample, Things


class Shuffled(DataSet):
    """The samples of another data set in an order that depends on ``seed`` alone, the same on every machine.

    Many sets list one class after the other: their first 100 photos say little about the rest.
    """

    def __init__(self, listed: DataSet, seed: int) -> None:
        self.path = listed.path  # it was opened there, be it a part of an archive that no folder lists
        self._listed, self._seed = listed, seed
        self._order = np.random.Generator(np.random.PCG64(seed)).permutation(len(listed))

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the set that is shuffled."""
        return self._listed.kind

    @property
    def summary(self) -> str:  # type: ignore[override]
        """What the set that is shuffled expects at its path."""
        return self._listed.summary

    @property
    def origin(self) -> str:  # type: ignore[override]
        """Where the set that is shuffled comes from."""
        return self._listed.origin

    @property
    def holds(self) -> Things:  # type: ignore[override]
        """What the set that is shuffled holds."""
        return self._listed.holds

    def __len__(self) -> int:
        return len(self._listed)

    def name(self, index: int) -> str:
        return self._listed.name(int(self._order[index]))

    def load(self, index: int) -> Sample | Review:
        return self._listed.load(int(self._order[index]))

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._listed.class_names

    @property
    def classes(self) -> int | None:
        return self._listed.classes

    @cached_property
    def fingerprint(self) -> str:
        """Another one than the listed set's, for the first photos are others."""
        return hashlib.sha256(f"{self._listed.fingerprint} shuffled by {self._seed}".encode()).hexdigest()

    def _records(self) -> Iterator[str]:
        return iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._listed, self._seed)
