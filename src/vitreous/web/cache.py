"""A store that keeps what was used last and never more bytes than it was given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Something that knows how many bytes of memory it takes; it may grow."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes now."""


Value = TypeVar("Value", bound=Sized)


class BoundedCache(Generic[Value]):
    """Values by key, the least recently used dropped first; safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """The bytes that all values take now."""
        with self._lock:
            return sum(value.nbytes for value in self._values.values())

    def get(self, key: Hashable) -> Value | None:
        """Give a value and remember that it was used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value, or note that it has grown; others go until all fit. One too large by itself is not kept."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            total = sum(each.nbytes for each in self._values.values())
            while total > self.limit and self._values:
                _, dropped = self._values.popitem(last=False)
                total -= dropped.nbytes
