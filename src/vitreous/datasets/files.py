"""Data sets of image files: listing and reading images and masks, and telling files with other content apart."""

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
from vitreous.inputs.images import SUFFIXES, Upright, read_photo, read_upright, turned

_WITHOUT_EXACT_COLOURS = ("JPEG", "MPO")


def read_values(file: Path) -> NDArray[Any]:
    """Return what is stored for each pixel: a palette index, a gray value, or (height, width, channels) of colours.

    Raises:
        ImageError: The file cannot be read.
    """
    return _values(read_upright(file).image)


def read_indices(file: Path) -> NDArray[Any]:
    """Return one number for each pixel.

    Raises:
        ImageError: The file cannot be read.
        DataError: It holds colours instead of numbers.
    """
    values = read_values(file)
    if values.ndim != 2 or values.dtype.kind not in "uib":
        raise DataError(f"{file}: this mask holds colours where one number per pixel is expected")
    return values.astype(np.uint8) if values.dtype.kind == "b" else values  # to numpy, yes and no are no numbers


def read_nonzero(file: Path) -> Mask:
    """Return 1 where anything but black is shown, 0 elsewhere; what is transparent counts by its colour.

    A palette may list its colours in any order: the number 0 is white in many masks of black and white. A JPEG keeps
    no pixel near an edge exactly black: there, black is what has less than half of the highest value.

    Raises:
        ImageError: The file cannot be read.
    """
    stored = read_upright(file).image
    # By way of RGBA, for Pillow warns of palettes with transparent colours that become RGB.
    values = _values(stored.convert("RGBA") if stored.mode in ("P", "PA") else stored)
    channels = values.reshape(*values.shape[:2], -1)
    nonzero: NDArray[np.bool_] = (channels != 0).any(axis=-1)
    if stored.format in _WITHOUT_EXACT_COLOURS:
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
    """Give the classes in a mask the numbers 1, 2, ... in their order, and say which they are.

    Args:
        numbers: 0 for background, n for the n-th of the classes.
        classes: The index of each class.
        ignored: What pixels hold that are not counted.
        file: Where the mask comes from, for the error message.
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


def turned_like_photo(mask: Mask, photo: Upright, file: Path) -> Mask:
    """Return the mask as it lies on a photo that was turned by its EXIF data.

    Most programs that make masks do not know EXIF and draw on the pixels as they are stored. A mask that says itself
    how it is turned was made by one that does, and so was one that has the size of the upright photo only.

    Args:
        mask: The mask, turned by its own EXIF data where it has any.
        photo: The photo.
        file: Where the mask comes from.
    """
    height, width = mask.shape
    if photo.orientation in (None, 1) or (width, height) != photo.stored_size:
        return mask
    if read_upright(file).orientation is not None:
        return mask
    # Pillow has no signed numbers of 16 bits.
    return np.asarray(turned(Image.fromarray(mask.astype(np.int32)), photo.orientation)).astype(np.int16)


def check_mask(mask: Mask, image: Image.Image, file: Path) -> None:
    """Raise unless the mask has the photo's size."""
    height, width = mask.shape
    if (width, height) != image.size:
        raise DataError(
            f"{file}: the mask has {width} x {height} pixels, but the photo has {image.width} x {image.height}"
        )


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
