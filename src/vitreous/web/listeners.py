"""Who reads the answers: a request whose answer nobody reads is not worked on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 10.0  # seconds: a page asks first and begins to listen then
_LOOK_EVERY = 0.05


class Listeners:
    """The open streams of answers of every visitor; used from the server's event loop alone."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def listening(self, visitor: str) -> Iterator[None]:
        """Note that a stream is open."""
        self._open[visitor] += 1
        try:
            yield
        finally:
            self._open[visitor] -= 1
            if self._open[visitor] <= 0:
                del self._open[visitor]

    async def awaited(self, visitor: str, grace: float = GRACE) -> bool:
        """Wait a while for somebody to listen; tell whether anybody does."""
        left = grace
        while visitor not in self._open and left > 0:
            await asyncio.sleep(_LOOK_EVERY)
            left -= _LOOK_EVERY
        return visitor in self._open
