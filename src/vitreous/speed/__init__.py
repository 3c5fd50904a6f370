"""Speed: the cost of methods relative to plain passes, to the minimum that they need, and to other libraries."""

from vitreous.speed.measuring import measure_speed
from vitreous.speed.timing import SpeedRow

__all__ = ["SpeedRow", "measure_speed"]
