"""The files that visitors leave: never more than so many bytes in all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_AT_ONCE = 8  # files that are being received


class Uploads:
    """The folder that files go into.

    Args:
        folder: The folder.
        largest: The bytes of the largest file that is taken.
        limit: The bytes of all files; those that are being received come on top.
    """

    def __init__(self, folder: Path, largest: int, limit: int) -> None:
        self.folder, self.largest, self.limit = folder, largest, limit
        self._kept = frozenset(folder.glob("*"))  # the examples, which belong to the page
        self._receiving = asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Wait for a turn, and make room for one file more."""
        async with self._receiving:
            await asyncio.to_thread(keep_within, self.folder, self.limit - self.largest, self._kept)
            yield


def keep_within(folder: Path, limit: int, kept: frozenset[Path] = frozenset()) -> None:
    """Delete the oldest files below a folder, but for ``kept``, until all of them take no more than ``limit`` bytes.

    Folders that become empty go as well.
    """
    found = []
    for file in folder.rglob("*"):
        try:
            if file.is_file() and file not in kept:
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        except OSError:  # gone meanwhile
            continue
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= limit:
            return
        file.unlink(missing_ok=True)
        total -= size
        if file.parent != folder:
            try:
                file.parent.rmdir()
            except OSError:  # there is something else in it
                continue
