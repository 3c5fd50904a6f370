"""Lists and tables of data sets: plain lists, CSV files, and ``labels.csv`` with any of the usual column names."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from vitreous.errors import DataError

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
