"""The results of runs: read back column by column, summarised as a table, and found in folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from vitreous._utils.storage import MANIFEST, StorageError
from vitreous.errors import VitreousError
from vitreous.evaluation.protocol import published_results
from vitreous.evaluation.protocols import Protocol, find_protocol
from vitreous.evaluation.report.tables import ResultTable, as_rows
from vitreous.evaluation.run import Run, RunError, Shard
from vitreous.evaluation.statistics import Comparison, Estimate, estimates, paired, standings
from vitreous.evaluation.store import Notice, Store, read_manifest
from vitreous.explanation.views import FigureOptions, Look, look_with
from vitreous.methods import is_control
from vitreous.metrics.metric import Floats, Metric

if TYPE_CHECKING:
    from vitreous.pictures.canvas import Canvas


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

    Only the last column read is kept in memory: a column of 50,000 images and 40 methods is 16 MB.
    """

    stores: tuple[Store, ...]
    protocol: Protocol

    def __post_init__(self) -> None:
        if len({store.run.context for store in self.stores}) != 1:
            raise RunError("these runs differ in protocol, model or data set, so their numbers do not compare")

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
    def image_count(self) -> int:
        """How many images the runs are to have in the end."""
        return min(store.run.image_count for store in self.stores)

    @property
    def finished(self) -> bool:
        """Whether all images that the runs are to have are there."""
        return len(self.images) == self.image_count

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
        return as_rows(summarise(self, ranks=False))

    def compare(self, first: str, second: str) -> list[Comparison]:
        """Compare two methods by a paired bootstrap: for every metric first - second, its 95% interval and p."""
        return compare(self, first, second)

    def figure(
        self,
        name: str = "dots",
        *,
        methods: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
        look: Look | None = None,
        **options: Unpack[FigureOptions],
    ) -> Canvas:
        """Draw the results, to be saved as PNG, SVG or PDF.

        Args:
            name: ``dots``: the mean of every method with its interval, a panel per metric; ``radar``: a polygon per
                method over the metrics; ``curves``: the curves of the protocol, means with bands; ``layer-curve``:
                metrics over the start layer, where methods were measured for several.
            methods: Which methods; all by default.
            metrics: Which metrics; by default all that have a better direction.
            look: How it is drawn.
            **options: Fields of ``vitreous.pictures.Look`` to change.

        Examples:
            >>> import vitreous
            >>> results = vitreous.evaluate(model, "labelled:photos", "chefer-2021-perturbation", ["gae", "rollout"])
            >>> results.figure("dots", width="3.25in").save("dots.pdf").name
            'dots.pdf'
        """
        from vitreous.evaluation.report.figures import results_figure  # noqa: PLC0415  # imports matplotlib

        return results_figure(self, name, methods=methods, metrics=metrics, look=look_with(look, options))

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


def summarise(results: Results, *, ranks: bool = True, published: bool = False) -> ResultTable:
    """Make the table of some results.

    Args:
        results: what was measured.
        ranks: whether methods are ranked and compared with the best by paired tests, which takes longer.
        published: whether numbers that papers print for the protocol go with it, in a table of their own.
    """
    metrics = results.protocol.metrics()
    found: list[Estimate] = []
    ranked: dict[str, dict[str, int]] = {}
    tied: dict[str, frozenset[str]] = {}
    against_best: dict[str, dict[str, Comparison]] = {}
    for columns, alike in groupby(metrics, key=lambda metric: metric.columns):
        # Columns of one kind after the other, so that no more are in memory; the resamples are the same for all.
        values = counted_values(results, columns)
        if not values:
            break
        together = list(alike)
        found += estimates(values, columns, together, seed=results.run.seed)
        for metric in together:
            if ranks and metric.direction is not None and len(values) > 1:
                explaining = {name: table for name, table in values.items() if not is_control(name)}
                found_by = standings(explaining, columns, metric, seed=results.run.seed) if explaining else {}
                ranked[metric.name] = {name: one.rank for name, one in found_by.items()}
                tied[metric.name] = frozenset(name for name, one in found_by.items() if one.tied)
                against_best[metric.name] = {
                    name: one.against_best for name, one in found_by.items() if one.against_best is not None
                }
    return ResultTable(
        title_of(results),
        metrics,
        _by_method(found, results, metrics),
        ranked,
        against_best,
        published_results(results.protocol.name) if published else (),
        tied,
    )


def compare(results: Results, first: str, second: str) -> list[Comparison]:
    """Compare two methods by every metric of the protocol, by the paired test that ranks are made of."""
    for method in (first, second):
        if method not in results.measured_methods:
            known = ", ".join(results.measured_methods)
            raise RunError(f"{method} was not measured; measured methods are {known}")
    found = []
    for columns, alike in groupby(results.protocol.metrics(), key=lambda metric: metric.columns):
        values = counted_values(results, columns)
        found += [paired(values, columns, metric, first, second, seed=results.run.seed) for metric in alike]
    return found


def counted_values(results: Results, columns: Sequence[str]) -> dict[str, Floats]:
    """Columns of every measured method, (images, columns); NaN for images that do not count, the same for all."""
    values = results.values(columns)
    return {method: np.where(results.counted[:, None], values[method], np.nan) for method in results.measured_methods}


def title_of(results: Results) -> str:
    """What was measured on what, in a line."""
    kind, _, path = results.run.data.partition(":")
    architecture, at, weights = results.run.model.name.partition("@")
    model = f"{architecture}{at}{Path(weights).name}"  # without the folder, which does not affect the result
    broken = f" ({results.uncounted} could not be measured)" if results.uncounted else ""
    counted = f"{int(results.counted.sum())} {results.run.noun}{broken}"
    left = "" if results.finished else f" (not finished: {len(results.images)} of {results.image_count})"
    return f"{results.run.protocol}, {model}, {kind}:{Path(path).name}, {counted}{left}"


def _by_method(found: Sequence[Estimate], results: Results, metrics: Sequence[Metric]) -> list[Estimate]:
    places = {method: place for place, method in enumerate(results.methods)}
    names = [metric.name for metric in metrics]
    return sorted(found, key=lambda one: (places[one.method], names.index(one.metric)))


def discover_runs(folder: Path, notice: Notice) -> list[Results]:
    """Find the results in ``folder``, which is a run's folder or holds some.

    Runs that have their protocol, model and data set, the number of images they want and the images they have finished
    in common are one table; a method that several of them have measured is taken from the one that was started last.
    So finished runs stand together, and one that was killed or still goes on has a table of its own, behind them: it
    takes no images from a finished run.

    Args:
        folder: where to look.
        notice: receives every folder that is left out (no run, an unknown protocol, or nothing stored yet) and every
            damaged file, whose images count as not finished.

    Raises:
        StorageError: nothing is left.
    """
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder")
    places = [path.parent for path in (*folder.glob(MANIFEST), *sorted(folder.glob(f"*/{MANIFEST}")))]
    found, left_out = _opened(places, notice)
    if not found:
        reasons = "; ".join(left_out)
        raise StorageError(f"{folder} holds no results of `vitreous evaluate`{reasons and f' ({reasons})'}")
    for reason in left_out:
        notice(f"left out: {reason}")
    groups: dict[tuple[str, int, bytes], list[Results]] = {}
    for results in sorted(found, key=_started, reverse=True):
        groups.setdefault((results.run.context, results.image_count, results.images.tobytes()), []).append(results)
    tables = [Results(tuple(one.stores[0] for one in alike), alike[0].protocol) for alike in groups.values()]
    return sorted(tables, key=_place)


def _opened(folders: list[Path], notice: Notice) -> tuple[list[Results], list[str]]:
    """The results of each run alone, and why some folders have none."""
    found, left_out = [], []
    for folder in folders:
        try:
            found.append(_results_in(folder, notice))
        except VitreousError as error:
            left_out.append(f"{folder.resolve().name}: {error}")
    return found, left_out


def _results_in(folder: Path, notice: Notice) -> Results:
    store = Store.open(folder)
    protocol = find_protocol(store.run.protocol)
    needed = {column for metric in protocol.metrics() for column in metric.columns}
    if store.run.settings != protocol.settings() or not needed <= {*store.run.columns}:
        raise RunError(f"it was measured by another version of {protocol.name}")
    results = Results((store.readable(notice),), protocol)
    if not len(results.images):
        raise StorageError(
            "nothing of it can be read" if results.stores[0].damaged else "it has not stored anything yet"
        )
    return results


def _started(results: Results) -> str:
    return str(read_manifest(results.stores[0].folder).get("created", ""))


def _place(results: Results) -> tuple[str, str, str, bool, int]:
    """Finished results stand before others of the same kind, and those of more images first."""
    run = results.run
    return run.protocol, run.model.name, run.data, not results.finished, -len(results.images)
