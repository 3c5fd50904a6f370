"""Data sets of image files: listing, reading and telling files with other content apart."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from vitreous._utils.text import printable
from vitreous.datasets.dataset import DataSet, Mask, Sample
from vitreous.datasets.lists import ListError
from vitreous.datasets.masks import check_mask, turned_like_photo
from vitreous.inputs.images import SUFFIXES, read_photo

_READERS = 16  # waiting for a disk or a file server takes longer than reading
_AT_ONCE = 4096

ABSENT = "absent"


def content_hash(file: Path) -> str:
    """Return the sha256 of a file; ``absent`` where it cannot be read."""
    try:
        if not file.is_file():  # opening a pipe would wait for ever
            return ABSENT
        with file.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):  # ValueError: no file can be called so
        return ABSENT


def content_hashes(files: Sequence[Path]) -> Iterator[str]:
    """Yield the hash of each file, in order, reading several at once."""
    with ThreadPoolExecutor(_READERS) as readers:
        for first in range(0, len(files), _AT_ONCE):
            yield from readers.map(content_hash, files[first : first + _AT_ONCE])


class Item(NamedTuple):
    """Where a sample is and what is known of it before it is read; paths are relative to the set's root."""

    name: str
    image: str
    label: int | None = None
    mask: str | None = None


class FileDataSet(DataSet):
    """A data set of files.

    Attributes:
        root: The folder that the items' paths start from.
    """

    root: Path

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.root = self.path
        try:
            self._items = _with_printable_names(self._list())
        except ListError as error:
            raise self._error(str(error)) from error
        except OSError as error:
            raise self._unreadable(error) from error
        self._check_names()

    def __len__(self) -> int:
        return len(self._items)

    def name(self, index: int) -> str:
        return self._items[index].name

    def load(self, index: int) -> Sample:
        item = self._items[index]
        photo = read_photo(self.root / item.image)
        if item.mask is None:
            return Sample(item.name, photo.image, item.label)
        mask, objects = self._read_mask(item)
        mask = turned_like_photo(mask, photo, self.root / item.mask)
        check_mask(mask, photo.image, self.root / item.image)
        return Sample(item.name, photo.image, self._label(item, mask, objects), mask, objects)

    @abstractmethod
    def _list(self) -> Sequence[Item]:
        """Return all items in their order, after setting the root where it is not the path."""

    def _read_mask(self, item: Item) -> tuple[Mask, tuple[int | None, ...]]:
        """Return an item's mask and the classes of its objects; sets with masks say how."""
        raise NotImplementedError

    def _label(self, item: Item, _mask: Mask, _objects: tuple[int | None, ...]) -> int | None:
        """Return the label of a sample with a mask."""
        return item.label

    def _records(self) -> Iterator[str]:
        files = [self.root / file for item in self._items for file in (item.image, item.mask) if file is not None]
        hashes = content_hashes(files)
        for item in self._items:
            contents = [next(hashes) for file in (item.image, item.mask) if file is not None]
            yield "|".join(map(str, (item.name, item.label, *contents)))

    def _check_names(self) -> None:
        if not self._items:
            raise self._error("it holds no photos")
        self._refuse_repeated(item.name for item in self._items)


def _with_printable_names(items: Sequence[Item]) -> Sequence[Item]:
    """Give items names that can be stored and shown; their paths stay as they are."""
    taken = {item.name for item in items}
    named = []
    for item in items:
        name = printable(item.name)
        if name != item.name:
            while name in taken:  # another file is called like the escape
                name += "_"
            taken.add(name)
        named.append(item._replace(name=name))
    return named


def photo_names(folder: Path) -> list[str]:
    """Return the file names of the photos directly inside a folder, sorted; an absent folder has none."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    return sorted(name for name in names if stem_of(name) != name and not name.startswith("."))


def stem_of(name: str) -> str:
    """Return a photo's file name without its suffix; a name without a photo's suffix stays as it is."""
    stem, dot, suffix = name.rpartition(".")
    return stem if f".{suffix.lower()}" in SUFFIXES and dot else name


def by_stem(names: Sequence[str]) -> dict[str, str]:
    """Return file names by what is before their suffix."""
    return {stem_of(name): name for name in names}
