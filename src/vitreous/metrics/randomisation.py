"""Whether a map resembles the map of a model whose weights were randomised (Adebayo et al., 2018): it should not."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from vitreous.metrics.arrays import finite, min_max, same_shape
from vitreous.metrics.correlation import is_constant, pearson
from vitreous.metrics.metric import Floats, Metric, MetricError, mean_of


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
