"""Half precision, and how what was computed in it is read."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def exact(values: Tensor) -> Tensor:
    """Half precision as float32: what a model computed in it is read without rounding again."""
    return values.float() if values.dtype in HALF else values
