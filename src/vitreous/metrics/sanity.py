"""Metrics of sanity checks: correlation and faithfulness, similarity of maps, concentration and sensitivity.

Concentration takes maps as lists of values (..., n) and ignores their sign. A map of zeros counts as a constant one,
which is the most complex: no method gains by returning nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous.metrics.metric import Floats, Metric, MetricError, finite, mean_of, min_max, same_shape

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
        so that no map can be judged.

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


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Correlate the ranks of two maps of one image; equal values share their mean rank.

    For the test of [adebayo2018sanity][].

    One constant map resembles no map that is not: 0; two constant maps are alike: 1.

    Examples:
        >>> from vitreous import metrics
        >>> round(metrics.spearman([[1, 2], [3, 4]], [[10, 20], [30, 99]]), 9)
        1.0
    """
    one, other = finite(first), finite(second)
    same_shape(one, other, "two maps")
    if one.ndim > 2:
        raise MetricError(f"maps are compared one by one, and these are several, of shape {one.shape}")
    one, other = one.ravel(), other.ravel()
    if is_constant(one) or is_constant(other):
        return float(is_constant(one) and is_constant(other))
    return float(pearson(ranks(one), ranks(other)))


def ranks(values: Floats) -> Floats:
    """Rank values (n,) from 1, equal ones by the mean of their places."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_place: Floats = last - (counts - 1) / 2
    return mean_place[group]


def structural_similarity(first: ArrayLike, second: ArrayLike, window: int = 7) -> float:
    """Compare two maps (height, width), each scaled to 0..1, by SSIM with a square window (Wang et al., 2004).

    SSIM is defined in [wang2004image][].

    The constants are the paper's (0.01 and 0.03 of the scale), variances are those of samples, and only windows that
    lie wholly inside are averaged.

    Examples:
        >>> import numpy as np
        >>> from vitreous import metrics
        >>> map_ = np.arange(64.0).reshape(8, 8)
        >>> round(metrics.structural_similarity(map_, map_), 9)
        1.0
    """
    one, other = min_max(first), min_max(second)
    same_shape(one, other, "two maps")
    if window < 2:
        raise MetricError(f"a window has at least 2 x 2 pixels, not {window} x {window}")
    if one.ndim != 2 or min(one.shape) < window:
        raise MetricError(f"maps of shape {one.shape} have no room for a window of {window} x {window}")
    of_sample = window**2 / (window**2 - 1)
    mean_one, mean_other = _window_means(one, window), _window_means(other, window)
    variance_one = of_sample * (_window_means(one * one, window) - mean_one**2)
    variance_other = of_sample * (_window_means(other * other, window) - mean_other**2)
    covariance = of_sample * (_window_means(one * other, window) - mean_one * mean_other)
    c1, c2 = 0.01**2, 0.03**2
    brightness = (2 * mean_one * mean_other + c1) / (mean_one**2 + mean_other**2 + c1)
    structure = (2 * covariance + c2) / (variance_one + variance_other + c2)
    return float((brightness * structure).mean())


def _window_means(image: Floats, window: int) -> Floats:
    """Average over every window that lies wholly inside, one axis after the other."""
    for axis in (0, 1):
        image = np.lib.stride_tricks.sliding_window_view(image, window, axis=axis).mean(axis=-1)
    return image


def mean_randomisation_spearman(prefix: str = "", name: str = "randomisation Spearman") -> Metric:
    """Make the mean of ``spearman`` of the map and the randomised model's, kept in ``<prefix>spearman``."""
    description = "Mean rank correlation of the map with the map of the same model with random weights."
    return mean_of(f"{prefix}spearman", name, "lower", (-1.0, 1.0), description)


def mean_randomisation_ssim() -> Metric:
    """Make the mean of ``structural_similarity`` to the randomised model's map, kept in ``ssim``."""
    description = "Mean structural similarity of the map to the map of the same model with random weights."
    return mean_of("ssim", "randomisation SSIM", "lower", (-1.0, 1.0), description)


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


METRICS = (
    mean_faithfulness_correlation(),
    mean_max_sensitivity(),
    mean_average_sensitivity(),
    mean_randomisation_spearman(),
    mean_randomisation_ssim(),
    mean_sparseness(),
    mean_complexity(),
    mean_effective_complexity(),
)
