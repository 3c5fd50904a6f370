"""Photos as they are named on a command line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vitreous.images import find_images
from vitreous.models import demo


def photos_of(argument: str) -> list[Path]:
    """Give the photos that a file, a folder or the word ``demo`` stands for.

    Raises:
        ImageError: A folder cannot be listed or holds no photo.
    """
    path = demo.PHOTO if argument == "demo" and not Path(argument).exists() else Path(argument)
    return find_images([path])


def each_once(photos: Iterable[Path]) -> list[Path]:
    """Leave out photos that were named before, also by another path; a link that leads to itself stays as it is."""
    return list({os.path.realpath(photo): photo for photo in photos}.values())
