"""Metrics of explanations: pure functions on arrays, and numbers over a data set with their direction and range."""

from vitreous.metrics.metric import Direction, Metric, MetricError, prefixed, row
from vitreous.metrics.registry import list_metrics

__all__ = ["Direction", "Metric", "MetricError", "list_metrics", "prefixed", "row"]
