"""A metric: a number over a data set that is made of the means of what is kept of every image.

Also the checks of the arrays that metrics take, and the scaling of maps to a common range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitreous._utils.messages import error_message
from vitreous.errors import VitreousError

Floats = NDArray[np.float64]
Direction = Literal["higher", "lower"]


class MetricError(VitreousError, ValueError):
    """The arrays given to a metric cannot be measured: wrong shapes, non-finite values, or nothing at all.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.pearson([1.0, float("nan")], [1.0, 2.0])
        Traceback (most recent call last):
        vitreous.metrics.metric.MetricError: a list of values has values that are not finite
    """


@dataclass(frozen=True)
class Curve:
    """Columns that hold one quantity at several steps, for reports to draw.

    Attributes:
        title: what is drawn.
        axis: what the steps are.
        steps: places on that axis.
        columns: what is kept of every image at each step.

    Examples:
        >>> from vitreous import metrics
        >>> (curve,) = metrics.list_metrics()["MIF"].curves
        >>> curve.title, curve.steps[:3]
        ('MIF, accuracy', (0.0, 10.0, 20.0))
    """

    title: str
    axis: str
    steps: tuple[float, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Metric:
    """A number over a data set, made of what is kept of every image.

    Every published number here is a function of means over images (pixel accuracy is mean(correct) / mean(labelled)),
    so that a bootstrap of any metric is one matrix product. An image counts for a metric when all its columns are
    finite: NaN means that the image cannot be measured, such as average precision on a mask without foreground.

    Attributes:
        name: what a table calls it.
        direction: which values are better; None where neither is.
        range: the smallest and the largest value possible.
        description: one sentence.
        columns: what is kept of every image.
        combine: means over images (..., len(columns)) -> the number (...). It can be pickled and compared.
        curves: those of the columns that are steps of a curve.

    Examples:
        >>> import numpy as np
        >>> from vitreous import metrics
        >>> miou = metrics.list_metrics()["mIoU"]
        >>> miou.direction, miou.range
        ('higher', (0.0, 1.0))
        >>> counts = metrics.count_pixels([[1, 0]], mask=[[1, 1]])
        >>> float(miou.combine(counts))
        0.25
        >>> miou.label, miou.format(0.25)
        ('mIoU (%)', '25.00')
    """

    name: str
    direction: Direction | None
    range: tuple[float, float]
    description: str
    columns: tuple[str, ...]
    combine: Callable[[Floats], Floats]
    curves: tuple[Curve, ...] = ()

    def row(self, *values: float) -> dict[str, float]:
        """Name what was measured on one image: one value for each of the columns."""
        return row(self.columns, values)

    @property
    def label(self) -> str:
        """The name with its unit, as a table shows it: shares of 0..1 are shown in percent."""
        return f"{self.name} (%)" if self._is_share else self.name

    def format(self, value: float) -> str:
        """Write a value of the metric, or a difference of two, as a table shows it.

        Shares are written in percent. Numbers of a wide range, such as percent, have two digits, all others three.
        """
        if self._is_share:
            return f"{100 * value:.2f}"
        return f"{value:.2f}" if self.in_percent else f"{value:.3f}"

    @property
    def in_percent(self) -> bool:
        """Whether values are percent already: their range is wide."""
        low, high = self.range
        return 20 <= high - low < math.inf

    @property
    def _is_share(self) -> bool:
        return self.range == (0.0, 1.0)


@dataclass(frozen=True)
class Weighted:
    """A weighted sum of means, with an offset: every area under a mean curve is one."""

    weights: tuple[float, ...]
    offset: float = 0.0

    def __call__(self, means: Floats) -> Floats:
        """Combine means (..., columns) -> (...)."""
        # Summing products keeps the order of operations the same for one row and for two thousand; a matrix product
        # does not.
        result: Floats = (means * np.asarray(self.weights)).sum(axis=-1) + self.offset
        return result


def mean_of(
    column: str, name: str, direction: Direction | None, range_: tuple[float, float], description: str
) -> Metric:
    """Make the metric that is the plain mean of one column."""
    return Metric(name, direction, range_, description, (column,), Weighted((1.0,)))


def prefixed(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    """Put ``prefix`` in front of the names of columns.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.prefixed("positive_", ["hit", "drop"])
        ('positive_hit', 'positive_drop')
    """
    return tuple(f"{prefix}{name}" for name in names)


def row(columns: Sequence[str], values: NDArray[np.generic] | Sequence[float]) -> dict[str, float]:
    """Name the values of one image, as a row of results holds them.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.row(["aopc", "log_odds"], [0.5, -1.0])
        {'aopc': 0.5, 'log_odds': -1.0}
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.shape != (len(columns),):
        raise MetricError(f"{len(columns)} columns were named and values of shape {numbers.shape} given")
    return dict(zip(columns, numbers.tolist(), strict=True))


IGNORED = -1  # of a mask: a pixel that does not count


def finite(values: ArrayLike, what: str = "a map") -> Floats:
    """Take ``values`` as float64, or raise if one of them is not a number: no metric can rank those."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from a tensor that has a gradient
        raise MetricError(f"{what} cannot be read as numbers: {error_message(error)}") from error
    if array.size == 0:
        raise MetricError(f"{what} is empty")
    if not np.isfinite(array).all():
        raise MetricError(f"{what} has values that are not finite")
    return array


def whole(values: ArrayLike, what: str = "a mask") -> NDArray[np.int64]:
    """Take ``values`` as integers, or raise if one of them is not whole: a mask names a class for every pixel."""
    numbers = finite(values, what)
    integers = numbers.astype(np.int64)
    if (integers != numbers).any():
        raise MetricError(f"{what} has values that are not whole numbers")
    return integers


def yes_or_no(values: ArrayLike, what: str) -> NDArray[np.bool_]:
    """Take ``values`` as truth values, or raise if one is neither 0 nor 1: -1, which does not count, is not yes."""
    numbers = whole(values, what)
    if ((numbers != 0) & (numbers != 1)).any():
        raise MetricError(f"{what} is 1 (yes) or 0 (no), and nothing else")
    return numbers.astype(np.bool_)


def same_shape(first: NDArray[np.generic], second: NDArray[np.generic], what: str) -> None:
    """Raise unless two arrays have the same shape."""
    if first.shape != second.shape:
        raise MetricError(f"{what} differ in shape: {first.shape} and {second.shape}")


def finite_maps(maps: ArrayLike) -> Floats:
    """Take maps (..., height, width) as float64, or raise."""
    found = finite(maps)
    if found.ndim < 2:
        raise MetricError(f"a map has rows and columns, and this one is of shape {found.shape}")
    return found


def of_one_image(map_: ArrayLike) -> Floats:
    """Take the map of one image, (height, width), or raise: ranked together, pixels of several say something else."""
    found = finite_maps(map_)
    if found.ndim > 2:
        raise MetricError(f"maps are measured one by one, and these are several, of shape {found.shape}")
    return found


def min_max(maps: ArrayLike) -> Floats:
    """Scale every map (..., height, width) to 0..1; a constant map becomes 0.

    Examples:
        >>> from vitreous import metrics
        >>> metrics.min_max([[0, 2], [4, 8]]).tolist()
        [[0.0, 0.25], [0.5, 1.0]]
    """
    maps = finite_maps(maps)
    low = maps.min(axis=(-2, -1), keepdims=True)
    span = maps.max(axis=(-2, -1), keepdims=True) - low
    scaled: Floats = (maps - low) / np.where(span > 0, span, 1.0)
    return scaled


def divided(numerator: Floats, denominator: Floats) -> Floats:
    """Divide; what would be a division by zero is NaN, without a warning."""
    result = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result
