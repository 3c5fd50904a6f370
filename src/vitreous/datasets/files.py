"""Data sets of image files: listing, reading images and masks, hashing content."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitreous._utils.messages import printable
from vitreous.datasets.dataset import IGNORED, DataSet, Mask, Sample
from vitreous.datasets.lists import ListError
from vitreous.errors import DataError
from vitreous.inputs.images import SUFFIXES, Upright, read_oriented, read_upright, turned

_LOSSY_FORMATS = ("JPEG", "MPO")


def read_values(file: Path) -> NDArray[Any]:
    """Return the stored pixels: palette indices or gray values (height, width), or colours (height, width, channels).

    Raises:
        ImageError: The file cannot be read.
    """
    return _values(read_upright(file).image)


def read_indices(file: Path) -> NDArray[Any]:
    """Return the stored integers, (height, width).

    Raises:
        ImageError: The file cannot be read.
        DataError: The file contains colours instead of integers.
    """
    values = read_values(file)
    if values.ndim != 2 or values.dtype.kind not in "uib":
        raise DataError(f"{file}: this mask holds colours where one number per pixel is expected")
    return values.astype(np.uint8) if values.dtype.kind == "b" else values


def read_nonzero(file: Path) -> Mask:
    """Return 1 where a pixel is not black, 0 elsewhere; transparency is ignored.

    Palette images are compared by colour, not by index: index 0 is white in many black-and-white masks. JPEG artefacts
    leave no exact black near an edge, so in a JPEG everything below half of the highest value is black.

    Raises:
        ImageError: The file cannot be read.
    """
    stored = read_upright(file).image
    # Via RGBA, because Pillow warns when a palette with transparency is converted to RGB.
    values = _values(stored.convert("RGBA") if stored.mode in ("P", "PA") else stored)
    channels = values.reshape(*values.shape[:2], -1)
    nonzero: NDArray[np.bool_] = (channels != 0).any(axis=-1)
    if stored.format in _LOSSY_FORMATS:
        nonzero &= channels.max(axis=-1) >= channels.max() / 2
    return nonzero.astype(np.int16)


def _values(stored: Image.Image) -> NDArray[Any]:
    if stored.mode in ("LA", "La"):
        stored = stored.getchannel(0)
    elif stored.mode not in ("1", "L", "P", "I", "F") and not stored.mode.startswith("I;16"):
        stored = stored.convert("RGB")
    return np.asarray(stored)


def renumbered(
    numbers: NDArray[Any], classes: Sequence[int], *, ignored: int, file: Path
) -> tuple[Mask, tuple[int | None, ...]]:
    """Renumber the classes in a mask to 1, 2, ... and return the mask and the classes in that order.

    Args:
        numbers: 0 for background, n for the n-th class.
        classes: The index of each class.
        ignored: The value of ignored pixels.
        file: The file of the mask, for error messages.
    """
    present = [int(number) for number in np.unique(numbers) if number not in (0, ignored)]
    if present and not 1 <= min(present) <= max(present) <= len(classes):
        other = present[0] if present[0] < 1 else present[-1]
        raise DataError(f"{file}: the mask holds the number {other}, but there are {len(classes)} classes")
    mask = np.zeros(numbers.shape, dtype=np.int16)
    for place, number in enumerate(present, start=1):
        mask[numbers == number] = place
    mask[numbers == ignored] = IGNORED
    return mask, tuple(classes[number - 1] for number in present)


def orient_mask(mask: Mask, upright: Upright, file: Path) -> Mask:
    """Rotate a mask like its image, whose EXIF orientation was applied.

    Most annotation tools ignore EXIF and draw on the stored pixels. A mask with an EXIF orientation of its own, or with
    the size of the upright image and not of the stored one, is taken to be upright already.

    Args:
        mask: The mask, with its own EXIF orientation applied.
        upright: The image.
        file: The file of the mask.
    """
    height, width = mask.shape
    if upright.orientation in (None, 1) or (width, height) != upright.stored_size:
        return mask
    if read_upright(file).orientation is not None:
        return mask
    # Pillow has no signed 16-bit mode.
    return np.asarray(turned(Image.fromarray(mask.astype(np.int32)), upright.orientation)).astype(np.int16)


def check_mask(mask: Mask, image: Image.Image, file: Path) -> None:
    """Raise unless the mask has the image's size."""
    height, width = mask.shape
    if (width, height) != image.size:
        raise DataError(
            f"{file}: the mask has {width} x {height} pixels, but the image has {image.width} x {image.height}"
        )


_HASH_THREADS = 16  # hashing is bound by the latency of disks and file servers
_FILES_AT_ONCE = 4096

ABSENT = "absent"


def content_hash(file: Path) -> str:
    """Return the SHA-256 of a file; ``absent`` if it cannot be read."""
    try:
        if not file.is_file():  # opening a pipe would block
            return ABSENT
        with file.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):  # ValueError: not a valid file name
        return ABSENT


def content_hashes(files: Sequence[Path]) -> Iterator[str]:
    """Yield the hash of each file in order, reading several in parallel."""
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        for first in range(0, len(files), _FILES_AT_ONCE):
            yield from threads.map(content_hash, files[first : first + _FILES_AT_ONCE])


class Item(NamedTuple):
    """A listed sample; paths are relative to the root of the data set."""

    name: str
    image: str
    label: int | None = None
    mask: str | None = None


class FileDataSet(DataSet):
    """A data set of image files.

    Attributes:
        root: The folder that the paths of items are relative to.
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
        upright = read_oriented(self.root / item.image)
        if item.mask is None:
            return Sample(item.name, upright.image, item.label)
        mask, objects = self._read_mask(item)
        mask = orient_mask(mask, upright, self.root / item.mask)
        check_mask(mask, upright.image, self.root / item.image)
        return Sample(item.name, upright.image, self._label(item, mask, objects), mask, objects)

    def labels(self) -> list[int | None] | None:
        known = [item.label for item in self._items]
        return known if any(label is not None for label in known) else None

    @abstractmethod
    def _list(self) -> Sequence[Item]:
        """Return all items in order; set ``root`` first if it differs from ``path``."""

    def _read_mask(self, item: Item) -> tuple[Mask, tuple[int | None, ...]]:
        """Return the mask of an item and the classes of its objects; data sets with masks override it."""
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
            raise self._error("it holds no images")
        self._refuse_repeated(item.name for item in self._items)


def _with_printable_names(items: Sequence[Item]) -> Sequence[Item]:
    """Replace names that UTF-8 cannot encode; paths are unchanged."""
    taken = {item.name for item in items}
    named = []
    for item in items:
        name = printable(item.name)
        if name != item.name:
            while name in taken:  # another file has the escaped name
                name += "_"
            taken.add(name)
        named.append(item._replace(name=name))
    return named


def image_names(folder: Path) -> list[str]:
    """Return the sorted file names of the images directly inside a folder; empty if there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    return sorted(name for name in names if stem_of(name) != name and not name.startswith("."))


def stem_of(name: str) -> str:
    """Return a file name without its image suffix; other names are unchanged."""
    stem, dot, suffix = name.rpartition(".")
    return stem if f".{suffix.lower()}" in SUFFIXES and dot else name


def by_stem(names: Sequence[str]) -> dict[str, str]:
    """Return file names by their stem."""
    return {stem_of(name): name for name in names}
