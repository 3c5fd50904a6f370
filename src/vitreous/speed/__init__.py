"""Speed: what methods cost beside plain passes of the same model, beside the least they need, and beside peers."""

from vitreous.speed.measuring import measure_speed
from vitreous.speed.rows import SpeedRow

__all__ = ["SpeedRow", "measure_speed"]
