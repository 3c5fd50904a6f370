"""Colours of heatmaps, words and chart lines, and the overlay of a heatmap on its image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous._utils.messages import close_match
from vitreous.errors import InputError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

RGB = tuple[int, int, int]

_BAND = 256  # rows that are blended at once: a photo of 80 million pixels would take gigabytes in floating point

_SEQUENTIAL = "inferno"
_DARKEST = 0.12  # where inferno starts: its lowest colours are black, which would only darken the photo
# Blue to red, vivid on both sides of a middle that is transparent.
_DIVERGING = ("#2457e6", "#3f8cff", "#63b3ff", "#ffffff", "#ff9a5c", "#ff5a36", "#e3122a")
# Alpha is the strength to this power: heavy tails would leave all but a few patches invisible.
_SIGNED_POWER, _UNSIGNED_POWER = 0.6, 0.7
# The diverging maps of matplotlib, without their reversed forms.
_DIVERGING_NAMES = frozenset({
    *("PiYG", "PRGn", "BrBG", "PuOr", "RdGy", "RdBu", "RdYlBu", "RdYlGn", "Spectral"),
    *("coolwarm", "bwr", "seismic", "berlin", "managua", "vanimo"),
})  # fmt: skip

# Words on a white page: red for the class, blue against it, orange for methods without a sign.
_WORD_FOR: RGB = (226, 74, 51)
_WORD_AGAINST: RGB = (52, 120, 214)
_WORD_UNSIGNED: RGB = (242, 158, 22)


def colour(heatmap: NDArray[np.floating], *, signed: bool, cmap: str | None = None) -> NDArray[np.uint8]:
    """Colour a heatmap that is scaled for display.

    Args:
        heatmap: Values (height, width) in [0, 1], or in [-1, 1] when signed.
        signed: Blue against, red for the class, darker where stronger; otherwise dark (low) to light (high).
        cmap: See ``Look``.

    Returns:
        RGBA bytes (height, width, 4). The alpha grows with the strength from 0, so that the photo shows where there is
        no evidence, for signed maps as for others.
    """
    colours: NDArray[np.float64] = colour_map(signed=signed, cmap=cmap)((heatmap + 1) / 2 if signed else heatmap)
    power = _SIGNED_POWER if signed else _UNSIGNED_POWER
    colours[..., 3] = np.clip(np.abs(heatmap), 0, 1) ** power
    return np.rint(colours * 255).astype(np.uint8)


def ramp(length: int, height: int = 1, *, signed: bool, cmap: str | None = None) -> Image.Image:
    """Draw the colours from the lowest to the highest value, left to right, as they are on white."""
    values = np.broadcast_to(np.linspace(-1.0 if signed else 0.0, 1.0, length), (height, length))
    return overlay(Image.new("RGB", (length, height), "white"), values, signed=signed, opacity=1.0, cmap=cmap)


@cache
def colour_map(*, signed: bool, cmap: str | None = None) -> Colormap:
    """Find a colour map by its name, see ``Look``; one that is for the other kind of maps leaves the default.

    Raises:
        InputError: matplotlib has no such map.
    """
    # Only the colour tables are needed: no pyplot, hence no backend and no global state. Slow to import.
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap  # noqa: PLC0415

    names = [name.strip() for name in cmap.split(",")] if cmap else []
    for name in names:
        if name not in colormaps:
            raise InputError(
                f"there is no colour map {name!r}{close_match(name, colormaps) or '; matplotlib lists them'}"
            )
    if len(names) > 2:
        raise InputError(f"one colour map for unsigned and one for signed maps are enough, not {len(names)}")
    if len(names) == 1:
        names = ["", names[0]] if names[0].removesuffix("_r") in _DIVERGING_NAMES else [names[0], ""]
    chosen = (names[1] if signed else names[0]) if names else ""
    if chosen:
        return colormaps[chosen]
    if signed:
        return LinearSegmentedColormap.from_list("evidence", _DIVERGING)
    return ListedColormap(colormaps[_SEQUENTIAL](np.linspace(_DARKEST, 1, 256)))


def overlay(
    image: Image.Image,
    heatmap: NDArray[np.floating],
    *,
    signed: bool,
    opacity: float = DEFAULT_OPACITY,
    cmap: str | None = None,
) -> Image.Image:
    """Lay a heatmap over an image, which keeps its colours where there is no evidence.

    Args:
        image: The image, of the heatmap's size.
        heatmap: Values (height, width) scaled for display, see ``colour``.
        signed: Whether the sign of the heatmap carries meaning.
        opacity: Of the strongest value, from 0 (the image alone) to 1.
        cmap: See ``Look``.
    """
    if not 0 <= opacity <= 1:
        raise InputError(f"opacity must be between 0 and 1, not {opacity}")
    if heatmap.shape != (image.height, image.width):
        raise InputError(f"a heatmap of {heatmap.shape} does not fit a picture of {(image.height, image.width)}")
    photo = np.asarray(image.convert("RGB"))
    blended = np.empty_like(photo)
    for top in range(0, image.height, _BAND):
        band = slice(top, top + _BAND)
        colours = colour(heatmap[band], signed=signed, cmap=cmap).astype(np.float64)
        alpha = colours[..., 3:] / 255 * opacity
        blended[band] = np.rint(photo[band] * (1 - alpha) + colours[..., :3] * alpha)
    return Image.fromarray(blended)


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
    turn, place = divmod(number, len(colours))
    return colours[place], dashes[(turn + place) % len(dashes)]
