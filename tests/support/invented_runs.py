"""Finished runs with made-up numbers, for tests of what is made of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from evaluations import some_run
from vitreous.evaluation.protocols import Protocol
from vitreous.evaluation.report.results import Results
from vitreous.evaluation.run import schema_of
from vitreous.evaluation.store import Store
from vitreous.evaluation.tasks.task import ImageTask
from vitreous.metrics.metric import Metric


@dataclass(frozen=True)
class Invented(ImageTask):
    """A task whose numbers are made up, so that only what is made of them is looked at."""

    given: tuple[Metric, ...] = ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.given

    def targets(self, picture):
        raise NotImplementedError

    def measure(self, batch, cases):
        raise NotImplementedError


def invented_store(
    out: Path,
    numbers: Mapping[str, Mapping[str, Sequence[float]]],
    failing: Mapping[str, Sequence[int]] | None = None,
    **changes,
) -> Store:
    """The folder of a finished run with made-up numbers.

    Args:
        out: where it is made.
        numbers: for every method and column a number of every image.
        failing: the images that methods could not be measured on.
        changes: of the run, which otherwise is ``some_run``'s.
    """
    columns = tuple(next(iter(numbers.values())))
    images = len(next(iter(next(iter(numbers.values())).values())))
    run = some_run(**{"methods": tuple(numbers), "columns": columns, "images": images, **changes})
    store = Store.create(out, run, {})
    failed = {(method, index) for method, each in (failing or {}).items() for index in each}
    for shard in run.shards():
        rows = []
        for index in shard:
            for method in run.methods:
                known = {"error": "broken"}
                if (method, index) not in failed:
                    known = {column: float(values[index]) for column, values in numbers[method].items()}
                rows.append({"index": index, "image": f"{index}.png", "method": method, **known})
        store.write(shard, pa.Table.from_pylist(rows, schema=schema_of(columns)))
    return store


class InventedWhere(Invented):
    purpose = "localisation"


class InventedWhat(Invented):
    purpose = "faithfulness"


_TASKS = {"other": Invented, "localisation": InventedWhere, "faithfulness": InventedWhat}


def invented_results(
    out: Path, metrics: Sequence[Metric], numbers, failing=None, purpose: str = "other", **changes
) -> Results:
    """Results of one ``invented_store``, measured by these metrics."""
    protocol = Protocol("p", "Made up", "", 1, (_TASKS[purpose](tuple(metrics)),))
    return Results((invented_store(out, numbers, failing, **changes),), protocol)
