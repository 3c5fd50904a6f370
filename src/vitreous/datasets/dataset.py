"""The data set interface, and opening data sets by name (``KIND:PATH``)."""

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
IGNORED = -1  # in a mask: a pixel that is not evaluated

Things = Literal["photos", "texts", "volumes"]


@dataclass(frozen=True)
class Sample:
    """One image of a data set with its annotations.

    Attributes:
        name: Unique in its data set and the same on every machine.
        image: The image, upright RGB, in its stored resolution.
        label: Index of the true class among the model's outputs; None if unknown.
        mask: (height, width) of the image: 0 background, n the n-th object, -1 ignored; None without a mask.
        objects: The class of object 1, 2, ...; None for objects of unknown class.
    """

    name: str
    image: Image.Image
    label: int | None = None
    mask: Mask | None = None
    objects: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Review:
    """One text of a data set with its annotations.

    Attributes:
        name: Unique in its data set and the same on every machine.
        words: The words of the text, split at white space as the data set does.
        label: Index of the true class.
        rationale: For each word, whether annotators marked it as evidence.
    """

    name: str
    words: tuple[str, ...]
    label: int
    rationale: NDArray[np.bool_]


@dataclass(frozen=True)
class VolumeSample:
    """One volume or clip of a data set. The preprocessing of the model reads its file, since it has the window.

    Attributes:
        name: Unique in its data set and the same on every machine.
        file: A file of a volume, or a folder of frames.
        label: Index of the true class among the model's outputs; None if unknown.
    """

    name: str
    file: Path
    label: int | None = None


AnySample = Sample | Review | VolumeSample


class DataSet(ABC):
    """Images with labels or masks, texts, or volumes. Opening lists the samples; only ``load`` reads an image.

    Only the class and the path are pickled, so a worker opens the data set again instead of receiving its list.

    Attributes:
        kind: The part before the colon of ``KIND:PATH``.
        holds: ``"photos"`` for images, ``"texts"``, or ``"volumes"`` for volumes and clips.
        summary: One line on what is expected at the path.
        origin: Where to obtain the data set, for messages about missing files.
        path: The path that was given.
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
        """Raise if two samples have the same name: results are stored by name."""
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
    def load(self, index: int) -> AnySample:
        """Read one sample.

        Raises:
            ImageError: The image or mask cannot be read.
            DataError: Another part of the sample is damaged.
            IndexError: There is no such sample.
        """

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The class names in index order; None if unknown."""
        return None

    @property
    def classes(self) -> int | None:
        """The number of classes of the labels, including classes without an image; None if unknown."""
        return None if self.class_names is None else len(self.class_names)

    def labels(self) -> list[int | None] | None:
        """Return the label of every sample, or None where that is not known before samples are read."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the kind and of all ``_records``; the same on every machine."""
        digest = hashlib.sha256(self.kind.encode())
        for record in self._records():
            digest.update(b"\0" + record.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @abstractmethod
    def _records(self) -> Iterator[str]:
        """Yield what identifies the content: names, labels and hashes of files, but no paths or times."""

    def _error(self, problem: str) -> DataError:
        """Return the error for a data set that cannot be opened."""
        return DataError(f"{self.path}: {problem}; {self.origin}")

    def _unreadable(self, error: OSError) -> DataError:
        """Return the error for a file that cannot be read."""
        return self._error(f"{error.filename or self.path} cannot be read ({error.strerror or error})")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(),)

    def __repr__(self) -> str:
        return f"<{self.kind}:{self.path}, {len(self)} samples>"


class DerivedDataSet(DataSet):
    """The samples of another data set in another order or form.

    Attributes:
        form: What is different, as part of the fingerprint.
    """

    form: ClassVar[str]

    def __init__(self, listed: DataSet, setting: int) -> None:
        self.path = listed.path  # may be a member of an archive, which DataSet.__init__ would not find
        self._listed, self._setting = listed, setting

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the underlying data set."""
        return self._listed.kind

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The summary of the underlying data set."""
        return self._listed.summary

    @property
    def origin(self) -> str:  # type: ignore[override]
        """The origin of the underlying data set."""
        return self._listed.origin

    @property
    def holds(self) -> Things:  # type: ignore[override]
        """What the underlying data set holds."""
        return self._listed.holds

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._listed.class_names

    @property
    def classes(self) -> int | None:
        return self._listed.classes

    @cached_property
    def fingerprint(self) -> str:
        """Differs from the fingerprint of the underlying data set."""
        return hashlib.sha256(f"{self._listed.fingerprint} {self.form} {self._setting}".encode()).hexdigest()

    def _records(self) -> Iterator[str]:
        return iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._listed, self._setting)


class Shuffled(DerivedDataSet):
    """The samples of another data set in an order that depends on ``seed`` alone, the same on every machine.

    Many sets list one class after the other: their first 100 photos say little about the rest.
    """

    form = "shuffled by"

    def __init__(self, listed: DataSet, seed: int) -> None:
        super().__init__(listed, seed)
        self._order = self._draw(np.random.Generator(np.random.PCG64(seed)))

    def _draw(self, random: np.random.Generator) -> NDArray[np.int64]:
        return random.permutation(len(self._listed))

    def name(self, index: int) -> str:
        return self._listed.name(int(self._order[index]))

    def load(self, index: int) -> AnySample:
        return self._listed.load(int(self._order[index]))

    def labels(self) -> list[int | None] | None:
        known = self._listed.labels()
        return None if known is None else [known[place] for place in self._order]


class Stratified(Shuffled):
    """The same, with the classes in turn: of any number of samples from the first on, all classes have equally many.

    One class may have one sample more than another, and those that have run out are left out.

    Raises:
        DataError: the labels are not known before samples are read.
    """

    form = "stratified by"

    def _draw(self, random: np.random.Generator) -> NDArray[np.int64]:
        labels = self._listed.labels()
        if labels is None:
            raise DataError(
                f"{self.path}: the labels of {self._listed.kind} are not known before its {self._listed.holds} are "
                "read, so no stratified sample can be drawn; shuffle instead"
            )
        seen: dict[int | None, int] = {}
        turns = np.empty(len(labels), dtype=np.int64)
        order = random.permutation(len(labels))
        for place in order:
            turns[place] = seen.get(labels[place], 0)
            seen[labels[place]] = int(turns[place]) + 1
        ordered: NDArray[np.int64] = order[np.argsort(turns[order], kind="stable")]
        return ordered


_PACKAGE = __name__.rpartition(".")[0]


def open_dataset(spec: str) -> DataSet:
    """Open a data set in its published layout, without reading an image.

    Args:
        spec: ``KIND:PATH``, with one of the kinds of ``list_datasets``.

    Raises:
        DataError: The kind is unknown, or the data set is missing or damaged. The message names what is missing and
            where to obtain it.
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
    """Return the kinds of data sets, each with one line on what is expected at the path."""
    return {kind: found.summary for kind, found in _kinds().items()}


@cache
def _kinds() -> dict[str, type[DataSet]]:
    """Return the data set classes of this package by kind."""
    package = import_module(_PACKAGE)
    for module in iter_modules(package.__path__, f"{_PACKAGE}."):
        import_module(module.name)
    # Data sets defined by users are opened by their class, not by name.
    own = [each for each in _subclasses(DataSet) if each.__module__.startswith(f"{_PACKAGE}.")]
    named = {each.__dict__["kind"]: each for each in own if isinstance(each.__dict__.get("kind"), str)}
    return {kind: named[kind] for kind in sorted(named)}


def _subclasses(kind: type[Any]) -> Iterator[type[DataSet]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
