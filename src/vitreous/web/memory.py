"""The memory of this process: how much it has, and how what is free goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
from functools import cache
from pathlib import Path
from threading import Lock

_WORTH_IT = 32 * 2**20  # bytes
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Give the memory that this process has now; ``None`` where the system does not tell."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def give_back() -> None:
    """Give free memory back to the system: the C library keeps it for itself, gigabytes after a heavy request."""
    gc.collect()
    trim = _trim()
    if trim is not None:
        trim(0)


class Tidying:
    """Gives memory back whenever it has grown by much, and not more often: looking for it takes a while."""

    def __init__(self) -> None:
        self._before, self._lock = resident_bytes() or 0, Lock()

    def __call__(self) -> None:
        """Look, and give back what is free."""
        with self._lock:
            if (resident_bytes() or 0) - self._before > _WORTH_IT:
                give_back()
                self._before = resident_bytes() or 0


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """Give glibc's function for it, where there is one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
