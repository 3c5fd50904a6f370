"""Searching a threshold: the best on the same images, and one that was chosen on other images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitreous.metrics.metric import Floats, Metric, prefixed
from vitreous.metrics.segmentation import mean_iou

HALVES = ("first_half_", "second_half_")
GRADTOKEN_THRESHOLDS = tuple(step / 10 for step in range(10))


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
