"""Reads the lists that come with a data set: text in UTF-8, or an error that names the file."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from vitreous.errors import DataError

_MOST_DIGITS = 9  # no list has as many classes; Python reads no number of more than 4,300 digits
_SEPARATORS = ",;\t"  # spreadsheets write semicolons where people write numbers with a comma


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
