"""The files of a run: written atomically, locked between processes, and checked when they are read.

``storage.atomic_file`` is for files that one process writes for a person: it follows links and waits for no disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import BaseFileLock, FileLock, Timeout
from numpy.typing import NDArray

from vitreous._utils.messages import error_message
from vitreous._utils.storage import StorageError
from vitreous.evaluation.store.run import Run, Shard

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
