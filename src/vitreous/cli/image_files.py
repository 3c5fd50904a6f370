"""Image files as they are named on the command line: files, folders, and the image that is shipped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from vitreous.errors import ImageError
from vitreous.inputs.images import SUFFIXES, find_images
from vitreous.models import demo

_LISTED_SUBFOLDERS = 5
_MAX_FOLDERS = 10_000  # visited only to report what was skipped


@dataclass(frozen=True)
class SkippedFiles:
    """Files of a folder that were not used.

    Attributes:
        folder: the folder.
        others: number of files directly inside it that do not have the suffix of an image; hidden files do not count.
        subfolders: number of images in each subfolder, by relative path.
    """

    folder: Path
    others: int = 0
    subfolders: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """One sentence; empty if nothing was skipped."""
        parts = []
        if self.others:
            parts.append(f"{_count(self.others, 'file')} without an image suffix")
        if self.subfolders:
            images = _count(sum(self.subfolders.values()), "image")
            parts.append(f"{images} in {self.listed_subfolders} (use --recursive to include them)")
        return f"{self.folder}: skipped {' and '.join(parts)}" if parts else ""

    @property
    def listed_subfolders(self) -> str:
        """The number of subfolders, with the first few by name."""
        named = [f"{name}: {count}" for name, count in self.subfolders.items()]
        more = len(named) - _LISTED_SUBFOLDERS
        listed = ", ".join(named[:_LISTED_SUBFOLDERS]) + (f", and {more} more" if more > 0 else "")
        return f"{_count(len(named), 'subfolder')} ({listed})"


def find_image_files(argument: str, *, recursive: bool = False) -> tuple[list[Path], SkippedFiles | None]:
    """Return the images that a file, a folder or the word ``demo`` names, and what was skipped in a folder.

    Args:
        argument: what was typed.
        recursive: include images in subfolders; hidden subfolders and links to folders are never followed.

    Raises:
        ImageError: A folder cannot be listed or contains no image, or the name is empty.
    """
    if not argument:
        raise ImageError("the name of an image is empty; use . for the current folder")
    path = demo.PHOTO if argument == "demo" and not Path(argument).exists() else Path(argument)
    if not os.path.isdir(path):  # noqa: PTH112  # does not raise on names that no file can have
        return find_images([path]), None
    inside, *below = _walk(path) if recursive else islice(_walk(path), _MAX_FOLDERS)
    skipped = _skipped_files(path, inside, [] if recursive else below)
    if recursive:
        found = sorted(file for files in (inside, *below) for file in files if _is_image(file))
        if found:
            return found, skipped
    try:
        return find_images([path]), skipped
    except ImageError as error:
        if not skipped.subfolders:
            raise
        raise ImageError(
            f"{error}; there are images in {skipped.listed_subfolders}: use --recursive to include them"
        ) from error


def drop_duplicates(files: Iterable[Path]) -> list[Path]:
    """Drop files that were named before, also by another path. A link to itself is kept as it is."""
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(os.path.realpath(file), file)
    return list(first.values())


def _walk(folder: Path) -> Iterator[list[Path]]:
    """Yield the files of a folder, then those of every subfolder; a folder that cannot be read is empty."""
    empty = True
    for place, subfolders, names in os.walk(folder):
        empty = False
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield [Path(place) / name for name in names if not name.startswith(".")]
    if empty:
        yield []


def _skipped_files(folder: Path, inside: list[Path], below: list[list[Path]]) -> SkippedFiles:
    counts = {
        str(files[0].parent.relative_to(folder)): count for files in below if (count := sum(map(_is_image, files)))
    }
    return SkippedFiles(folder, sum(not _is_image(file) for file in inside), counts)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
