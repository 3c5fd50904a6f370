"""How few features carry a map. All functions take maps as lists of values (..., n); a sign does not matter.

A map of zeros is taken as a constant one, which is the most complex: no method gains by saying nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from vitreous.metrics.arrays import finite
from vitreous.metrics.metric import Floats, Metric, mean_of


def sparseness(maps: ArrayLike) -> Floats:
    """Measure the Gini index of |map| of maps (..., n) (Chalasani et al., 2020).

    The metric of [chalasani2020concise][].

    It is 0 for a constant map and 1 - 1/n for a single feature.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.sparseness([[1, 1, 1, 1], [0, 0, 0, 1]]).tolist()
        [0.0, 0.75]
    """
    shares = np.sort(_shares(maps), axis=-1)
    features = shares.shape[-1]
    index: Floats = ((2 * np.arange(1, features + 1) - features - 1) * shares).sum(axis=-1) / features
    return np.maximum(index, 0.0)


def complexity(maps: ArrayLike) -> Floats:
    """Measure the entropy of |map| as shares, of maps (..., n), in nats (Bhatt et al., 2020): log n if constant.

    The metric of [bhatt2020evaluating][].

    Examples:
        >>> from vitreous import metrics
        >>> metrics.complexity([[1, 1, 1, 1], [0, 0, 0, 1]]).round(3).tolist()
        [1.386, 0.0]
    """
    shares = _shares(maps)
    entropy: Floats = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
    return np.maximum(entropy, 0.0)


def effective_complexity(maps: ArrayLike, threshold: float = 1e-5) -> Floats:
    """Count the features of maps (..., n) above ``threshold`` times their largest (after Nguyen and Martínez, 2020).

    After [nguyen2020quantitative][].

    Examples:
        >>> from vitreous import metrics
        >>> metrics.effective_complexity([[0.5, -2.0, 0.0, 1e-9]]).tolist()
        [2.0]
    """
    shares = _shares(maps)
    count: Floats = (shares > threshold * shares.max(axis=-1, keepdims=True)).sum(axis=-1).astype(np.float64)
    return count


def _shares(maps: ArrayLike) -> Floats:
    sizes = np.abs(finite(maps))
    largest = sizes.max(axis=-1, keepdims=True)
    # Scaled before they are summed, so that neither very small nor very large relevance leaves the numbers' range.
    scaled = np.where(largest > 0, sizes / np.where(largest > 0, largest, 1.0), 1.0)
    shares: Floats = scaled / scaled.sum(axis=-1, keepdims=True)
    return shares


def mean_sparseness() -> Metric:
    """Make the mean of ``sparseness``, kept in ``sparseness``."""
    return mean_of("sparseness", "sparseness", "higher", (0.0, 1.0), "Mean Gini index of the absolute map.")


def mean_complexity() -> Metric:
    """Make the mean of ``complexity``, kept in ``complexity``."""
    return mean_of("complexity", "complexity", "lower", (0.0, np.inf), "Mean entropy of the absolute map, in nats.")


def mean_effective_complexity() -> Metric:
    """Make the mean of ``effective_complexity``, kept in ``effective_complexity``."""
    description = "Mean number of features whose relevance is not negligible beside the largest."
    return mean_of("effective_complexity", "effective complexity", "lower", (1.0, np.inf), description)
