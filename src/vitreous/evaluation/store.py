"""The folder of a run: a manifest and one Parquet file per finished shard, shared by any number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from vitreous._utils.messages import error_message
from vitreous._utils.storage import MANIFEST, StorageError, parse_manifest, sealed
from vitreous.evaluation.run import (
    ENDING,
    PARTIAL_ENDING,
    PLACE_COLUMNS,
    Lock,
    Run,
    RunError,
    Shard,
    atomic_write,
    fault_of,
    order_of,
    read_columns,
    remove_partial_files,
    take_lock,
    write_shard,
)
from vitreous.methods import is_control

KIND = "vitreous evaluation"
SCHEMA = 2
_SEALED_SINCE = 2  # the schema from which on a manifest carries its checksum
# Further fields of a manifest, which only reports read.
_DETAILS = {"created": str, "command": list, "folder": str, "title": str, "paper": str, "software": dict}
_LOCK_ENDING = ".lock"

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Claim:
    """A shard that this process holds the lock of.

    Attributes:
        done: whether its file is there already.
    """

    lock: Lock
    done: bool

    def release(self) -> None:
        """Release it."""
        self.lock.release()


@dataclass(frozen=True)
class Store:
    """A run's folder.

    Exactly the shards of the run's plan are read from it: what other limits left there does no harm.

    Attributes:
        folder: where it is.
        run: what it holds.
        damaged: shards that count as not there, see ``readable``.
    """

    folder: Path
    run: Run
    damaged: frozenset[Shard] = frozenset()

    @classmethod
    def create(cls, out: Path, run: Run, details: Mapping[str, Any], *, keep_threads: bool = True) -> Store:
        """Create the run's folder in ``out``, or resume the existing one.

        Args:
            out: the folder of all runs.
            run: what is evaluated.
            details: JSON values for the manifest that the numbers do not depend on.
            keep_threads: use the number of threads of an earlier start; otherwise it must be the same.

        Raises:
            StorageError: the folder cannot be written or holds something else.
            RunError: the run was started with another number of threads.
        """
        folder = out / run.folder_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                current = _agree(folder, run, details, keep_threads=keep_threads)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
        return cls(folder, current)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the folder of a run that was started before."""
        return cls(folder, read_run(folder))

    def readable(self, notice: Notice) -> Store:
        """The same folder for reading: damaged shards are reported and count as missing."""
        damaged = []
        for shard in self.run.shards():
            fault = fault_of(self.folder, self.run, shard)
            if fault not in (None, "missing"):
                damaged.append(shard)
                notice(f"{fault}; evaluate again to recompute it")
        return replace(self, damaged=frozenset(damaged))

    def missing(self, notice: Notice) -> list[Shard]:
        """The shards of the plan that are not there, or are not what was written, each of which is reported."""
        missing = []
        for shard in self.run.shards():
            fault = fault_of(self.folder, self.run, shard)
            if fault is not None:
                missing.append(shard)
                if fault != "missing":
                    notice(f"{fault}; it is recomputed")
        return missing

    def is_done(self, shard: Shard) -> bool:
        """Whether a shard's file is there and whole."""
        return fault_of(self.folder, self.run, shard) is None

    def is_there(self, shard: Shard) -> bool:
        """Whether a shard's file exists, without reading it."""
        return shard not in self.damaged and self._place(shard).exists()

    def claim(self, shard: Shard) -> Claim | None:
        """Lock a shard for this process; None where another process holds it."""
        lock = take_lock(self.folder / f"{shard.name}{_LOCK_ENDING}")
        if lock is None:
            return None
        try:
            if lock.certain:
                remove_partial_files(self.folder, shard.name)
            return Claim(lock, done=self.is_done(shard))
        except BaseException:
            # An interrupted notebook keeps its process, which would wait for its own lock.
            lock.release()
            raise

    def forget_failed(self, notice: Notice) -> None:
        """Forget the shards of the plan in which something could not be measured, so that they are computed again.

        The cause may have been temporary: too many open files, a disk that was offline. Each shard is claimed first, so
        one that another process computes now is left to it.
        """
        forgotten = sum(self._forget_if_failed(shard) for shard in self.run.shards() if self._has_failed(shard))
        if forgotten:
            notice(f"{forgotten} of {len(self.run.shards())} shards contain failures and are recomputed")

    def _forget_if_failed(self, shard: Shard) -> bool:
        claim = self.claim(shard)
        if claim is None:
            return False
        try:
            # Checked again: the previous holder may have recomputed it.
            if not self._has_failed(shard):
                return False
            self._place(shard).unlink()
        except OSError as error:
            raise StorageError(f"{self._place(shard)} cannot be removed: {error.strerror or error}") from error
        finally:
            claim.release()
        return True

    def _has_failed(self, shard: Shard) -> bool:
        """Whether a row of a shard's file has an error; one that is missing or damaged is computed again anyway."""
        if not self.is_done(shard):
            return False
        return bool(self._read_one(shard, ["error"])["error"].is_valid().to_numpy().any())

    def write(self, shard: Shard, table: pa.Table) -> None:
        """Store a shard's table."""
        write_shard(self.folder, self.run, shard, table)

    def clean(self) -> None:
        """Remove what killed processes left behind, also for shards of an earlier limit."""
        left = [file for ending in (PARTIAL_ENDING, _LOCK_ENDING) for file in self.folder.glob(f"shard-*{ending}")]
        for name in {file.name.partition(".")[0] for file in left}:
            lock = take_lock(self.folder / f"{name}{_LOCK_ENDING}")
            if lock is not None:
                if lock.certain:
                    remove_partial_files(self.folder, name)
                lock.release()

    def read(self, shards: Sequence[Shard], columns: Sequence[str]) -> pa.Table:
        """Some columns of the shards given, in their order, each image by image and method by method of the run.

        Raises:
            StorageError: a file cannot be read, or its rows are not of the images and methods of the run.
        """
        tables = [self._read_one(shard, columns) for shard in shards]
        return pa.concat_tables(tables).replace_schema_metadata(None)

    def _read_one(self, shard: Shard, columns: Sequence[str]) -> pa.Table:
        place = self._place(shard)
        try:
            table = read_columns(place, [*dict.fromkeys([*PLACE_COLUMNS, *columns])])
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{place} cannot be read: {error_message(error)}; evaluate again") from error
        order = order_of(table, self.run, shard)
        if order is None:
            raise StorageError(f"{place} holds other images or methods than {MANIFEST} says; evaluate again")
        return table.select(list(columns)).take(order)

    def _place(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}{ENDING}"


def read_run(folder: Path) -> Run:
    """Read the run that a folder holds from its manifest."""
    return _described(folder, read_manifest(folder))


def earlier_runs(out: Path, run: Run) -> dict[Path, Run]:
    """Find the folders in ``out`` with the same evaluation, but by other versions of the programs."""
    found = {}
    for manifest in sorted(out.glob(f"{run.protocol}-*/{MANIFEST}")):
        try:
            other = read_run(manifest.parent)
        except StorageError:
            continue  # it is reported where it is read
        # Runs from before there were controls, and those without them, are the same evaluation.
        same_methods = _without_controls(other.methods) == _without_controls(run.methods)
        alike = replace(other, versions=run.versions, methods=run.methods)
        if other.versions != run.versions and same_methods and alike.key == run.key:
            found[manifest.parent] = other
    return found


def _without_controls(methods: Iterable[str]) -> list[str]:
    return [method for method in methods if not is_control(method)]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run's folder, which must be as it was written.

    Raises:
        StorageError: it is missing or damaged, or the key in it is not that of the run it describes. Manifests of
            earlier versions have no checksum; of them the key, which covers all that the numbers depend on, is checked.
    """
    manifest = parse_manifest(folder, KIND, SCHEMA, sealed_since=_SEALED_SINCE)
    if _described(folder, manifest).key != manifest.get("key"):
        raise StorageError(
            f"{folder / MANIFEST} is damaged, or another version of vitreous wrote it: its key is not that of the run "
            "it describes; evaluate again"
        )
    for name, kind in _DETAILS.items():
        if not isinstance(manifest.get(name, kind()), kind):
            raise StorageError(f"{folder / MANIFEST} is damaged: {name} is not what it should be")
    return manifest


def _described(folder: Path, manifest: Mapping[str, Any]) -> Run:
    try:
        return Run.from_json(manifest.get("run"))
    except RunError as error:
        raise StorageError(f"{folder / MANIFEST} is damaged: {error}") from error


def _agree(folder: Path, run: Run, details: Mapping[str, Any], *, keep_threads: bool) -> Run:
    """Write the manifest of a new run, or compare with the one that is there; gives the run as it goes on."""
    if not (folder / MANIFEST).exists():
        _write_manifest(folder, run, details)
        return run
    try:
        started = read_run(folder)
    except StorageError as error:
        # Not rewritten automatically: only the manifest knows the number of threads.
        advice = f"without {folder / MANIFEST} the same command goes on with what is stored"
        raise StorageError(f"{error}; {advice}") from error
    if started.key != run.key:
        raise StorageError(f"{folder} holds another run; choose another --out")
    if started.threads != run.threads and not keep_threads:
        raise RunError(
            f"this run was started with --threads {started.threads}, and other threads may give other last digits: "
            "leave --threads out, or choose another --out"
        )
    current = replace(run, threads=started.threads)
    unsealed = read_manifest(folder)["schema"] < _SEALED_SINCE
    if unsealed or current.as_json() != started.as_json():  # another limit, or the same files at another place
        _write_manifest(folder, current, details)
    return current


def _write_manifest(folder: Path, run: Run, details: Mapping[str, Any]) -> None:
    contents = {"format": KIND, "schema": SCHEMA, "key": run.key, "run": run.as_json(), **details}
    with atomic_write(folder / MANIFEST, MANIFEST) as file:
        file.write(sealed(contents))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time read and write the manifest."""
    while (lock := take_lock(folder / f"{MANIFEST}{_LOCK_ENDING}")) is None:
        time.sleep(0.01)
    try:
        if lock.certain:
            remove_partial_files(folder, MANIFEST)
        yield
    finally:
        lock.release()
