"""Reads masks: the numbers that are stored in a file, or, where black means background, the colours that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitreous.datasets.dataset import IGNORED, Mask
from vitreous.errors import DataError
from vitreous.inputs.images import Upright, read_upright, turned

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
