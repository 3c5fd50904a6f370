"""Areas under curves, written out for tests."""

from __future__ import annotations

import numpy as np


def trapezoid(values, places) -> np.ndarray:
    """The area under curves (..., places); numpy's own function has another name before version 2."""
    heights = np.asarray(values)
    return ((heights[..., 1:] + heights[..., :-1]) / 2 * np.diff(places)).sum(axis=-1)
