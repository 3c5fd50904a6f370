"""A map as a picture of a figure, and what its colours stand for."""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from vitreous.explanation import Explanation
from vitreous.pictures.backdrop import Backdrop, Look
from vitreous.pictures.left_out import left_out
from vitreous.pictures.tiles import SHARPNESS, Tile

_LETTERS = 12


def map_picture(
    scores: Tensor,
    grid: tuple[int, int],
    backdrop: Backdrop,
    *,
    signed: bool,
    look: Look | None,
    span: tuple[float, float] | None = None,
    scale: float = SHARPNESS,
) -> Image.Image:
    """Lay a map over its photo; the place of one with NaN or infinity in it says that it is left out.

    Args:
        scores: Raw scores (patches,).
        grid: Rows and columns of patches.
        backdrop: The photo.
        signed: Whether the sign of the scores means something.
        look: How it is drawn.
        span: See ``framed_maps``.
        scale: How many pixels of the photo are one unit of the page.
    """
    if not bool(scores.isfinite().all()):
        return left_out(backdrop.photo.size, max(1, round(_LETTERS * scale)))
    return backdrop.lay(scores, grid, signed=signed, look=look, span=span)


def map_tile(
    explanation: Explanation, method: str, position: tuple[int, int], backdrop: Backdrop, look: Look | None
) -> Tile:
    """Give a map as a tile.

    Args:
        explanation: What holds the map.
        method: Which method's.
        position: Which image of the batch, and which of its classes.
        backdrop: The photo.
        look: How it is drawn.
    """
    scores, grid = explanation.scores_of(method, *position), explanation.grid_of(method)
    return Tile(map_picture(scores, grid, backdrop, signed=explanation.signed[method], look=look))


def bar_marks(scores: Tensor, *, signed: bool) -> tuple[str, ...]:
    """Give the raw values at the ends of a map's colour bar, and at zero where it is in the middle."""
    low, high = float(scores.min()), float(scores.max())
    if not signed:
        return f"{low:.3g}", f"{high:.3g}"
    largest = max(abs(low), abs(high))
    return f"{-largest:.3g} against", "0", f"for {largest:.3g}"
