"""What results say beyond their means: bootstrap intervals, paired tests between methods, and ranks with ties.

Every method is measured on the same resamples of the images, so that differences between methods are paired. All
functions take, per method, what was kept of every image as an array (images, columns), the images in the same order; an
image with a value that is not finite in a metric's columns does not count for that metric.

A bootstrap of few images knows less than it pretends: all resamples of one image are that image. So a single image has
no interval, and p has a floor that depends on the number of images, see ``two_sided``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitreous.metrics.metric import Floats, Metric, MetricError

RESAMPLES = 2000
LEVEL = 0.95
# Sums of the same numbers in another order differ by some 1e-16 of themselves; nothing that is measured is so fine.
EQUAL = 1e-9

# Numbers of resample times image that are turned to float64 at once: 32 MB.
_AT_ONCE = 2**22
_DRAWN_AT_ONCE = 2**16  # images of resamples: few enough for the cache of a processor


@dataclass(frozen=True)
class Estimate:
    """One number of a results table, with its interval and how many images counted for it.

    Attributes:
        low: lower bound of the interval; NaN where fewer than two images count.
        high: upper bound, in the same way.
    """

    method: str
    metric: str
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """The difference first - second of two methods on the images that count for both.

    Attributes:
        p: two-sided; how often a resample of the images would turn or close the difference.
    """

    first: str
    second: str
    metric: str
    difference: float
    low: float
    high: float
    p: float
    n: int


@dataclass(frozen=True)
class Standing:
    """Where a method stands among others by one metric.

    Attributes:
        rank: one more than the number of methods with a better mean, so that no worse method stands above a better one.
        tied: whether it is not distinguishable from the method with the best mean, which is tied with itself.
        against_best: its difference from the method with the best mean; None for that method itself.
    """

    rank: int
    tied: bool
    against_best: Comparison | None


class Resamples:
    """How often each image is drawn in each bootstrap resample; the same for the same seed and number of images.

    Kept as one byte per count, so that 2,000 resamples of 50,000 images take 100 MB.
    """

    def __init__(self, images: int, resamples: int = RESAMPLES, seed: int = 0) -> None:
        if images < 1 or resamples < 1:
            raise MetricError(f"a bootstrap needs images and resamples, not {images} and {resamples}")
        random = np.random.default_rng(seed)
        self._counts = np.empty((resamples, images), dtype=np.uint8)
        step = max(1, _DRAWN_AT_ONCE // images)
        for start in range(0, resamples, step):
            rows = self._counts[start : start + step]
            cells = random.integers(0, images, rows.shape) + images * np.arange(len(rows))[:, None]
            # A count is above 255 with a probability far below 1e-300; it would be cut off, not wrap around.
            rows[:] = np.bincount(cells.ravel(), minlength=rows.size).clip(max=255).reshape(rows.shape)

    @property
    def images(self) -> int:
        """How many images are drawn from."""
        return self._counts.shape[1]

    def sums(self, values: Floats) -> Floats:
        """Sum values (images, columns) over every resample, (resamples, columns)."""
        step = max(1, _AT_ONCE // self.images)
        parts = [self._counts[at : at + step].astype(np.float64) @ values for at in range(0, len(self._counts), step)]
        return np.concatenate(parts)


@dataclass(frozen=True)
class _Measured:
    """One metric of one method on all images and on every resample."""

    value: float
    resampled: Floats
    n: int


def estimates(
    values: Mapping[str, Floats],
    columns: Sequence[str],
    metrics: Sequence[Metric],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """Estimate every metric of every method, with a percentile bootstrap interval over images.

    Args:
        values: per method what was kept of every image, (images, columns). Methods are looked up one after the other,
            so a mapping that loads them on access keeps one in memory at a time.
        columns: names of the columns.
        metrics: what is estimated.
        resamples: how many.
        seed: decides the resamples.
    """
    drawn: Resamples | None = None
    results = []
    for method in values:
        table = _checked(values[method], columns, method)
        drawn = drawn or Resamples(len(table), resamples, seed)
        for metric, measured in zip(metrics, _measure(table, columns, metrics, drawn), strict=True):
            low, high = _interval(measured.resampled, measured.n)
            results.append(Estimate(method, metric.name, measured.value, low, high, measured.n))
    return results


def means_interval(table: Floats, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[Floats, Floats]:
    """Give the percentile bootstrap interval of the mean of every column of (images, columns), (columns,) each."""
    drawn = Resamples(len(table), resamples, seed)
    means = drawn.sums(np.asarray(table, dtype=np.float64)) / len(table)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high


def paired(
    values: Mapping[str, Floats],
    columns: Sequence[str],
    metric: Metric,
    first: str,
    second: str,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare two methods by a paired bootstrap of their difference."""
    tables = _tables(values, columns, metric, [first, second])
    measured = _measured_on_common_images(tables, metric, resamples, seed)
    return _compared(measured, first, second, metric)


def standings(
    values: Mapping[str, Floats],
    columns: Sequence[str],
    metric: Metric,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Standing]:
    """Rank methods by their means, best first, and compare each with the one that has the best mean.

    On five images or fewer all methods are tied with the best. Tests are those of ``paired``, on the images that count
    for all methods, and not corrected for their number. A method whose metric has no value is not ranked.
    """
    if metric.direction is None:
        raise MetricError(f"{metric.name} has no better direction, so methods cannot be ranked by it")
    sign = 1.0 if metric.direction == "higher" else -1.0
    tables = _tables(values, columns, metric, list(values))
    known = {method: table for method, table in tables.items() if np.isfinite(table).all(axis=1).any()}
    if not known:
        return {}
    measured = _measured_on_common_images(known, metric, resamples, seed)
    ranked = {method: found for method, found in measured.items() if np.isfinite(found.value)}
    if not ranked:
        return {}
    best = max(ranked, key=lambda name: sign * ranked[name].value)

    def better(one: float, other: float) -> bool:
        return sign * (one - other) > EQUAL * max(abs(one), abs(other))

    found = {}
    for name in sorted(ranked, key=lambda name: -sign * ranked[name].value):
        rank = 1 + sum(better(other.value, ranked[name].value) for other in ranked.values())
        compared = None if name == best else _compared(ranked, name, best, metric)
        found[name] = Standing(rank, compared is None or compared.p >= 1 - LEVEL, compared)
    return found


def two_sided(differences: Floats, images: int) -> float:
    """Give the two-sided p of a bootstrap of a difference: twice the share of resamples on the rarer side of 0.

    The sample itself counts as one resample on either side, so p is never 0. Nor is it below 2^(1 - images): if two
    methods do not differ, the differences of n paired images are as likely to have either sign, so all n point the same
    way with probability 2 / 2^n, whatever the methods are. Where they do, every resample does too, and without this
    floor one image would be proof. Five images or fewer thus have p of at least 0.0625.

    Args:
        differences: of the metric, one per resample.
        images: how many images count for both methods.
    """
    differences = differences[np.isfinite(differences)]
    if differences.size == 0:
        return 1.0
    rarer = min((differences <= 0).sum(), (differences >= 0).sum())
    floor = 2.0 ** (1 - images)
    return float(min(1.0, max(floor, 2 * (rarer + 1) / (differences.size + 1))))


def _differences(one: _Measured, other: _Measured) -> Floats:
    """Subtract resample by resample; what only the order of a sum makes unequal is equal.

    Means of 0 and 1 lie on a lattice, so two methods tie exactly in many resamples, and ties count on both sides.
    """
    differences = one.resampled - other.resampled
    scale = np.fmax(np.abs(one.resampled), np.abs(other.resampled))
    return np.where(np.abs(differences) <= EQUAL * scale, 0.0, differences)


def _compared(measured: Mapping[str, _Measured], first: str, second: str, metric: Metric) -> Comparison:
    one, other = measured[first], measured[second]
    differences = _differences(one, other)
    low, high = _interval(differences, one.n)
    p = two_sided(differences, one.n)
    return Comparison(first, second, metric.name, one.value - other.value, low, high, p, one.n)


def _checked(table: Floats, columns: Sequence[str], method: str) -> Floats:
    table = np.asarray(table, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != len(columns):
        raise MetricError(f"the results of {method} have shape {table.shape}, not (images, {len(columns)})")
    return table


def _measure(table: Floats, columns: Sequence[str], metrics: Sequence[Metric], drawn: Resamples) -> list[_Measured]:
    """Measure metrics of one method; metrics of the same columns share one product with the resamples."""
    if len(table) != drawn.images:
        raise MetricError(f"results of {len(table)} images cannot be compared with those of {drawn.images}")
    sums: dict[tuple[str, ...], tuple[Floats, Floats]] = {}
    for metric in metrics:
        if metric.columns not in sums:
            kept = _counted(table[:, _places(columns, metric)])
            sums[metric.columns] = kept.sum(axis=0), drawn.sums(kept)
    return [_combined(metric, *sums[metric.columns]) for metric in metrics]


def _combined(metric: Metric, total: Floats, resampled: Floats) -> _Measured:
    everything = metric.combine(_means(total))
    return _Measured(float(everything), metric.combine(_means(resampled)), int(total[-1]))


def _counted(values: Floats) -> Floats:
    """Zero the images that do not count and add a column that marks those that do."""
    counts = np.isfinite(values).all(axis=1, keepdims=True)
    return np.concatenate([np.where(counts, values, 0.0), counts], axis=1)


def _means(sums: Floats) -> Floats:
    """Divide sums (..., columns + 1) by the number of images in their last column; NaN where there are none."""
    number = sums[..., -1:]
    means: Floats = np.where(number > 0, sums[..., :-1] / np.where(number > 0, number, 1.0), np.nan)
    return means


def _places(columns: Sequence[str], metric: Metric) -> list[int]:
    missing = [name for name in metric.columns if name not in columns]
    if missing:
        raise MetricError(f"{metric.name} needs the column {missing[0]}, which the results do not have")
    return [columns.index(name) for name in metric.columns]


def _tables(
    values: Mapping[str, Floats], columns: Sequence[str], metric: Metric, methods: Sequence[str]
) -> dict[str, Floats]:
    """Per method what a metric is made of, (images, columns of the metric)."""
    places = _places(columns, metric)
    return {method: _checked(values[method], columns, method)[:, places] for method in methods}


def _measured_on_common_images(
    tables: Mapping[str, Floats], metric: Metric, resamples: int, seed: int
) -> dict[str, _Measured]:
    """Measure a metric of several methods on the images that count for all of them."""
    if len({len(table) for table in tables.values()}) > 1:
        raise MetricError("methods that were measured on different numbers of images cannot be compared")
    common: NDArray[np.bool_] = np.all([np.isfinite(table).all(axis=1) for table in tables.values()], axis=0)
    drawn = Resamples(len(common), resamples, seed)
    return {
        method: _measure(np.where(common[:, None], table, np.nan), metric.columns, [metric], drawn)[0]
        for method, table in tables.items()
    }


def _interval(resampled: Floats, images: int) -> tuple[float, float]:
    """Take the percentile interval; resamples without a value are left out, and one image has no interval."""
    resampled = resampled[np.isfinite(resampled)]
    if resampled.size == 0 or images < 2:
        return float("nan"), float("nan")
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
