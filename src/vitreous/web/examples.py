"""Photos that visitors can pick: the one that is shipped, and those in folders that the server may read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vitreous.errors import ImageError
from vitreous.images import find_images, read_image
from vitreous.models import demo

_MOST = 12
_SIDE = 160


def example_photos(folders: Sequence[Path]) -> list[Path]:
    """Give a few photos."""
    found = [demo.PHOTO]
    for folder in folders:
        try:
            found += find_images([folder])
        except ImageError:  # a folder of checkpoints has no photos
            continue
    return found[:_MOST]


def thumbnails(photos: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Write small pictures of photos, so that the page loads nothing large; unreadable photos are left out."""
    written = {}
    for number, photo in enumerate(photos):
        try:
            small = read_image(photo)
        except ImageError:
            continue
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        written[photo] = folder / f"example-{number}.jpg"
        small.save(written[photo], quality=85)
    return written
