"""A limit of time for what once waited for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Hung(BaseException):
    """Not an ``Exception``, so that nothing catches it."""


@contextmanager
def one_minute() -> Iterator[None]:
    """Raise ``Hung`` in a block that takes longer, which is much also for a machine that is busy with other things."""

    def alarm(*_):
        raise Hung

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
