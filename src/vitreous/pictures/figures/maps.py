"""A map as a tile of a figure."""

from __future__ import annotations

from vitreous.explanation import Explanation
from vitreous.pictures.backdrop import Backdrop, Look
from vitreous.pictures.left_out import left_out
from vitreous.pictures.tiles import SHARPNESS, Tile

_LETTERS = 12 * SHARPNESS


def map_tile(
    explanation: Explanation, method: str, position: tuple[int, int], backdrop: Backdrop, look: Look | None
) -> Tile:
    """Lay a map over its photo; the place of one with NaN or infinity in it says that it is left out.

    Args:
        explanation: What holds the map.
        method: Which method's.
        position: Which image of the batch, and which of its classes.
        backdrop: The photo.
        look: How it is drawn.
    """
    if not explanation.shows(method, *position):
        return Tile(left_out(backdrop.photo.size, _LETTERS))
    scores, grid = explanation.scores_of(method, *position), explanation.grid_of(method)
    return Tile(backdrop.lay(scores, grid, signed=explanation.signed[method], look=look))
