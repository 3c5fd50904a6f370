"""What every data set can do: tell how many photos or texts it has and what they are called, and load one at a time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from vitreous.datasets.sample import Review, Sample, Things
from vitreous.errors import DataError
from vitreous.paths import expanded


class DataSet(ABC):
    """Photos with labels or masks, or texts; opening lists them, and only ``load`` reads a photo.

    A pickled data set is its class and its path, so that a worker opens it again instead of receiving its list.

    Attributes:
        kind: How it is spelled before the colon of ``KIND:PATH``.
        holds: Photos or texts.
        summary: One line on what is expected at the path.
        origin: Where the set comes from, for messages on missing files.
        path: Where it is, as it was asked for.
    """

    kind: ClassVar[str]
    holds: ClassVar[Things] = "photos"
    summary: ClassVar[str]
    origin: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        self.path = expanded(path)
        if not self.path.exists():
            raise self._error("there is no such file or folder")

    def _refuse_repeated(self, names: Iterable[str], where: str = "") -> None:
        """Refuse a name that stands for two samples: rows of results are known by it."""
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self._error(f"{name} is listed twice{where}")
            seen.add(name)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a sample's name without reading it."""

    @abstractmethod
    def load(self, index: int) -> Sample | Review:
        """Read one sample.

        Raises:
            ImageError: Its photo or mask cannot be read.
            DataError: Something else about it is damaged.
            IndexError: There is no such sample.
        """

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The name of every label in index order, or None where they are unknown."""
        return None

    @property
    def classes(self) -> int | None:
        """How many classes its labels tell apart, photos of all of them or not; None where that is unknown."""
        return None if self.class_names is None else len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 over the kind and what ``_records`` says of every sample; the same on every machine."""
        digest = hashlib.sha256(self.kind.encode())
        for record in self._records():
            digest.update(b"\0" + record.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @abstractmethod
    def _records(self) -> Iterator[str]:
        """Yield cheaply what tells this set from others: names, labels, contents; no paths, no times."""

    def _error(self, problem: str) -> DataError:
        """Return the error for a set that cannot be opened."""
        return DataError(f"{self.path}: {problem}; {self.origin}")

    def _unreadable(self, error: OSError) -> DataError:
        """Return the error for a set of which a file cannot be read."""
        return self._error(f"{error.filename or self.path} cannot be read ({error.strerror or error})")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(),)

    def __repr__(self) -> str:
        return f"<{self.kind}:{self.path}, {len(self)} samples>"
