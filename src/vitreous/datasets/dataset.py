"""What every data set can do, and data sets by name (``KIND:PATH``)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitreous._utils.messages import close_match
from vitreous._utils.storage import expanded
from vitreous.errors import DataError

Mask = NDArray[np.int16]
IGNORED = -1  # in a mask: a pixel that does not count

Things = Literal["photos", "texts"]


@dataclass(frozen=True)
class Sample:
    """One photo of a data set and what is known of it.

    Attributes:
        name: Unique in its data set and the same on every machine.
        image: The photo, upright RGB, as stored.
        label: The index of the model's output that is right, where it is known.
        mask: (height, width) of the image: 0 background, n the n-th object, -1 not counted; None where there is none.
        objects: The class of object 1, 2, ...; None where a mask says that something is an object, but not which.
    """

    name: str
    image: Image.Image
    label: int | None = None
    mask: Mask | None = None
    objects: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Review:
    """One text of a data set and what is known of it.

    Attributes:
        name: Unique in its data set and the same on every machine.
        words: The text as the data set counts its words: what is between white space.
        label: The index of the data set's class that is right.
        rationale: For each word whether people marked it as a reason.
    """

    name: str
    words: tuple[str, ...]
    label: int
    rationale: NDArray[np.bool_]


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


class Shuffled(DataSet):
    """The samples of another data set in an order that depends on ``seed`` alone, the same on every machine.

    Many sets list one class after the other: their first 100 photos say little about the rest.
    """

    def __init__(self, listed: DataSet, seed: int) -> None:
        self.path = listed.path  # it was opened there, be it a part of an archive that no folder lists
        self._listed, self._seed = listed, seed
        self._order = np.random.Generator(np.random.PCG64(seed)).permutation(len(listed))

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the set that is shuffled."""
        return self._listed.kind

    @property
    def summary(self) -> str:  # type: ignore[override]
        """What the set that is shuffled expects at its path."""
        return self._listed.summary

    @property
    def origin(self) -> str:  # type: ignore[override]
        """Where the set that is shuffled comes from."""
        return self._listed.origin

    @property
    def holds(self) -> Things:  # type: ignore[override]
        """What the set that is shuffled holds."""
        return self._listed.holds

    def __len__(self) -> int:
        return len(self._listed)

    def name(self, index: int) -> str:
        return self._listed.name(int(self._order[index]))

    def load(self, index: int) -> Sample | Review:
        return self._listed.load(int(self._order[index]))

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._listed.class_names

    @property
    def classes(self) -> int | None:
        return self._listed.classes

    @cached_property
    def fingerprint(self) -> str:
        """Another one than the listed set's, for the first photos are others."""
        return hashlib.sha256(f"{self._listed.fingerprint} shuffled by {self._seed}".encode()).hexdigest()

    def _records(self) -> Iterator[str]:
        return iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._listed, self._seed)


_PACKAGE = __name__.rpartition(".")[0]


def open_dataset(spec: str) -> DataSet:
    """Open a data set in its original layout, without reading an image.

    Args:
        spec: ``KIND:PATH``, with one of the kinds that ``list_datasets`` describes.

    Raises:
        DataError: The kind is unknown, or the set is missing or damaged; it says what is missing and where it comes
            from.
        MissingDependencyError: The kind needs an extra that is not installed.
    """
    kinds = _kinds()
    kind, colon, path = spec.partition(":")
    if not colon or not path:
        raise DataError(f"a data set is spelled KIND:PATH, not {spec!r}; kinds are {', '.join(kinds)}")
    if kind not in kinds:
        hint = close_match(kind, kinds) or f"; kinds are {', '.join(kinds)}"
        raise DataError(f"there is no kind of data set {kind!r}{hint}")
    return kinds[kind](path)


def list_datasets() -> dict[str, str]:
    """Return the kinds of data sets with a line each on what is expected at the path."""
    return {kind: found.summary for kind, found in _kinds().items()}


@cache
def _kinds() -> dict[str, type[DataSet]]:
    """Return every class of this package that has a kind, by that."""
    package = import_module(_PACKAGE)
    for module in iter_modules(package.__path__, f"{_PACKAGE}."):
        import_module(module.name)
    # Data sets of a user's own are opened by their class.
    own = [each for each in _subclasses(DataSet) if each.__module__.startswith(f"{_PACKAGE}.")]
    named = {each.__dict__["kind"]: each for each in own if isinstance(each.__dict__.get("kind"), str)}
    return {kind: named[kind] for kind in sorted(named)}


def _subclasses(kind: type[Any]) -> Iterator[type[DataSet]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
