"""A heatmap in colours, and laid over the picture it explains."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitreous.defaults import DEFAULT_OPACITY
from vitreous.errors import InputError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

_BAND = 256  # rows that are blended at once: a photo of 80 million pixels would take gigabytes in floating point

_SEQUENTIAL = "inferno"
# Dark in the middle: on a photo, matplotlib's maps with a white middle drown weak evidence in haze. Blue to red.
_DIVERGING = ("#a8dcff", "#3d9bf0", "#17446e", "#141414", "#6e2417", "#f0552d", "#ffc78f")


def colour(heatmap: NDArray[np.floating], *, signed: bool) -> NDArray[np.uint8]:
    """Colour a heatmap that is scaled for display.

    Args:
        heatmap: Values (height, width) in [0, 1], or in [-1, 1] when signed.
        signed: Blue against, red for the class, lighter where stronger; otherwise dark (low) to light (high).

    Returns:
        RGBA bytes (height, width, 4); the alpha grows with the strength, so that weak evidence lets the photo through.
    """
    colours: NDArray[np.float64] = _colour_map(signed=signed)((heatmap + 1) / 2 if signed else heatmap)
    # A veil stays at zero: dark, unlit regions are what makes the lit ones readable.
    colours[..., 3] = 0.35 + 0.65 * np.sqrt(np.clip(np.abs(heatmap), 0, 1))
    return np.rint(colours * 255).astype(np.uint8)


@cache
def _colour_map(*, signed: bool) -> Colormap:
    # Only the colour tables are wanted: no pyplot, hence no backend and no global state. Slow to import.
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
    """Lay a heatmap over a picture.

    The photo is shown in grey, so that every colour in the result comes from the heatmap.

    Args:
        image: The picture, of the heatmap's size.
        heatmap: Values (height, width) scaled for display, see ``colour``.
        signed: Whether the sign of the heatmap carries meaning.
        opacity: From 0 (the grey photo alone) to 1.
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
