"""Number types: half precision read as float32, and float64 on the processor where a device has none."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
EXACT = (torch.float32, torch.float64)
_WITHOUT = frozenset({"mps"})  # Apple's GPUs: torch refuses to make such a tensor there


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    return device.type not in _WITHOUT


def in_float64(values: Tensor) -> Tensor:
    """The values in float64, on the processor where their device has none."""
    return (values if has_float64(values.device) else values.cpu()).double()


def float64_array(values: Tensor) -> NDArray[np.float64]:
    """The values as an array, in float64."""
    found: NDArray[np.float64] = in_float64(values).cpu().numpy()
    return found


def exact(values: Tensor) -> Tensor:
    """Half precision as float32: what a model computed in it is read without rounding again."""
    return values.float() if values.dtype in HALF else values
