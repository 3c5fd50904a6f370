"""Locks between processes, which the kernel frees when their holder dies."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

if sys.platform != "win32":  # Windows has no such locks: work may be done twice there, which costs time, nothing else
    import fcntl


@dataclass(frozen=True)
class Lock:
    """A lock file that this process holds.

    Attributes:
        path: the file.
        descriptor: the open file that holds it.
        certain: False where the system or the file system has no locks, so that others may hold it as well.
    """

    path: Path
    descriptor: int
    certain: bool

    def release(self) -> None:
        """Let others have it."""
        with suppress(OSError):  # an open file cannot be removed everywhere; then it stays
            self.path.unlink()
        os.close(self.descriptor)


def take(path: Path) -> Lock | None:
    """Take a lock without waiting; None where another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if sys.platform == "win32":
            return Lock(path, descriptor, certain=False)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            return Lock(path, descriptor, certain=False)
        if _is_still(path, descriptor):
            return Lock(path, descriptor, certain=True)
        # Its holder removed the file between opening and locking it here: who comes next would lock another file.
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
