"""Half precision, and how what was computed in it is read; what is not half is exact enough to compare."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
EXACT = (torch.float32, torch.float64)


def exact(values: Tensor) -> Tensor:
    """Half precision as float32: what a model computed in it is read without rounding again."""
    return values.float() if values.dtype in HALF else values
