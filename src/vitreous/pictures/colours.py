"""Colours of heatmaps, words and chart lines, and the overlay of a heatmap on its image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous.errors import InputError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

RGB = tuple[int, int, int]

_BAND = 256  # rows that are blended at once: a photo of 80 million pixels would take gigabytes in floating point

_SEQUENTIAL = "inferno"
# Dark in the middle: on a photo, matplotlib's maps with a white middle hide weak evidence in haze. Blue to red.
_DIVERGING = ("#a8dcff", "#3d9bf0", "#17446e", "#141414", "#6e2417", "#f0552d", "#ffc78f")

# Words on a white page: red for the class, blue against it, orange for methods without a sign.
_WORD_FOR: RGB = (226, 74, 51)
_WORD_AGAINST: RGB = (52, 120, 214)
_WORD_UNSIGNED: RGB = (242, 158, 22)


def colour(heatmap: NDArray[np.floating], *, signed: bool) -> NDArray[np.uint8]:
    """Colour a heatmap that is scaled for display.

    Args:
        heatmap: Values (height, width) in [0, 1], or in [-1, 1] when signed.
        signed: Blue against, red for the class, lighter where stronger; otherwise dark (low) to light (high).

    Returns:
        RGBA bytes (height, width, 4). The alpha grows with the strength, so that the photo shows through weak evidence.
    """
    colours: NDArray[np.float64] = _colour_map(signed=signed)((heatmap + 1) / 2 if signed else heatmap)
    # Zero keeps some opacity: bright regions stand out against darkened ones.
    colours[..., 3] = 0.35 + 0.65 * np.sqrt(np.clip(np.abs(heatmap), 0, 1))
    return np.rint(colours * 255).astype(np.uint8)


def ramp(length: int, height: int = 1, *, signed: bool) -> Image.Image:
    """Draw the colours from the lowest to the highest value, left to right."""
    values = np.broadcast_to(np.linspace(-1.0 if signed else 0.0, 1.0, length), (height, length))
    return Image.fromarray(np.ascontiguousarray(colour(values, signed=signed)[..., :3]))


@cache
def _colour_map(*, signed: bool) -> Colormap:
    # Only the colour tables are needed: no pyplot, hence no backend and no global state. Slow to import.
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415

    return LinearSegmentedColormap.from_list("evidence", _DIVERGING) if signed else colormaps[_SEQUENTIAL]


def overlay(
    image: Image.Image,
    heatmap: NDArray[np.floating],
    *,
    signed: bool,
    opacity: float = DEFAULT_OPACITY,
) -> Image.Image:
    """Lay a heatmap over an image.

    The image is shown in grey, so that every colour in the result comes from the heatmap.

    Args:
        image: The image, of the heatmap's size.
        heatmap: Values (height, width) scaled for display, see ``colour``.
        signed: Whether the sign of the heatmap carries meaning.
        opacity: From 0 (the grey image alone) to 1.
    """
    if not 0 <= opacity <= 1:
        raise InputError(f"opacity must be between 0 and 1, not {opacity}")
    if heatmap.shape != (image.height, image.width):
        raise InputError(f"a heatmap of {heatmap.shape} does not fit a picture of {(image.height, image.width)}")
    photo = np.asarray(image.convert("L"))
    bands = [slice(top, top + _BAND) for top in range(0, image.height, _BAND)]
    return Image.fromarray(np.concatenate([_blend(photo[b], heatmap[b], signed, opacity) for b in bands]))


def _blend(
    photo: NDArray[np.uint8],
    heatmap: NDArray[np.floating],
    signed: bool,  # noqa: FBT001
    opacity: float,
) -> NDArray[np.uint8]:
    colours = colour(heatmap, signed=signed).astype(np.float64)
    alpha = colours[..., 3:] / 255 * opacity
    blended = photo[..., None] * (1 - alpha) + colours[..., :3] * alpha
    return np.rint(blended).astype(np.uint8)


def strongest_word_colour(strength: float, *, signed: bool) -> RGB:
    """Give the colour of the strongest word score of the same sign."""
    return _WORD_UNSIGNED if not signed else _WORD_FOR if strength > 0 else _WORD_AGAINST


def word_colour(strength: float, *, signed: bool) -> str:
    """Give the CSS colour behind a word whose score is scaled for display: the strongest colour mixed with white."""
    part = min(1.0, abs(strength))
    mixed = (round(255 + (channel - 255) * part) for channel in strongest_word_colour(strength, signed=signed))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def line_style(number: int, colours: Sequence[str], dashes: Sequence[str]) -> tuple[str, str]:
    """Give the colour and the dashes of a chart line; where colours repeat, the dashes differ."""
    return colours[number % len(colours)], dashes[(number // len(colours) + number) % len(dashes)]
