"""The numbers of runs, read back column by column, image for image the same for all methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitreous.benchmark.run import Run, RunError, Shard
from vitreous.benchmark.store import Store

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Failure:
    """An image that a method could not be measured on.

    Attributes:
        image: its name.
        method: the method, or None where no method could be measured.
        error: why.
    """

    image: str
    method: str | None
    error: str


@dataclass(frozen=True)
class Results:
    """What is stored of runs that have their protocol, model and data set in common, but not their methods.

    Nothing is kept in memory but what was asked for last: a column of 50,000 images and 40 methods is 16 MB.
    """

    stores: tuple[Store, ...]

    def __post_init__(self) -> None:
        if len({store.run.context for store in self.stores}) != 1:
            raise RunError("these runs have not the same protocol, model and data set, so their numbers do not compare")

    @property
    def run(self) -> Run:
        """The first of the runs."""
        return self.stores[0].run

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """All methods, in the order of the runs; one that several runs have is read from the first."""
        return tuple(self._owners)

    @cached_property
    def _owners(self) -> dict[str, tuple[int, int]]:
        owners: dict[str, tuple[int, int]] = {}
        for number, store in enumerate(self.stores):
            for position, method in enumerate(store.run.methods):
                owners.setdefault(method, (number, position))
        return owners

    def run_of(self, method: str) -> int:
        """The number of the run that a method is read from."""
        return self._owners[method][0]

    @cached_property
    def _shards(self) -> list[list[Shard]]:
        return [[shard for shard in store.run.shards() if store.is_there(shard)] for store in self.stores]

    @cached_property
    def images(self) -> NDArray[np.int64]:
        """Indices of the images that all runs have finished."""
        finished = [np.array([i for shard in shards for i in shard], dtype=np.int64) for shards in self._shards]
        common = finished[0]
        for each in finished[1:]:
            common = np.intersect1d(common, each)
        return common

    @property
    def wanted(self) -> int:
        """How many images the runs are to have in the end."""
        return min(store.run.wanted for store in self.stores)

    def values(self, columns: Sequence[str]) -> dict[str, Floats]:
        """Some columns of every method, (images, columns); NaN where there is no number."""
        found = [np.empty((len(self.images), len(store.run.methods), len(columns))) for store in self.stores]
        for number in range(len(self.stores)):
            for position, column in enumerate(columns):
                found[number][:, :, position] = self._column(number, column)
        return {method: found[number][:, position] for method, (number, position) in self._owners.items()}

    def _column(self, number: int, column: str) -> Floats:
        """One column of a run, (images, methods)."""
        store = self.stores[number]
        table = store.read(self._shards[number], [column])
        numbers = table[column].to_numpy().astype(np.float64, copy=False).reshape(-1, len(store.run.methods))
        return np.asarray(numbers[self._rows(number)])

    def _rows(self, number: int) -> NDArray[np.int64]:
        """Where the common images stand in a run."""
        own = np.array([index for shard in self._shards[number] for index in shard], dtype=np.int64)
        return np.searchsorted(own, self.images)

    @cached_property
    def failed(self) -> Mapping[str, NDArray[np.bool_]]:
        """For every method, which of the images could not be measured."""
        failed = {}
        for number, store in enumerate(self.stores):
            table = store.read(self._shards[number], ["error"])
            flags = table["error"].is_valid().to_numpy().reshape(-1, len(store.run.methods))[self._rows(number)]
            for method, (owner, position) in self._owners.items():
                if owner == number:
                    failed[method] = flags[:, position]
        return failed

    @cached_property
    def measured_methods(self) -> tuple[str, ...]:
        """The methods that could be measured on at least one image."""
        return tuple(method for method in self.methods if not self.failed[method].all())

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """Which images count: those that every measured method was measured on, so that methods can be compared."""
        counted = np.ones(len(self.images), dtype=bool)
        for method in self.measured_methods:
            counted &= ~self.failed[method]
        return counted if self.measured_methods else ~counted

    def image_names(self) -> list[str]:
        """The names of the images."""
        store = self.stores[0]
        names = store.read(self._shards[0], ["image"])["image"].take(self._rows(0) * len(store.run.methods))
        return [str(name) for name in names.to_pylist()]

    def failures(self) -> list[Failure]:
        """What could not be measured and why; an image that fails the same way with all methods is one failure."""
        found: list[Failure] = []
        for number, store in enumerate(self.stores):
            owned = [method for method, (owner, _) in self._owners.items() if owner == number]
            for shard in self._shards[number]:
                table = store.read([shard], ["image", "method", "error"])
                failed = table.filter(table["error"].is_valid()).to_pylist()
                found += _joined([row for row in failed if row["method"] in owned], len(store.run.methods))
        # Of several runs each has met a broken image.
        return list(dict.fromkeys(found))


def _joined(rows: Iterable[Mapping[str, str]], methods: int) -> list[Failure]:
    by_image: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_image.setdefault((row["image"], row["error"]), []).append(row["method"])
    return [
        failure
        for (image, error), failing in by_image.items()
        for failure in (
            [Failure(image, None, error)]
            if len(failing) == methods
            else [Failure(image, method, error) for method in failing]
        )
    ]
