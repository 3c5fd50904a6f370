"""How well a map segments: pixel accuracy, intersection over union and average precision.

A mask is 0 for background, 1 and above for objects, and -1 for pixels that do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous.metrics.metric import (
    IGNORED,
    Floats,
    Metric,
    MetricError,
    divided,
    finite,
    mean_of,
    min_max,
    of_one_image,
    prefixed,
    same_shape,
    whole,
    yes_or_no,
)

COUNTS = ("intersection_background", "intersection_foreground", "union_background", "union_foreground")

HALVES = ("first_half_", "second_half_")
GRADTOKEN_THRESHOLDS = tuple(step / 10 for step in range(10))
_VOC_CLASSES = 21


def above_mean(maps: ArrayLike) -> NDArray[np.bool_]:
    """Take as foreground what lies strictly above the mean of its map (..., height, width) (Chefer et al., 2021).

    The threshold of [chefer2021transformer][].

    Examples:
        >>> from vitreous import metrics
        >>> metrics.above_mean([[0.0, 1.0], [0.2, 0.9]]).tolist()
        [[False, True], [False, True]]
    """
    scaled = min_max(maps)
    above: NDArray[np.bool_] = scaled > scaled.mean(axis=(-2, -1), keepdims=True)
    return above


def above_threshold(maps: ArrayLike, threshold: float) -> NDArray[np.bool_]:
    """Take as foreground what lies strictly above ``threshold`` after scaling every map to 0..1.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.above_threshold([[0.0, 2.0], [1.0, 4.0]], threshold=0.25).tolist()
        [[False, True], [False, True]]
    """
    above: NDArray[np.bool_] = min_max(maps) > threshold
    return above


def count_pixels(foreground: ArrayLike, mask: ArrayLike) -> Floats:
    """Count what pixel accuracy and IoU are made of.

    Args:
        foreground: what is taken as foreground, (..., height, width).
        mask: the truth, of the same shape.

    Returns:
        The counts in the order of ``COUNTS``, (..., 4); NaN for an image of which no pixel counts. Correct pixels are
        the two intersections together, labelled ones the intersection of one class with the union of the other.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.count_pixels([[1, 0], [0, 0]], mask=[[1, 1], [0, -1]]).tolist()
        [1.0, 1.0, 2.0, 2.0]
    """
    taken, classes = whole(foreground, "a segmentation") != 0, whole(mask)
    same_shape(taken, classes, "a segmentation and its mask")
    if taken.ndim < 2:
        raise MetricError(f"a segmentation has rows and columns, and this one is of shape {taken.shape}")
    true, counted = classes > 0, classes != IGNORED
    both = (taken & true).sum(axis=(-2, -1))
    neither = (~taken & ~true & counted).sum(axis=(-2, -1))
    labelled = counted.sum(axis=(-2, -1))
    counts = np.stack([neither, both, labelled - both, labelled - neither], axis=-1).astype(np.float64)
    return np.where(labelled[..., None] > 0, counts, np.nan)


def count_at_thresholds(map_: ArrayLike, mask: ArrayLike, thresholds: Sequence[float]) -> Floats:
    """Count the pixels of one image as ``count_pixels`` does of ``above_threshold``, at all thresholds at once.

    Args:
        map_: of one image, (height, width).
        mask: the truth, of the same shape.
        thresholds: in rising order.

    Returns:
        The counts in the order of ``COUNTS``, (thresholds, 4).

    Examples:
        >>> from vitreous import metrics
        >>> metrics.count_at_thresholds([[0.0, 1.0]], mask=[[0, 1]], thresholds=[0.25, 0.75]).tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """
    scaled, classes = min_max(map_), whole(mask)
    same_shape(scaled, classes, "a map and its mask")
    counted = classes != IGNORED
    if any(next_ <= one for one, next_ in pairwise(thresholds)):
        raise MetricError("thresholds must be in rising order")
    if not counted.any():
        return np.full((len(thresholds), len(COUNTS)), np.nan)
    exceeded = np.searchsorted(thresholds, scaled[counted], side="left")
    true = classes[counted] > 0
    foreground_above, background_above = (
        np.bincount(exceeded[chosen], minlength=len(thresholds) + 1)[::-1].cumsum()[::-1][1:]
        for chosen in (true, ~true)
    )
    background_below = (~true).sum() - background_above
    counts = [background_below, foreground_above, true.size - foreground_above, true.size - background_below]
    return np.stack(counts, axis=-1).astype(np.float64)


def correct_and_labelled(counts: Floats) -> tuple[Floats, Floats]:
    """Read the correct and the labelled pixels from counts (..., 4)."""
    return counts[..., 0] + counts[..., 1], counts[..., 0] + counts[..., 3]


def average_precision(scores: ArrayLike, relevant: ArrayLike) -> float:
    """Measure the average precision Σ (R_n - R_(n-1)) P_n over the distinct scores, highest first.

    Equal scores enter together, so the result does not depend on their order. NaN where nothing is relevant.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.average_precision([0.9, 0.8, 0.1], relevant=[1, 0, 0])
        1.0
    """
    values, wanted = finite(scores, "a list of scores").ravel(), yes_or_no(relevant, "what is relevant").ravel()
    same_shape(values, wanted, "scores and what is relevant")
    return _average_precision_of_sorted(np.sort(values[wanted]), np.sort(values[~wanted]))


def _average_precision_of_sorted(relevant: Floats, others: Floats) -> float:
    """Average, over the relevant scores, the share of the relevant among all scores that are as high."""
    if relevant.size == 0:
        return float("nan")
    found = relevant.size - np.searchsorted(relevant, relevant, side="left")
    wrong = others.size - np.searchsorted(others, relevant, side="left")
    return float((found / (found + wrong)).mean())


def mask_average_precision(map_: ArrayLike, mask: ArrayLike) -> float:
    """Measure the average precision of one map over the pixels that count; NaN without a foreground.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.mask_average_precision([[0.9, 0.8], [0.1, 0.0]], mask=[[0, 1], [0, -1]])
        0.5
    """
    scores, classes = of_one_image(map_), whole(mask)
    same_shape(scores, classes, "a map and its mask")
    counted = classes != IGNORED
    return average_precision(scores[counted], classes[counted] > 0) if counted.any() else float("nan")


def two_class_average_precision(map_: ArrayLike, mask: ArrayLike) -> float:
    """Measure Chefer's form: of the concatenated [1 - R, R] against the one-hot mask, R scaled to 0..1.

    As in the authors' code of [chefer2021transformer][].

    Background counts as a class of its own, so the value is higher than a plain average precision. A constant map has
    no R: as in the authors' program, where a division by zero is set to 0 in both halves, it ranks nothing and has the
    share of the right among all, 1/2. NaN where no pixel counts.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.two_class_average_precision([[0.0, 1.0]], mask=[[0, 1]])
        1.0
    """
    scaled, classes = min_max(of_one_image(map_)), whole(mask)
    same_shape(scaled, classes, "a map and its mask")
    counted = classes != IGNORED
    if not counted.any():
        return float("nan")
    if scaled.max() == 0:
        return 0.5
    inside, outside = np.sort(scaled[classes > 0]), np.sort(scaled[counted & (classes <= 0)])
    # 1 - R of a sorted R is sorted as well, so that only R has to be sorted and the rest is merged.
    right, wrong = _merged(inside, 1 - outside[::-1]), _merged(outside, 1 - inside[::-1])
    return _average_precision_of_sorted(right, wrong)


def _merged(first: Floats, second: Floats) -> Floats:
    """Merge two sorted lists; numpy's stable sort finds the two runs and does just that."""
    return np.sort(np.concatenate([first, second]), kind="stable")


@dataclass(frozen=True)
class _PixelAccuracy:
    def __call__(self, means: Floats) -> Floats:
        return divided(*correct_and_labelled(means))


@dataclass(frozen=True)
class _MeanIou:
    """Of background and foreground; a class that is neither in the masks nor predicted does not count."""

    def __call__(self, means: Floats) -> Floats:
        return _mean_of_present(divided(means[..., :2], means[..., 2:]))


@dataclass(frozen=True)
class _ClassIou:
    index: int

    def __call__(self, means: Floats) -> Floats:
        return divided(means[..., self.index], means[..., 2 + self.index])


def _mean_of_present(ratios: Floats) -> Floats:
    present = np.isfinite(ratios)
    return divided(np.where(present, ratios, 0.0).sum(axis=-1), present.sum(axis=-1).astype(np.float64))


def pixel_accuracy(prefix: str = "", name: str = "pixel accuracy") -> Metric:
    """Make the share of pixels on the right side, over all pixels of the data set."""
    description = "Share of the pixels of the whole data set that are on the right side."
    return Metric(name, "higher", (0.0, 1.0), description, prefixed(prefix, COUNTS), _PixelAccuracy())


def mean_iou(prefix: str = "", name: str = "mIoU") -> Metric:
    """Make the mean of the IoU of background and of foreground, each over the whole data set."""
    description = "Mean of the intersection over union of background and foreground, each over the whole data set."
    return Metric(name, "higher", (0.0, 1.0), description, prefixed(prefix, COUNTS), _MeanIou())


def foreground_iou(prefix: str = "", name: str = "foreground IoU") -> Metric:
    """Make the IoU of the foreground over the whole data set."""
    description = "Intersection over union of the foreground over the whole data set."
    return Metric(name, "higher", (0.0, 1.0), description, prefixed(prefix, COUNTS), _ClassIou(1))


def mean_average_precision(prefix: str = "", name: str = "AP") -> Metric:
    """Make the mean over images of ``mask_average_precision``."""
    description = "Mean over images of the average precision of the map against its mask."
    return mean_of(f"{prefix}average_precision", name, "higher", (0.0, 1.0), description)


def two_class_map(prefix: str = "", name: str = "mAP") -> Metric:
    """Make the mean over images of ``two_class_average_precision``."""
    description = "Mean over images of the average precision of [1 - R, R] against the one-hot mask (Chefer's form)."
    return mean_of(f"{prefix}two_class_average_precision", name, "higher", (0.0, 1.0), description)


# Several classes at once, as in PASCAL VOC.


def class_columns(classes: int, prefix: str = "") -> tuple[str, ...]:
    """Name the counts of ``count_classes``."""
    names = [f"{kind}_{index}" for kind in ("intersection", "union") for index in range(classes)]
    return prefixed(prefix, [*names, "labelled"])


def count_classes(predicted: ArrayLike, truth: ArrayLike, classes: int) -> Floats:
    """Count what accuracy and mIoU over several classes are made of.

    Args:
        predicted: the class of every pixel of one image, (height, width).
        truth: the same of the mask; -1 does not count.
        classes: how many there are, background included.

    Returns:
        Per class the intersection, then per class the union, then the labelled pixels, (2 classes + 1,); NaN for an
        image of which no pixel counts.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.count_classes([[0, 1]], truth=[[0, 2]], classes=3).tolist()
        [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]
    """
    found, true = whole(predicted, "a segmentation"), whole(truth)
    same_shape(found, true, "a segmentation and its mask")
    counted = true != IGNORED
    found, true = found[counted], true[counted]
    if true.size == 0:
        return np.full(2 * classes + 1, np.nan)
    if min(found.min(), true.min()) < 0 or max(found.max(), true.max()) >= classes:
        raise MetricError(f"a segmentation or its mask has a class outside 0..{classes - 1}")
    intersection = np.bincount(true[found == true], minlength=classes)
    union = np.bincount(true, minlength=classes) + np.bincount(found, minlength=classes) - intersection
    return np.concatenate([intersection, union, [true.size]]).astype(np.float64)


@dataclass(frozen=True)
class _ClassesAccuracy:
    classes: int

    def __call__(self, means: Floats) -> Floats:
        return divided(means[..., : self.classes].sum(axis=-1), means[..., -1])


@dataclass(frozen=True)
class _ClassesMeanIou:
    classes: int

    def __call__(self, means: Floats) -> Floats:
        return _mean_of_present(divided(means[..., : self.classes], means[..., self.classes : 2 * self.classes]))


def classes_pixel_accuracy(classes: int, prefix: str = "", name: str = "pixel accuracy") -> Metric:
    """Make the share of pixels with the right one of several classes."""
    description = f"Share of the pixels of the whole data set that have the right one of {classes} classes."
    columns = class_columns(classes, prefix)
    return Metric(name, "higher", (0.0, 1.0), description, columns, _ClassesAccuracy(classes))


def classes_mean_iou(classes: int, prefix: str = "", name: str = "mIoU") -> Metric:
    """Make the mean over the classes that occur of their IoU, each over the whole data set."""
    description = f"Mean over those of {classes} classes that occur of their IoU over the whole data set."
    columns = class_columns(classes, prefix)
    return Metric(name, "higher", (0.0, 1.0), description, columns, _ClassesMeanIou(classes))


def threshold_prefix(threshold: float) -> str:
    """Name a threshold in front of a column: 0.3 gives ``threshold_30_``."""
    return f"threshold_{100 * threshold:g}_"


def half_of(image: str) -> int:
    """Say to which half of a data set an image belongs; its name alone decides, so it is the same everywhere."""
    return hashlib.sha256(image.encode()).digest()[0] % 2


def in_its_half(image: str, columns: Mapping[str, float]) -> dict[str, float]:
    """Write the counts of an image once for each half: as they are in its own half, zero in the other.

    Metrics of counts are ratios of sums, so zeros leave an image out of a half without a mean of its own.
    """
    own = half_of(image)
    return {
        f"{half}{name}": value if index == own else 0.0 * value
        for index, half in enumerate(HALVES)
        for name, value in columns.items()
    }


@dataclass(frozen=True)
class _Search:
    """Scores of every threshold, read from means that stand one threshold after the other."""

    scores: tuple[Callable[[Floats], Floats], ...]

    def __call__(self, means: Floats) -> Floats:
        """Score means (..., thresholds x columns) -> (..., thresholds)."""
        parts = np.split(means, len(self.scores), axis=-1)
        return np.stack([score(part) for score, part in zip(self.scores, parts, strict=True)], axis=-1)


def _at_best(by: Floats, values: Floats) -> Floats:
    """Take from ``values`` (..., thresholds) the one where ``by`` is largest; the lowest threshold wins a tie."""
    best = np.where(np.isnan(by), -np.inf, by).argmax(axis=-1)
    taken: Floats = np.take_along_axis(values, best[..., None], axis=-1)[..., 0]
    return taken


@dataclass(frozen=True)
class _BestThreshold:
    chosen_by: _Search
    measured: _Search
    parts: int

    def __call__(self, means: Floats) -> Floats:
        together = sum(np.split(means, self.parts, axis=-1))
        assert isinstance(together, np.ndarray)
        return _at_best(self.chosen_by(together), self.measured(together))


@dataclass(frozen=True)
class _HeldOutThreshold:
    chosen_by: _Search
    measured: _Search

    def __call__(self, means: Floats) -> Floats:
        first, second = np.split(means, 2, axis=-1)
        measured_on_second = _at_best(self.chosen_by(first), self.measured(second))
        measured_on_first = _at_best(self.chosen_by(second), self.measured(first))
        return (measured_on_first + measured_on_second) / 2


def best_threshold(
    metric: Callable[[str], Metric],
    thresholds: Sequence[float] = GRADTOKEN_THRESHOLDS,
    *,
    chosen_by: Callable[[str], Metric] = mean_iou,
    parts: Sequence[str] = HALVES,
) -> Metric:
    """Make a metric of counts at the threshold that is best on the same images, as GradToken reports it.

    Args:
        metric: makes the metric at one threshold from the prefix of its columns, such as ``pixel_accuracy``.
        thresholds: what is searched.
        chosen_by: the metric whose highest value chooses the threshold.
        parts: prefixes of columns that together hold all images; ``("",)`` where they are not written in halves.
    """
    each = [metric(threshold_prefix(threshold)) for threshold in thresholds]
    search = _Search(tuple(chosen_by("").combine for _ in thresholds))
    measured = _Search(tuple(one.combine for one in each))
    return replace(
        each[0],
        name=f"{metric('').name} (best threshold)",
        description=f"{metric('').description} The threshold is the best one on the same images.",
        columns=tuple(name for part in parts for one in each for name in prefixed(part, one.columns)),
        combine=_BestThreshold(search, measured, len(parts)),
    )


def held_out_threshold(
    metric: Callable[[str], Metric],
    thresholds: Sequence[float] = GRADTOKEN_THRESHOLDS,
    *,
    chosen_by: Callable[[str], Metric] = mean_iou,
) -> Metric:
    """Make a metric of counts at a threshold that was chosen on the other half of the images.

    Each half is measured at the threshold that is best on the other one, and the two results are averaged. The
    columns are those of ``in_its_half``.
    """
    best = best_threshold(metric, thresholds, chosen_by=chosen_by)
    assert isinstance(best.combine, _BestThreshold)
    return replace(
        best,
        name=f"{metric('').name} (held-out threshold)",
        description=f"{metric('').description} Each half of the images has the threshold that is best on the other.",
        combine=_HeldOutThreshold(best.combine.chosen_by, best.combine.measured),
    )


def best_threshold_miou(thresholds: Sequence[float] = GRADTOKEN_THRESHOLDS, *, parts: Sequence[str] = HALVES) -> Metric:
    """Make the mIoU at the threshold that is best on the same images."""
    return best_threshold(mean_iou, thresholds, parts=parts)


def held_out_threshold_miou(thresholds: Sequence[float] = GRADTOKEN_THRESHOLDS) -> Metric:
    """Make the mIoU at a threshold that was chosen on the other half of the images."""
    return held_out_threshold(mean_iou, thresholds)


METRICS = (
    pixel_accuracy(),
    mean_iou(),
    foreground_iou(),
    mean_average_precision(),
    two_class_map(),
    classes_pixel_accuracy(_VOC_CLASSES, name="pixel accuracy (21 classes)"),
    classes_mean_iou(_VOC_CLASSES, name="mIoU (21 classes)"),
    best_threshold(pixel_accuracy),
    best_threshold_miou(),
    held_out_threshold(pixel_accuracy),
    held_out_threshold_miou(),
)
