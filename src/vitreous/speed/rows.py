"""One row of a measurement: the cost of a method, or of its implementation in another library (peer)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Ratio(NamedTuple):
    """The median of the ratios of single repetitions, with the 25th and 75th percentile."""

    median: float
    low: float
    high: float


class Agreement(NamedTuple):
    """Agreement of a peer's map with ours.

    Attributes:
        agrees: whether the maps are equal up to rounding.
        correlation: over all patches of all images; None for a constant map.
        largest_difference: relative to the largest value of our map.
    """

    agrees: bool
    correlation: float | None
    largest_difference: float


@dataclass(frozen=True)
class SpeedRow:
    """The cost of one job. Numbers that were not measured are None.

    Attributes:
        method: the spelling, or the number of methods in one call.
        ratio_forward: time over that of a plain forward pass without a graph.
        ratio_forward_backward: time over that of a plain forward pass and a backward pass to the pixels.
        ratio_limit: time over that of the minimum of plain passes that the method needs.
        ratio_peak_memory: peak of allocated memory over that of a plain forward and backward pass.
        passes: the passes that were counted.
        limit: the passes that ``ratio_limit`` is relative to.
        peer: the library that implements the method; None for vitreous.
        ratio_peer: the peer's time over ours.
        agreement: of the peer's map with ours.
        spread: 25th and 75th percentile over the repetitions, by name of a ratio of times.
        reason: why there are no numbers.
        milliseconds: median time of the whole batch, on this machine.

    Examples:
        >>> from vitreous.speed import SpeedRow
        >>> SpeedRow("gae", ratio_forward=3.1).ratio_forward
        3.1
    """

    method: str
    ratio_forward: float | None = None
    ratio_forward_backward: float | None = None
    ratio_limit: float | None = None
    ratio_peak_memory: float | None = None
    passes: str | None = None
    limit: str | None = None
    peer: str | None = None
    ratio_peer: float | None = None
    agreement: Agreement | None = None
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    reason: str | None = None
    milliseconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values, rounded to four digits."""
        row = {name: _rounded(value) for name, value in asdict(self).items()}
        row["agreement"] = None if self.agreement is None else _rounded(self.agreement._asdict())
        return row


def ratio_of(seconds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the ratio of two jobs that were timed in turn, taken within each repetition."""
    ratios = [one / other for one, other in zip(seconds, baseline, strict=True)]
    if len(ratios) == 1:
        return Ratio(*ratios * 3)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
