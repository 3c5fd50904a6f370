"""Reads the lists of data sets: plain lists, tables, and ``labels.csv`` under any of the usual column names."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from vitreous.errors import DataError

_MOST_DIGITS = 9  # no list has as many classes; Python reads no number of more than 4,300 digits
_SEPARATORS = ",;\t"  # spreadsheets write semicolons where people write numbers with a comma

TABLE = "labels.csv"
NAMES = "class_names.json"
IMAGENET_COLUMN = "imagenet_index"
IMAGENET_CLASSES = 1000
_FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_path", "path", "name", "id", "image_id")
# Indices before names; the index of the model's output before one of the set's own. A bare "index" comes after
# them: it is also what programs call the number of a row.
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
    """A list is damaged; the message names the file and not yet where the set comes from."""


def read_list(file: Path) -> str:
    """Return the text of a list, without the mark that some programs put in front of it.

    Raises:
        ListError: It is not text in UTF-8.
        OSError: It cannot be read.
    """
    check_regular(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeError as error:
        raise ListError(f"{file} is not text in UTF-8") from error


def check_regular(file: Path) -> None:
    """Raise where there is something else than a file or a folder: opening a pipe would wait for ever.

    Raises:
        ListError: It is a pipe, a socket or a device.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ListError(f"{file} is not a file")


def number_in(text: str) -> int | None:
    """Return the number that a list writes in decimal digits, or None where it is none or far beyond any count."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def read_table(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file; its cells are separated by what its first line has most of.

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
    """Note the class of a photo.

    Raises:
        ListError: It has one already: which of two is right is not for a reader to choose.
    """
    if name in labels:
        raise ListError(f"{where}: {name} is listed twice")
    labels[name] = label


class LabelTable(NamedTuple):
    """The rows of a ``labels.csv``.

    Attributes:
        labels: The class index of each file, in the table's order; files as they are written there.
        column: The column that the indices were taken from.
    """

    labels: dict[str, int]
    column: str

    def classes(self, class_names: tuple[str, ...] | None) -> int | None:
        """How many classes there are, photos of all of them or not; None where neither column nor names tell."""
        if self.column == IMAGENET_COLUMN:
            return IMAGENET_CLASSES
        # Names that do not reach as far as the labels are not what those count.
        return None if class_names is None or max(self.labels.values()) >= len(class_names) else len(class_names)


def read_labels(file: Path, class_names: tuple[str, ...] | None = None) -> LabelTable:
    """Read a table with a header, one row per photo.

    Args:
        file: The table.
        class_names: Lets the label column hold names instead of indices.

    Raises:
        ListError: It is no table, a column is missing, or a row names no class, a file twice, or a file outside of the
            set.
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
    """Read a JSON list of class names in index order; None where there is no such file.

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
    """Return a file name that stays inside the set: a table from elsewhere must not point to other files."""
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
