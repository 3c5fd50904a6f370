"""Tells files with other content apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_READERS = 16  # waiting for a disk or a file server takes longer than reading
_AT_ONCE = 4096

ABSENT = "absent"


def content_hash(file: Path) -> str:
    """Return the sha256 of a file; ``absent`` where it cannot be read."""
    try:
        if not file.is_file():  # opening a pipe would wait for ever
            return ABSENT
        with file.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):  # ValueError: no file can be called so
        return ABSENT


def content_hashes(files: Sequence[Path]) -> Iterator[str]:
    """Yield the hash of each file, in order, reading several at once."""
    with ThreadPoolExecutor(_READERS) as readers:
        for first in range(0, len(files), _AT_ONCE):
            yield from readers.map(content_hash, files[first : first + _AT_ONCE])
