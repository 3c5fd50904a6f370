"""The numbers of runs, read back column by column, image for image the same for all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitreous.evaluation.protocols import Protocol
from vitreous.evaluation.statistics import Comparison
from vitreous.evaluation.store.run import Run, RunError, Shard
from vitreous.evaluation.store.store import Store
from vitreous.metrics.metric import Floats


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

    Attributes:
        stores: the folders of the runs.
        protocol: how they were measured.

    Nothing is kept in memory but what was asked for last: a column of 50,000 images and 40 methods is 16 MB.
    """

    stores: tuple[Store, ...]
    protocol: Protocol

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

    @property
    def finished(self) -> bool:
        """Whether all images that the runs are to have are there."""
        return len(self.images) == self.wanted

    def values(self, columns: Sequence[str]) -> dict[str, Floats]:
        """Some columns of every method, (images, columns); NaN where there is no number."""
        found = [self._read(number, columns)[self._rows(number)] for number in range(len(self.stores))]
        return {method: found[number][:, position] for method, (number, position) in self._owners.items()}

    def _read(self, number: int, columns: Sequence[str]) -> Floats:
        """Columns of a run, (images, methods, columns), shard by shard, for opening a file is what takes time."""
        store, shards = self.stores[number], self._shards[number]
        methods = len(store.run.methods)
        found = np.empty((sum(map(len, shards)), methods, len(columns)))
        start = 0
        for shard in shards:
            table = store.read([shard], columns)
            for position, column in enumerate(columns):
                found[start : start + len(shard), :, position] = table[column].to_numpy().reshape(-1, methods)
            start += len(shard)
        return found

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

    @property
    def uncounted(self) -> int:
        """How many images do not count."""
        return int((~self.counted).sum())

    def rows(self) -> list[dict[str, Any]]:
        """One row per method and metric: method, metric, mean, low and high of the 95% interval, n images."""
        from vitreous.evaluation.report.summary import summarise  # noqa: PLC0415  # it is made of results
        from vitreous.evaluation.report.tables import as_rows  # noqa: PLC0415

        return as_rows(summarise(self, ranks=False))

    def compare(self, first: str, second: str) -> list[Comparison]:
        """Compare two methods by a paired bootstrap: for every metric first - second, its 95% interval and p."""
        from vitreous.evaluation.report.summary import compare  # noqa: PLC0415  # it is made of results

        return compare(self, first, second)

    def image_names(self) -> list[str]:
        """The names of the images."""
        store = self.stores[0]
        names = store.read(self._shards[0], ["image"])["image"].take(self._rows(0) * len(store.run.methods))
        return [str(name) for name in names.to_pylist()]

    def failures(self) -> list[Failure]:
        """What could not be measured and why; an image that fails the same way with all methods is one failure."""
        found: dict[tuple[str, str], list[str]] = {}
        for number, store in enumerate(self.stores):
            owned = {method for method, (owner, _) in self._owners.items() if owner == number}
            for shard in self._shards[number]:
                table = store.read([shard], ["image", "method", "error"])
                for row in table.filter(table["error"].is_valid()).to_pylist():
                    if row["method"] in owned:
                        found.setdefault((row["image"], row["error"]), []).append(row["method"])
        every = len(self.methods)
        return [
            Failure(image, method, error)
            for (image, error), failing in found.items()
            for method in ([None] if len(failing) == every else failing)
        ]
