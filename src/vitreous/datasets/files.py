"""Data sets of image files: listing, reading images and masks, hashing content.

Also their lists and tables: plain lists, CSV files, and ``labels.csv`` with any of the usual column names.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitreous._utils.messages import printable
from vitreous.datasets.dataset import IGNORED, DataSet, Mask, Sample
from vitreous.errors import DataError
from vitreous.inputs.images import SUFFIXES, Upright, read_oriented, read_upright, turned

_MAX_DIGITS = 9  # int() refuses more than 4,300 digits; no list has that many classes
_SEPARATORS = ",;\t"  # spreadsheets use semicolons in locales with a decimal comma

TABLE = "labels.csv"
NAMES = "class_names.json"
IMAGENET_COLUMN = "imagenet_index"
IMAGENET_CLASSES = 1000
_FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_path", "path", "name", "id", "image_id")
# In order of preference: indices before names, indices of model outputs before those of the data set. A bare "index"
# comes late, because it is often the row number.
_LABEL_COLUMNS = (
    IMAGENET_COLUMN,
    "class_index",
    "label_index",
    "class_id",
    "label_id",
    "label",
    "class",
    "target",
    "breed_index",
    "index",
    "class_name",
)


class ListError(DataError):
    """A list is damaged; the message names the file, and ``DataSet`` adds where to obtain the data set."""


def read_list(file: Path) -> str:
    """Return the text of a list without a byte order mark.

    Raises:
        ListError: It is not UTF-8.
        OSError: It cannot be read.
    """
    check_regular(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeError as error:
        raise ListError(f"{file} is not text in UTF-8") from error


def check_regular(file: Path) -> None:
    """Raise if a path exists and is neither a file nor a folder: opening a pipe would block.

    Raises:
        ListError: It is a pipe, a socket or a device.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ListError(f"{file} is not a file")


def number_in(text: str) -> int | None:
    """Parse a number in decimal digits; None if it is not one or is too large."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def read_table(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file; the separator is the most frequent candidate in the first line.

    Raises:
        ListError: It is not such a table.
        OSError: It cannot be read.
    """
    text = read_list(file)
    separator = max(_SEPARATORS, key=text.partition("\n")[0].count)
    try:
        return list(csv.reader(io.StringIO(text), delimiter=separator))
    except csv.Error as error:
        raise ListError(f"{file} is not a table with commas, semicolons or tabs ({error})") from error


def add_label(labels: dict[str, int], name: str, label: int, where: str) -> None:
    """Add the label of an image.

    Raises:
        ListError: The image has a label already.
    """
    if name in labels:
        raise ListError(f"{where}: {name} is listed twice")
    labels[name] = label


class LabelTable(NamedTuple):
    """The rows of a ``labels.csv``.

    Attributes:
        labels: The class index by file name, in the order of the table.
        column: The column of the class indices.
    """

    labels: dict[str, int]
    column: str

    def classes(self, class_names: tuple[str, ...] | None) -> int | None:
        """Return the number of classes, including classes without an image; None if unknown."""
        if self.column == IMAGENET_COLUMN:
            return IMAGENET_CLASSES
        # Labels beyond the class names are indices of something else.
        return None if class_names is None or max(self.labels.values()) >= len(class_names) else len(class_names)


def read_labels(file: Path, class_names: tuple[str, ...] | None = None) -> LabelTable:
    """Read a table with a header, one row per image.

    Args:
        file: The table.
        class_names: With these, the label column may contain names instead of indices.

    Raises:
        ListError: It is not a table, a column is missing, or a row has no valid class, repeats a file, or names a file
            outside of the data set.
        OSError: It cannot be read.
    """
    rows = _rows(file)
    header = [cell.strip().lower() for cell in rows[0]]
    file_column = _column(header, _FILE_COLUMNS, file, "a file")
    label_column = _column(header, _LABEL_COLUMNS, file, "a class")
    labels: dict[str, int] = {}
    for number, row in enumerate(rows[1:], start=2):
        where = f"{file}, row {number}"
        if len(row) <= max(file_column, label_column):
            raise ListError(f"{where}: there are {len(row)} columns where the header has {len(header)}")
        name = _inside(row[file_column].strip(), where)
        add_label(labels, name, _index(row[label_column].strip(), class_names, where), where)
    return LabelTable(labels, header[label_column])


def read_class_names(file: Path) -> tuple[str, ...] | None:
    """Read a JSON list of class names in index order; None if the file does not exist.

    Raises:
        ListError: It is not such a list.
    """
    if not file.is_file():
        return None
    try:
        names = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:
        raise ListError(f"{file}: this is not JSON ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ListError(f"{file}: this is not a list of class names")
    return tuple(names)


def _rows(file: Path) -> list[list[str]]:
    rows = [row for row in read_table(file) if any(cell.strip() for cell in row)]
    if len(rows) < 2:
        raise ListError(f"{file}: the table has no rows below its header")
    return rows


def _column(header: list[str], known: tuple[str, ...], file: Path, what: str) -> int:
    for name in known:
        if name in header:
            return header.index(name)
    raise ListError(f"{file}: no column names {what}; the header is {','.join(header)}, known are {', '.join(known)}")


def _inside(name: str, where: str) -> str:
    """Check that a file name stays inside the data set: a downloaded table must not point to other files."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise ListError(f"{where}: {name!r} is not the name of a file inside the data set")
    return str(path)


def _index(text: str, class_names: tuple[str, ...] | None, where: str) -> int:
    if (number := number_in(text)) is not None:
        return number
    if class_names is None:
        raise ListError(f"{where}: {text!r} is not a class index, and there is no {NAMES} to find the name in")
    if text not in class_names:
        raise ListError(f"{where}: {text!r} is neither a class index nor a name in {NAMES}")
    places = [index for index, name in enumerate(class_names) if name == text]
    if len(places) > 1:
        numbers = " and ".join(map(str, places))
        raise ListError(f"{where}: several classes of {NAMES} are called {text!r}: {numbers}; give the index")
    return places[0]


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
