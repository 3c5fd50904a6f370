"""The memory of this process: how much it has, and how what is free goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from functools import cache
from pathlib import Path
from threading import Lock

_WORTH_IT, _HEAVY = 32 * 2**20, 200 * 2**20  # bytes
_EVERY = 10.0  # seconds
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
    """Gives memory back when it has grown by much, and not all the time: looking for it stops everything a while."""

    def __init__(self) -> None:
        self._usual, self._last = resident_bytes() or 0, -math.inf
        self._lock = Lock()

    def __call__(self) -> None:
        """Look, and give back what is free."""
        with self._lock:
            grown = (resident_bytes() or 0) - self._usual
            if grown > _HEAVY or (grown > _WORTH_IT and time.monotonic() - self._last > _EVERY):
                give_back()
                # What stays may be needed, so the next look comes later; or somebody holds it for a moment longer.
                self._usual = (self._usual + (resident_bytes() or 0)) // 2
                self._last = time.monotonic()


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """Give glibc's function for it, where there is one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
