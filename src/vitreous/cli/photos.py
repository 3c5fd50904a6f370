"""Photos as they are named on a command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from vitreous.errors import ImageError
from vitreous.images import SUFFIXES, find_images
from vitreous.models import demo

_NAMED_SUBFOLDERS = 5
_MOST_FOLDERS = 10_000  # that are looked into only to tell what was left out


@dataclass(frozen=True)
class LeftOut:
    """What was not taken of a folder.

    Attributes:
        folder: the folder.
        others: files directly inside it whose names are not those of photos, hidden ones aside.
        subfolders: photos in each folder below it, by its path from there.
    """

    folder: Path
    others: int = 0
    subfolders: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """In a sentence; empty where nothing was left out."""
        parts = []
        if self.others:
            parts.append(f"{_counted(self.others, 'file')} without the name of a photo")
        if self.subfolders:
            photos = _counted(sum(self.subfolders.values()), "photo")
            parts.append(f"{photos} in {self.places} (--recursive takes them)")
        return f"{self.folder}: left out {' and '.join(parts)}" if parts else ""

    @property
    def places(self) -> str:
        """The subfolders, the first few by name."""
        named = [f"{name}: {count}" for name, count in self.subfolders.items()]
        more = len(named) - _NAMED_SUBFOLDERS
        listed = ", ".join(named[:_NAMED_SUBFOLDERS]) + (f", and {more} more" if more > 0 else "")
        return f"{_counted(len(named), 'subfolder')} ({listed})"


def photos_of(argument: str, *, recursive: bool = False) -> tuple[list[Path], LeftOut | None]:
    """Give the photos that a file, a folder or the word ``demo`` stands for, and what was left out of a folder.

    Args:
        argument: what was typed.
        recursive: whether photos in subfolders count; hidden subfolders and links to folders never do.

    Raises:
        ImageError: A folder cannot be listed or holds no photo, or a name is empty.
    """
    if not argument:
        raise ImageError("a photo's name is empty; . is the current folder")
    path = demo.PHOTO if argument == "demo" and not Path(argument).exists() else Path(argument)
    if not os.path.isdir(path):  # noqa: PTH112 - no error where no file can be called so
        return find_images([path]), None
    inside, *below = _listed(path) if recursive else islice(_listed(path), _MOST_FOLDERS)
    left_out = _left_out(path, inside, [] if recursive else below)
    if recursive:
        found = sorted(photo for files in (inside, *below) for photo in files if _is_photo(photo))
        if found:
            return found, left_out
    try:
        return find_images([path]), left_out
    except ImageError as error:
        if not left_out.subfolders:
            raise
        raise ImageError(f"{error}; its {left_out.places} do: --recursive takes them") from error


def each_once(photos: Iterable[Path]) -> list[Path]:
    """Leave out photos that were named before, also by another path; a link that leads to itself stays as it is."""
    first: dict[str, Path] = {}
    for photo in photos:
        first.setdefault(os.path.realpath(photo), photo)
    return list(first.values())


def _listed(folder: Path) -> Iterator[list[Path]]:
    """The files of a folder and of every one below it, folder by folder; those that cannot be read are empty."""
    empty = True
    for place, below, names in os.walk(folder):
        empty = False
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield [Path(place) / name for name in names if not name.startswith(".")]
    if empty:
        yield []


def _left_out(folder: Path, inside: list[Path], below: list[list[Path]]) -> LeftOut:
    counts = {
        str(files[0].parent.relative_to(folder)): count for files in below if (count := sum(map(_is_photo, files)))
    }
    return LeftOut(folder, sum(not _is_photo(file) for file in inside), counts)


def _is_photo(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
