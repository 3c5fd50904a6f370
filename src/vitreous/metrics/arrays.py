"""What metrics ask of the arrays they get, and how a map is brought to a common scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous._utils.messages import reason_of
from vitreous.metrics.metric import Floats, MetricError

IGNORED = -1  # of a mask: a pixel that does not count


def finite(values: ArrayLike, what: str = "a map") -> Floats:
    """Take ``values`` as float64, or raise if one of them is not a number: no metric can rank those."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from a tensor that has a gradient
        raise MetricError(f"{what} cannot be read as numbers: {reason_of(error)}") from error
    if array.size == 0:
        raise MetricError(f"{what} is empty")
    if not np.isfinite(array).all():
        raise MetricError(f"{what} has values that are not finite")
    return array


def whole(values: ArrayLike, what: str = "a mask") -> NDArray[np.int64]:
    """Take ``values`` as integers, or raise if one of them is not whole: a mask names a class for every pixel."""
    numbers = finite(values, what)
    integers = numbers.astype(np.int64)
    if (integers != numbers).any():
        raise MetricError(f"{what} has values that are not whole numbers")
    return integers


def yes_or_no(values: ArrayLike, what: str) -> NDArray[np.bool_]:
    """Take ``values`` as truth values, or raise if one is neither 0 nor 1: -1, which does not count, is not yes."""
    numbers = whole(values, what)
    if ((numbers != 0) & (numbers != 1)).any():
        raise MetricError(f"{what} is 1 (yes) or 0 (no), and nothing else")
    return numbers.astype(np.bool_)


def same_shape(first: NDArray[np.generic], second: NDArray[np.generic], what: str) -> None:
    """Raise unless two arrays have the same shape."""
    if first.shape != second.shape:
        raise MetricError(f"{what} differ in shape: {first.shape} and {second.shape}")


def finite_maps(maps: ArrayLike) -> Floats:
    """Take maps (..., height, width) as float64, or raise."""
    found = finite(maps)
    if found.ndim < 2:
        raise MetricError(f"a map has rows and columns, and this one is of shape {found.shape}")
    return found


def of_one_image(map_: ArrayLike) -> Floats:
    """Take the map of one image, (height, width), or raise: ranked together, pixels of several say something else."""
    found = finite_maps(map_)
    if found.ndim > 2:
        raise MetricError(f"maps are measured one by one, and these are several, of shape {found.shape}")
    return found


def min_max(maps: ArrayLike) -> Floats:
    """Scale every map (..., height, width) to 0..1; a constant map becomes 0.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.min_max([[0, 2], [4, 8]]).tolist()
        [[0.0, 0.25], [0.5, 1.0]]
    """
    maps = finite_maps(maps)
    low = maps.min(axis=(-2, -1), keepdims=True)
    span = maps.max(axis=(-2, -1), keepdims=True) - low
    scaled: Floats = (maps - low) / np.where(span > 0, span, 1.0)
    return scaled


def divided(numerator: Floats, denominator: Floats) -> Floats:
    """Divide; what would be a division by zero is NaN, without a warning."""
    result = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result
