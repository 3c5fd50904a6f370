"""How much a map changes when the image changes hardly at all (Yeh et al., 2019)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from vitreous.metrics.arrays import finite
from vitreous.metrics.metric import Floats, Metric, MetricError, mean_of


def relative_changes(original: ArrayLike, disturbed: ArrayLike) -> Floats:
    """Measure ‖map of the disturbed image - map‖ / ‖map‖ of maps (..., n) and (samples, ..., n).

    Args:
        original: the map of the image, (..., n).
        disturbed: the maps of the same image with a little noise, (samples, ..., n).

    Returns:
        (samples, ...): 0 where both maps are zero, NaN where only the original one is.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.relative_changes([3.0, 4.0], [[3.0, 4.0], [3.0, 9.0]]).tolist()
        [0.0, 1.0]
    """
    before, after = finite(original), finite(disturbed)
    if after.ndim != before.ndim + 1 or after.shape[1:] != before.shape:
        raise MetricError(f"maps of shape {after.shape} are not samples of a map of shape {before.shape}")
    change = np.linalg.norm(after - before, axis=-1)
    size = np.broadcast_to(np.linalg.norm(before, axis=-1), change.shape)
    unmeasurable = np.where(change == 0, 0.0, np.nan)
    result: Floats = np.where(size > 0, change / np.where(size > 0, size, 1.0), unmeasurable)
    return result


def max_sensitivity(original: ArrayLike, disturbed: ArrayLike) -> Floats:
    """Take the largest of ``relative_changes`` over the samples (Yeh et al., 2019).

    The metric of [yeh2019infidelity][].

    Examples:
        >>> from vitreous import metrics
        >>> float(metrics.max_sensitivity([3.0, 4.0], [[3.0, 4.0], [3.0, 9.0]]))
        1.0
    """
    largest: Floats = relative_changes(original, disturbed).max(axis=0)
    return largest


def average_sensitivity(original: ArrayLike, disturbed: ArrayLike) -> Floats:
    """Take the mean of ``relative_changes`` over the samples.

    Examples:
        >>> from vitreous import metrics
        >>> float(metrics.average_sensitivity([3.0, 4.0], [[3.0, 4.0], [3.0, 9.0]]))
        0.5
    """
    mean: Floats = relative_changes(original, disturbed).mean(axis=0)
    return mean


def mean_max_sensitivity() -> Metric:
    """Make the mean of ``max_sensitivity``, kept in ``max_sensitivity``."""
    description = "Mean over images of the largest relative change of the map under small noise."
    return mean_of("max_sensitivity", "max-sensitivity", "lower", (0.0, np.inf), description)


def mean_average_sensitivity() -> Metric:
    """Make the mean of ``average_sensitivity``, kept in ``average_sensitivity``."""
    description = "Mean over images of the mean relative change of the map under small noise."
    return mean_of("average_sensitivity", "avg-sensitivity", "lower", (0.0, np.inf), description)
