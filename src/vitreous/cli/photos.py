"""Photos as they are named on a command line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vitreous.errors import ImageError
from vitreous.images import find_images
from vitreous.models import demo


def photos_of(argument: str) -> list[Path]:
    """Give the photos that a file, a folder or the word ``demo`` stands for.

    Raises:
        ImageError: A folder cannot be listed or holds no photo, or a name is empty.
    """
    if not argument:
        raise ImageError("a photo's name is empty; . is the current folder")
    path = demo.PHOTO if argument == "demo" and not Path(argument).exists() else Path(argument)
    return find_images([path])


def each_once(photos: Iterable[Path]) -> list[Path]:
    """Leave out photos that were named before, also by another path; a link that leads to itself stays as it is."""
    first: dict[str, Path] = {}
    for photo in photos:
        first.setdefault(os.path.realpath(photo), photo)
    return list(first.values())
