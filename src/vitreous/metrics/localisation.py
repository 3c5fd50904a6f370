"""Whether relevance lies on the object: pointing game, energy in the mask, and rank accuracy.

A mask is 0 for background, 1 and above for objects, and -1 for pixels that do not count. Without a foreground there
is nothing to find, and the result is NaN.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous.metrics.metric import IGNORED, Metric, MetricError, mean_of, of_one_image, same_shape, whole


def pointing_game(map_: ArrayLike, mask: ArrayLike, tolerance: int = 0) -> float:
    """Say whether the maximum of a map lies on the object: 1 or 0 (Zhang et al., 2016).

    The metric of [zhang2016top][].

    Where several pixels share the maximum, it is the share of them that lies there, as if one of them were drawn: a
    constant map points nowhere and gets the share of the object.

    Args:
        map_: of one image, (height, width).
        mask: the truth, of the same shape.
        tolerance: how many pixels beside the object still count as on it; the paper takes 15.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.pointing_game([[0.1, 0.9], [0.2, 0.3]], mask=[[0, 1], [0, 0]])
        1.0
    """
    if tolerance < 0:
        raise MetricError(f"a tolerance is a number of pixels from 0 on, not {tolerance}")
    scores, object_, counted = _prepared(map_, mask)
    if not object_.any():
        return float("nan")
    highest = counted & (scores == scores[counted].max())
    return float(_widened(object_, tolerance)[highest].mean())


def energy_in_mask(map_: ArrayLike, mask: ArrayLike) -> float:
    """Measure the share of the positive relevance that lies on the object ("relevance mass accuracy").

    The energy-based pointing game of [wang2020score][] and [arras2022clevr][].

    A map without positive relevance has none on the object: 0, so that no method gains by saying nothing.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.energy_in_mask([[1, 2], [-5, 1]], mask=[[0, 1], [0, 0]])
        0.5
    """
    scores, object_, counted = _prepared(map_, mask)
    if not object_.any():
        return float("nan")
    energy = np.where(counted, scores.clip(min=0), 0.0)
    total = energy.sum()
    return float(energy[object_].sum() / total) if total > 0 else 0.0


def rank_accuracy(map_: ArrayLike, mask: ArrayLike) -> float:
    """Measure the share of the K most relevant pixels that lie on the object, which has K pixels.

    The metric of [arras2022clevr][].

    Pixels that share the value at the cut enter with the share of them that still has room.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.rank_accuracy([[0.9, 0.8], [0.1, 0.0]], mask=[[1, 0], [1, 0]])
        0.5
    """
    scores, object_, counted = _prepared(map_, mask)
    size = int(object_.sum())
    if size == 0:
        return float("nan")
    values, inside = scores[counted], object_[counted]
    cut = np.partition(values, values.size - size)[values.size - size]
    above, at_cut = values > cut, values == cut
    room = size - above.sum()
    return float(((above & inside).sum() + room * inside[at_cut].mean()) / size)


def _prepared(map_: ArrayLike, mask: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    scores, classes = of_one_image(map_), whole(mask)
    same_shape(scores, classes, "a map and its mask")
    return scores, classes > 0, classes != IGNORED


def _widened(object_: NDArray[np.bool_], radius: int) -> NDArray[np.bool_]:
    """Add all pixels within ``radius`` of the object, a disc drawn row by row."""
    if radius == 0:
        return object_
    height, width = object_.shape
    sums = np.pad(np.cumsum(object_, axis=1, dtype=np.int64), ((0, 0), (1, 0)))
    places = np.arange(width)
    wide = np.zeros_like(object_)
    for offset in range(-min(radius, height - 1), min(radius, height - 1) + 1):
        reach = math.isqrt(radius**2 - offset**2)
        near = sums[:, np.minimum(places + reach + 1, width)] > sums[:, np.maximum(places - reach, 0)]
        target = slice(max(offset, 0), height + min(offset, 0))
        source = slice(max(-offset, 0), height + min(-offset, 0))
        wide[target] |= near[source]
    return wide


def pointing_accuracy() -> Metric:
    """Make the mean of ``pointing_game``, kept in the column ``pointing_game``."""
    description = "Share of images whose most relevant pixel lies on the object."
    return mean_of("pointing_game", "pointing game", "higher", (0.0, 1.0), description)


def mean_energy_in_mask() -> Metric:
    """Make the mean of ``energy_in_mask``, kept in the column ``energy_in_mask``."""
    description = "Mean share of the positive relevance that lies on the object."
    return mean_of("energy_in_mask", "energy in mask", "higher", (0.0, 1.0), description)


def mean_rank_accuracy() -> Metric:
    """Make the mean of ``rank_accuracy``, kept in the column ``rank_accuracy``."""
    description = "Mean share of the most relevant pixels, as many as the object has, that lie on the object."
    return mean_of("rank_accuracy", "rank accuracy", "higher", (0.0, 1.0), description)


def mean_grid_share() -> Metric:
    """Make the mean of ``energy_in_mask`` of a cell of a mosaic, kept in ``grid_share``.

    The grid pointing game of [bohle2021convolutional][].
    """
    description = "Mean share of the positive scores that lies in the mosaic's cell of the explained class."
    return mean_of("grid_share", "GridPG", "higher", (0.0, 1.0), description)


def mean_grid_hit() -> Metric:
    """Make the mean of ``pointing_game`` of a cell of a mosaic, kept in ``grid_hit``."""
    description = "Share of mosaics whose highest score lies in the cell of the explained class."
    return mean_of("grid_hit", "highest score in the cell", "higher", (0.0, 1.0), description)


METRICS = (
    pointing_accuracy(),
    mean_energy_in_mask(),
    mean_rank_accuracy(),
    mean_grid_share(),
    mean_grid_hit(),
)
