"""Whether scores say what patches do: SaCo, single-deletion correlation, completeness, classes, weights and shifts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous.metrics.metric import Floats, Metric, MetricError, finite, mean_of, same_shape
from vitreous.metrics.sanity import is_constant, spearman

ENTROPY_BINS = 100


def salience_groups(map_: ArrayLike, groups: int) -> list[NDArray[np.int64]]:
    """Divide the features of a map into groups of falling salience, of equal size but for one feature.

    Of equal features the earlier ranks higher.

    Examples:
        >>> from vitreous import metrics
        >>> [group.tolist() for group in metrics.salience_groups([0.1, 0.9, 0.5, 0.2], groups=2)]
        [[1, 2], [3, 0]]
    """
    values = finite(map_).ravel()
    if not 2 <= groups <= values.size:
        raise MetricError(f"{values.size} features cannot be divided into {groups} groups")
    order = np.argsort(-values, kind="stable")
    return [np.asarray(group, dtype=np.int64) for group in np.array_split(order, groups)]


def salience_coefficient(saliences: ArrayLike, effects: ArrayLike) -> Floats:
    """Compare all pairs of groups of features: SaCo, the salience-guided faithfulness coefficient.

    The metric of [wu2024faithfulness][]: for every pair of groups i < j, s(G_i) - s(G_j) counts for the map where group
    i changes the prediction at least as much as group j, and against it where it changes it less; the sum is divided by
    that of the absolute values.

    Args:
        saliences: the summed salience of the groups, falling, (..., groups).
        effects: by how much the prediction falls without each group, (..., groups).

    Returns:
        (...): 1 for an order that is right everywhere, -1 for one that is wrong everywhere, and 0 for a map that gives
        all groups the same, which promises nothing.

    Examples:
        >>> from vitreous import metrics
        >>> float(metrics.salience_coefficient([3.0, 2.0, 0.0], effects=[0.5, 0.1, 0.2]))
        0.3333333333333333
    """
    salience, effect = finite(saliences, "the salience of groups"), finite(effects, "the effects of groups")
    same_shape(salience, effect, "saliences and effects")
    if salience.shape[-1] < 2:
        raise MetricError("at least two groups are needed, to compare them")
    first, second = np.triu_indices(salience.shape[-1], k=1)
    weights = np.abs(salience[..., first] - salience[..., second])
    signs = np.where(effect[..., first] >= effect[..., second], 1.0, -1.0)
    # Sums of equal numbers differ in their last digits, which promise nothing.
    total = np.where(is_constant(salience), 0.0, weights.sum(axis=-1))
    result: Floats = np.where(total > 0, (signs * weights).sum(axis=-1) / np.where(total > 0, total, 1.0), 0.0)
    return result


def single_deletion_correlation(scores: ArrayLike, drops: ArrayLike) -> float:
    """Correlate the ranks of parts' scores with the fall of the output when each part alone is deleted.

    The score of [hesse2024benchmarking][]. A map that gives every part the same promises nothing: 0. NaN where the
    output never moves, so that no map can be judged.

    Examples:
        >>> from vitreous import metrics
        >>> round(metrics.single_deletion_correlation([0.1, 0.9, 0.5], drops=[0.0, 0.7, 0.2]), 9)
        1.0
    """
    fallen = finite(drops, "falls of the output")
    if is_constant(fallen.ravel()):
        return float("nan")
    return spearman(finite(scores).ravel(), fallen.ravel())


def completeness_error(total: ArrayLike, explained: ArrayLike) -> Floats:
    """Measure how far the sum of a map is from what it explains: |Σ - y| / (|Σ| + |y|).

    Completeness is an axiom of [sundararajan2017axiomatic][], where y is a difference of two outputs, and a measure of
    [mehri2025libragrad][]. The form used here is 0 where the two are equal and at most 1, so that a mean over images is
    not that of its worst one. Two zeros are equal.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.completeness_error([2.0, 1.0, -1.0], explained=[2.0, 3.0, 1.0]).tolist()
        [0.0, 0.5, 1.0]
    """
    one, other = finite(total, "a sum of scores"), finite(explained, "an output")
    same_shape(one, other, "sums and outputs")
    size = np.abs(one) + np.abs(other)
    result: Floats = np.abs(one - other) / np.where(size > 0, size, 1.0)
    return result


def histogram_entropy(map_: ArrayLike, bins: int = ENTROPY_BINS) -> float:
    """Measure the entropy, in nats, of the histogram of a map's values over equal bins from the lowest to the highest.

    Examples:
        >>> from vitreous import metrics
        >>> round(metrics.histogram_entropy([0.0, 0.0, 1.0, 1.0]), 6)
        0.693147
    """
    if bins < 1:
        raise MetricError(f"a histogram has at least one bin, not {bins}")
    counts, _ = np.histogram(finite(map_).ravel(), bins=bins)
    shares = counts[counts > 0] / counts.sum()
    return float(max(0.0, -(shares * np.log(shares)).sum()))


def complexity_rise(map_: ArrayLike, randomised: ArrayLike, bins: int = ENTROPY_BINS) -> float:
    """Measure by how much the map of a model with random weights is more complex, relative to the model's own map.

    The efficient model parameter randomisation test of [hedstrom2024sanity][]. NaN for a map of one value, which has
    no complexity to be compared with.

    Examples:
        >>> from vitreous import metrics
        >>> round(metrics.complexity_rise([0.0, 0.0, 1.0, 1.0], randomised=[0.0, 1.0, 2.0, 3.0]), 6)
        1.0
    """
    before = histogram_entropy(map_, bins)
    return (histogram_entropy(randomised, bins) - before) / before if before > 0 else float("nan")


def mean_saco() -> Metric:
    """Make the mean of ``salience_coefficient``, kept in ``saco``."""
    description = "Mean of pairwise comparisons of groups of pixels: more salient ones must change the prediction more."
    return mean_of("saco", "SaCo", "higher", (-1.0, 1.0), description)


def mean_single_deletion() -> Metric:
    """Make the mean of ``single_deletion_correlation``, kept in ``single_deletion``."""
    description = "Mean rank correlation of parts' scores with the fall of the output when each part alone is deleted."
    return mean_of("single_deletion", "single-deletion correlation", "higher", (-1.0, 1.0), description)


def mean_completeness_error() -> Metric:
    """Make the mean of ``completeness_error``, kept in ``completeness_error``."""
    description = "Mean difference of the map's sum and the explained logit, as a part of the sum of their sizes."
    return mean_of("completeness_error", "completeness error", "lower", (0.0, 1.0), description)


def mean_class_similarity() -> Metric:
    """Make the mean of ``spearman`` of the map and that of another class, kept in ``random_logit``."""
    description = "Mean rank correlation of the map with the map of a random other class."
    return mean_of("random_logit", "random-logit Spearman", "lower", (-1.0, 1.0), description)


def mean_complexity_rise() -> Metric:
    """Make the mean of ``complexity_rise``, kept in ``complexity_rise``."""
    description = "Mean relative rise of the map's entropy when all weights are random (eMPRT)."
    return mean_of("complexity_rise", "eMPRT", "higher", (-1.0, np.inf), description)


def mean_shift_similarity(pixels: int) -> Metric:
    """Make the mean of ``spearman`` of the maps of an image and of the same shifted by some pixels."""
    noun = "pixel" if pixels == 1 else "pixels"
    description = f"Mean rank correlation of the map with those of the image shifted by {pixels} {noun}."
    return mean_of(f"shift_{pixels}", f"shift stability, {pixels} px", "higher", (-1.0, 1.0), description)


METRICS = (
    mean_saco(),
    mean_single_deletion(),
    mean_completeness_error(),
    mean_class_similarity(),
    mean_complexity_rise(),
    mean_shift_similarity(1),
)
