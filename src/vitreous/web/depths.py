"""Methods at less than their full depth: what the depth slider asks for."""

from __future__ import annotations

from vitreous.aggregate import Plus
from vitreous.errors import MethodError
from vitreous.pictures.strips import depth_spellings, start_layer_spellings
from vitreous.spelling import parse


def at_depth(method: str, count: int, depth: int) -> str | None:
    """Give the spelling of a method that aggregates ``count`` of a model's ``depth`` blocks.

    Rollouts multiply the lowest blocks, gradtoken spreads its map through them, sums add up the uppermost ones. The
    full depth is the method as it was spelled.

    Returns:
        ``None`` where the method aggregates no blocks.
    """
    if count >= depth:
        return method
    if isinstance(parse(method).aggregation, Plus):
        return start_layer_spellings(method, depth)[depth - max(1, count)]
    try:
        spellings = depth_spellings(method, depth)
    except MethodError:
        return None
    return spellings.get(count, method)


def all_depths(method: str, depth: int) -> list[str]:
    """Give the spellings for every position of the slider."""
    found = (at_depth(method, count, depth) for count in range(1, depth + 1))
    return list(dict.fromkeys(spelling for spelling in found if spelling is not None))
