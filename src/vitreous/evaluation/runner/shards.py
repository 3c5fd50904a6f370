"""The shard function: a range of images in, a table of numbers out, the same on every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import torch

from vitreous.datasets import Review, Sample
from vitreous.errors import VitreousError
from vitreous.evaluation.runner.measuring import Row, measure
from vitreous.evaluation.runner.workbench import Workbench
from vitreous.evaluation.store.run import Run, RunError, Shard
from vitreous.evaluation.store.shard_file import schema_of
from vitreous.printable import printable

_SEEDS = 2**63  # as many are different to torch


def compute_shard(run: Run, bench: Workbench, shard: Shard) -> pa.Table:
    """Measure the images of a shard; one that cannot be read has rows with its error and takes no other with it."""
    rows: dict[tuple[str, str], Row] = {}
    names = {index: bench.data.name(index) for index in shard}

    def readable() -> Iterator[Sample | Review]:
        for index in shard:
            try:
                yield bench.data.load(index)
            except (VitreousError, OSError) as error:
                rows.update({(names[index], method): {"error": _sentence(error)} for method in run.methods})

    with _threads(run.threads), _seeded(run.seed + shard.first):
        measured = measure(bench.material, readable(), bench.protocol, run.methods)
    rows |= {(str(row["image"]), str(row["method"])): row for row in measured}
    return _table(run, [(index, names[index], method) for index in shard for method in run.methods], rows)


def _table(run: Run, order: Sequence[tuple[int, str, str]], rows: dict[tuple[str, str], Row]) -> pa.Table:
    """Put the rows into a table, image by image and method by method, so that readers need not look for them."""
    if len(order) != len(rows) or {(name, method) for _, name, method in order} != rows.keys():
        raise RunError("an image of the data set was not measured, or its name is not unique")
    found = [rows[name, method] for _, name, method in order]
    columns = {
        "index": [index for index, _, _ in order],
        "image": [name for _, name, _ in order],
        "method": [method for _, _, method in order],
        "error": [row.get("error") for row in found],
    }
    columns |= {column: [row.get(column) for row in found] for column in run.columns}
    return pa.table(columns, schema=schema_of(run.columns))


def _sentence(error: Exception) -> str:
    return " ".join(printable(str(error) or type(error).__name__).split())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let the model use so many threads, for another number may add up numbers in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Make random draws depend on the shard alone, not on what the process did before."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed % _SEEDS)
        yield
