"""A run: everything its numbers depend on, the key derived from it, and its files.

Files are written atomically, locked between processes, and checked when they are read. ``storage.atomic_file`` is for
files that one process writes for a person: it follows links and waits for no disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import BaseFileLock, FileLock, Timeout
from numpy.typing import NDArray

from vitreous._utils.defaults import SHARD_SIZE
from vitreous._utils.messages import error_message, short_repr
from vitreous._utils.storage import StorageError
from vitreous.errors import RunError as RunError  # noqa: PLC0414  # re-exported
from vitreous.inputs.model_io import OutputActivation, check_outputs

MOST_THREADS = 1024  # more may crash the process
_MOST_SHARDS = 10_000_000

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("protocol", "weights", "data", "data_fingerprint"), str),
    **dict.fromkeys(("settings", "model", "preprocessing", "plugins", "own_methods", "versions"), dict),
    **dict.fromkeys(("methods", "columns"), list),
    **dict.fromkeys(("images", "shard_size", "seed", "threads"), int),
    **dict.fromkeys(("shuffled", "stratified"), bool),
    "limit": int | None,
}


@dataclass(frozen=True)
class ModelChoice:
    """A model by name, and what was changed about it.

    Attributes:
        name: as ``load_model`` takes it.
        mean: replaces the mean of its own preprocessing.
        std: replaces the standard deviation.
        image_size: height and width of its input, behind the depth of volumes.
        device: where it runs.
        outputs: kind of its outputs, if neither its configuration nor their number determines it.
        stage: which stage of a hierarchical model is read; None for the last.
    """

    name: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    image_size: tuple[int, ...] | None = None
    device: str = "cpu"
    outputs: OutputActivation | None = None
    stage: int | None = None


@dataclass(frozen=True, order=True)
class Shard:
    """A range of images that is computed and stored as one.

    Attributes:
        first: index of its first image in the data set.
        last: index of its last image, included.
    """

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    @property
    def name(self) -> str:
        """The name of its file without the ending; names sort as the images do."""
        return f"shard-{self.first:08d}-{self.last:08d}"


@dataclass(frozen=True)
class Run:
    """One evaluation: a protocol, a model, a data set and methods, with every choice that its numbers depend on.

    Attributes:
        protocol: name of the protocol.
        settings: every choice of the protocol, its version included.
        model: which model.
        weights: fingerprint of its weights.
        preprocessing: how images or texts become its input.
        data: which data set, ``KIND:PATH``.
        data_fingerprint: changes when the data set does.
        images: how many images the data set has.
        methods: the spellings that are evaluated, in this order.
        plugins: files with methods of the user's own, each with its SHA-256.
        own_methods: those of the methods that are not of this package, each with the hash of its code.
        columns: names of the numbers that are kept of every image.
        shard_size: images in one shard.
        seed: of everything that is drawn at random.
        versions: of the programs that compute the numbers.
        shuffled: whether the data set is taken in a random order, which depends on ``seed``.
        stratified: the same with the classes in turn.
        limit: how many images are evaluated; None for all. Not part of the key: a run can be made longer.
        threads: how many threads the model uses. Not part of the key, but fixed when the run is started.
    """

    protocol: str
    settings: Mapping[str, Any]
    model: ModelChoice
    weights: str
    preprocessing: Mapping[str, Any]
    data: str
    data_fingerprint: str
    images: int
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    plugins: Mapping[str, str] = field(default_factory=dict)
    own_methods: Mapping[str, str] = field(default_factory=dict)
    shard_size: int = SHARD_SIZE
    seed: int = 0
    shuffled: bool = False
    stratified: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.shard_size < 1 or self.threads < 1 or (self.limit is not None and self.limit < 1):
            raise RunError("the shard size, the number of threads and the limit must be at least 1")
        if self.threads > MOST_THREADS:
            raise RunError(f"{self.threads} threads are more than the maximum of {MOST_THREADS}")
        if self.image_count > self.shard_size * _MOST_SHARDS:
            raise RunError(f"a run of {self.image_count} images in shards of {self.shard_size} has too many shards")

    @property
    def key(self) -> str:
        """A hash of everything that the numbers depend on: the content of files, not their paths."""
        values = asdict(self)
        # A limit cuts the list of shards and leaves them as they are; threads are kept by the run's manifest.
        for name in ("limit", "threads", "data", "images", "plugins"):
            del values[name]
        if not self.stratified:  # as in runs from before there was a choice
            del values["stratified"]
        if self.model.outputs is None:
            del values["model"]["outputs"]
        if self.model.stage is None:
            del values["model"]["stage"]
        values["kind"] = self.data.partition(":")[0]
        values["plugins"] = sorted(self.plugins.values())
        return hash_of(values)

    @property
    def context(self) -> str:
        """A hash of what two runs must have in common for their methods to stand in one table."""
        parts = (self.settings, self.weights, self.preprocessing, self.data_fingerprint, self.protocol, self.versions)
        outputs = [] if self.model.outputs is None else [self.model.outputs]
        stage = [] if self.model.stage is None else [self.model.stage]
        return hash_of([*parts, self.data.partition(":")[0], self.model.device, self.seed, *outputs, *stage])

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""
        return f"{self.protocol}-{self.key[:12]}"

    @property
    def image_count(self) -> int:
        """How many images are evaluated."""
        return self.images if self.limit is None else min(self.limit, self.images)

    @property
    def noun(self) -> str:
        """What is evaluated, in a word."""
        return "texts" if self.settings.get("reads") == "texts" else "images"

    def shards(self) -> list[Shard]:
        """The plan: which ranges of images are computed; the last one may be cut short."""
        return [
            Shard(first, min(first + self.shard_size, self.image_count) - 1)
            for first in range(0, self.image_count, self.shard_size)
        ]

    def as_json(self) -> dict[str, Any]:
        """Give the run as JSON values, the same before it is written and after it is read."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples become lists, as they would in a file
        return values

    @classmethod
    def from_json(cls, values: object) -> Run:
        """Read a run from JSON values.

        Raises:
            RunError: they do not describe a run.
        """
        try:
            return _run_of(values)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"this does not describe a run of this version of vitreous: {error_message(error)}"
            ) from error


def _run_of(values: object) -> Run:
    if not isinstance(values, Mapping):
        raise TypeError("it is not a run")
    model = dict(values["model"])
    for name in ("mean", "std", "image_size"):
        model[name] = None if model[name] is None else tuple(model[name])
    choice = ModelChoice(**model)
    _check_type("model.name", choice.name, str)
    _check_type("model.device", choice.device, str)
    check_outputs(choice.outputs)
    for name, numbers, kind in (("mean", choice.mean, float), ("std", choice.std, float)):
        _check_all(f"model.{name}", numbers or (), kind)
    _check_all("model.image_size", choice.image_size or (), int)
    given = {each.name: values[each.name] for each in fields(Run) if each.name in values}
    for name, value in given.items():
        _check_type(name, value, _TYPES[name])
    for name in ("methods", "columns"):
        _check_all(name, given[name], str)
        given[name] = tuple(given[name])
        if len(set(given[name])) != len(given[name]):
            raise ValueError(f"{name} holds a name twice")
    for name in ("plugins", "own_methods", "versions"):
        _check_all(name, [*given.get(name, {}).values()], str)
    return Run(**{**given, "model": choice})


def _check_type(name: str, value: object, kind: Any) -> None:
    accepted = int | float if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {short_repr(value)}")


def _check_all(name: str, values: Iterable[object], kind: Any) -> None:
    for value in values:
        _check_type(name, value, kind)


def hash_of(value: Any) -> str:
    """The SHA-256 of JSON values, the same for the same values."""
    # Tuples and lists are the same to JSON, so a run read from its manifest has the key it was written with.
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


PARTIAL_ENDING = ".part"

# What flock answers where a file system has no locks.
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
ENDING = ".parquet"
PLACE_COLUMNS = ("index", "method")  # they identify the image and method of a row
_LIST = pa.list_(pa.field("element", pa.float16()))  # the name that Parquet gives it
_ABOUT = ("key", "first", "last", "rows", "sha256")


@contextmanager
def atomic_write(place: Path, name: str) -> Iterator[BinaryIO]:
    """Open a partial file that is synced to disk and renamed to ``place`` when the block ends without an error.

    Args:
        place: the path of the finished file.
        name: the beginning of the names of its partial files, see ``remove_partial_files``.
    """
    partial = place.with_name(f"{name}.{secrets.token_hex(8)}{PARTIAL_ENDING}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
        _sync(place.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial_files(folder: Path, name: str) -> None:
    """Remove the partial files that killed writers of a file left; the caller must hold its lock."""
    for partial in folder.glob(f"{name}.*{PARTIAL_ENDING}"):
        partial.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename survive a power failure, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Lock:
    """A lock file that this process holds; the kernel frees it when the process dies.

    Attributes:
        path: the file.
        held: the lock; None where the file system has no locks, so that other processes may hold it as well.
    """

    path: Path
    held: BaseFileLock | None

    @property
    def certain(self) -> bool:
        """Whether no other process holds it."""
        return self.held is not None

    def release(self) -> None:
        """Release it."""
        # Removed while it is held: a process that has opened the file sees that it is gone once it has the lock.
        with suppress(OSError):  # an open file cannot be removed everywhere; then it stays
            self.path.unlink()
        if self.held is not None:
            self.held.release()


def take_lock(path: Path) -> Lock | None:
    """Take a lock without waiting; None where another process holds it or has just removed its file.

    A file system without locks gives a lock that is not ``certain``: work may be done twice there, which costs time and
    nothing else. filelock's own substitute would outlive a killed process, and the run would wait for it forever.
    """
    if not path.parent.is_dir():  # filelock would make it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return Lock(path, None)
    return Lock(path, lock)


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """The columns of a shard: which image, which method, what went wrong, and the numbers.

    A name that ends in ``[]`` holds lists of numbers of half precision, such as maps.
    """
    fixed = [("index", pa.int64()), ("image", pa.string()), ("method", pa.string()), ("error", pa.string())]
    return pa.schema([*fixed, *((name, _LIST if name.endswith("[]") else pa.float64()) for name in columns)])


def write_shard(folder: Path, run: Run, shard: Shard, table: pa.Table) -> None:
    """Write a shard's file; whenever the process dies, the file is either there and whole or not there."""
    described = table.replace_schema_metadata(_about(run.key, shard, table))
    place = folder / f"{shard.name}{ENDING}"
    try:
        with atomic_write(place, shard.name) as file:
            pq.write_table(described, file, compression="zstd")
    except OSError as error:
        raise StorageError(f"{place} cannot be written: {error.strerror or error}") from error


# Files are opened here: pyarrow takes a path such as runs:1/shard.parquet for an address of another machine.


def read_columns(place: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of a shard's file, which must be undamaged."""
    with place.open("rb") as stream, pq.ParquetFile(stream) as file:
        return file.read(columns=list(columns), use_threads=False).replace_schema_metadata(None)


def order_of(table: pa.Table, run: Run, shard: Shard) -> NDArray[np.int64] | None:
    """Where a shard's table has each image's row of each method of the run, or None where its rows are others.

    The table's own columns decide, so that no number can stand under the name of another method.
    """
    if len(table) != len(shard) * len(run.methods):
        return None
    index, method = table["index"], pc.index_in(table["method"], value_set=pa.array(run.methods, pa.string()))
    if index.null_count or method.null_count:
        return None
    wanted = (index.to_numpy() - shard.first) * len(run.methods) + method.to_numpy()
    order = np.argsort(wanted, kind="stable")
    return order if np.array_equal(wanted[order], np.arange(len(table))) else None


def fault_of(folder: Path, run: Run, shard: Shard) -> str | None:
    """Why a shard's file cannot be used: ``missing``, or what is wrong with it; None where it is whole.

    Args:
        folder: the run's folder.
        run: what the shard belongs to.
        shard: which images.
    """
    place = folder / f"{shard.name}{ENDING}"
    if place.exists() and not place.is_file():  # a pipe would be waited for
        return f"{place} is damaged (it is not a file)"
    try:
        with place.open("rb") as file:
            # A flipped bit in a name, a string or a checksum shows only where it is decoded, as a ValueError.
            fault = _fault_in(pq.read_table(file, partitioning=None), run, shard)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, pa.ArrowException) as error:
        fault = f"is damaged ({error_message(error)})"
    return None if fault is None else f"{place} {fault}"


def _fault_in(table: pa.Table, run: Run, shard: Shard) -> str | None:
    stored = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    if stored.get("key") != run.key or not table.schema.equals(schema_of(run.columns)):
        return "belongs to another run"
    about = _about(run.key, shard, table)
    if any(stored.get(name) != about[name] for name in _ABOUT) or order_of(table, run, shard) is None:
        return "is damaged (its content is not what was written)"
    return None


def _about(key: str, shard: Shard, table: pa.Table) -> dict[str, str]:
    found = {"first": shard.first, "last": shard.last, "rows": len(table), "sha256": content_hash(table)}
    return {"key": key} | {name: str(value) for name, value in found.items()}


def content_hash(table: pa.Table) -> str:
    """The SHA-256 of what a table holds, whatever the file around it looks like; a missing number is its own value."""
    digest = hashlib.sha256()
    for name in table.column_names:
        column = table[name].combine_chunks()
        digest.update(f"{name}|{column.type}|".encode())
        digest.update(np.packbits(column.is_null().to_numpy(zero_copy_only=False)).tobytes())
        if pa.types.is_string(column.type):
            texts = [text.encode() for text in column.fill_null("").to_pylist()]
            digest.update(np.array([len(text) for text in texts], dtype=np.int64).tobytes() + b"".join(texts))
        elif pa.types.is_list(column.type):
            lengths = pc.fill_null(column.value_lengths(), 0)
            digest.update(lengths.to_numpy(zero_copy_only=False).astype(np.int64).tobytes())
            digest.update(column.flatten().to_numpy(zero_copy_only=False).tobytes())
        else:
            digest.update(pc.fill_null(column, 0).to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()
