"""Correlation, and with it whether the model does what a map promises (faithfulness correlation)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous.metrics.arrays import finite, same_shape
from vitreous.metrics.metric import Floats, Metric, MetricError, mean_of

# Sums of equal numbers differ in their last digits; correlating those would correlate noise.
_ROUNDING = 1e-12


def pearson(first: ArrayLike, second: ArrayLike) -> Floats:
    """Correlate values (..., n) along the last axis; NaN where one of the two is constant.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.pearson([[1, 2, 3], [1, 2, 3]], [[2, 4, 6], [3, 2, 1]]).round(9).tolist()
        [1.0, -1.0]
    """
    one, other = finite(first, "a list of values"), finite(second, "a list of values")
    same_shape(one, other, "the two lists to correlate")
    constant = is_constant(one) | is_constant(other)
    products = (_directions(one) * _directions(other)).sum(axis=-1)
    result: Floats = np.where(constant, np.nan, products)
    return result.clip(-1.0, 1.0)


def _directions(values: Floats) -> Floats:
    """Centre values (..., n) and bring them to length 1; largest first, since squares of 1e200 and 1e-200 are lost."""
    largest = np.abs(values).max(axis=-1, keepdims=True)
    scaled = values / np.where(largest > 0, largest, 1.0)
    centred = scaled - scaled.mean(axis=-1, keepdims=True)
    length = np.linalg.norm(centred, axis=-1, keepdims=True)
    directions: Floats = centred / np.where(length > 0, length, 1.0)
    return directions


def is_constant(values: Floats) -> NDArray[np.bool_]:
    """Say where values (..., n) are all the same, up to rounding."""
    spread = values.max(axis=-1) - values.min(axis=-1)
    constant: NDArray[np.bool_] = spread <= _ROUNDING * np.abs(values).max(axis=-1)
    return constant


def random_subsets(features: int, size: int, subsets: int, seed: int) -> NDArray[np.int64]:
    """Draw subsets of ``range(features)`` without replacement, (subsets, size)."""
    if subsets < 1:
        raise MetricError(f"at least one subset has to be drawn, not {subsets}")
    if not 0 < size <= features:
        raise MetricError(f"a subset of {size} cannot be drawn from {features} features")
    random = np.random.default_rng(seed)
    return np.stack([random.choice(features, size, replace=False) for _ in range(subsets)])


def faithfulness_correlation(relevance_sums: ArrayLike, score_drops: ArrayLike) -> Floats:
    """Correlate, over subsets of features, the summed relevance with the fall of the score (Bhatt et al., 2020).

    The metric of [bhatt2020evaluating][].

    Args:
        relevance_sums: the relevance of every removed subset, (..., subsets).
        score_drops: by how much the target's score fell without it, (..., subsets).

    Returns:
        (...): 0 for a map that gives every subset the same, which promises nothing; NaN where the score never moves,
        which tells nothing about any map.

    Examples:
        >>> from vitreous import metrics
        >>> round(float(metrics.faithfulness_correlation([0.1, 0.5, 0.9], [0.0, 0.4, 0.8])), 9)
        1.0
    """
    sums, fallen = finite(relevance_sums, "sums of relevance"), finite(score_drops, "falls of the score")
    correlation = pearson(sums, fallen)
    return np.where(is_constant(sums) & ~is_constant(fallen), 0.0, correlation)


def mean_faithfulness_correlation() -> Metric:
    """Make the mean of ``faithfulness_correlation``, kept in ``faithfulness_correlation``."""
    description = "Mean correlation of the relevance of random subsets with the fall of the score without them."
    return mean_of("faithfulness_correlation", "faithfulness correlation", "higher", (-1.0, 1.0), description)
