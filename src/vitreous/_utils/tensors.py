"""Tensor helpers: precisions, float64 on devices without it, and tensors whose values cannot be read."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)
EXACT = (torch.float32, torch.float64)
_WITHOUT_FLOAT64 = frozenset({"mps"})


def has_float64(device: torch.device) -> bool:
    """Whether a device supports float64."""
    return device.type not in _WITHOUT_FLOAT64


def in_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the device does not support it."""
    return (values if has_float64(values.device) else values.cpu()).double()


def float64_array(values: Tensor) -> NDArray[np.float64]:
    """Convert to a float64 array."""
    found: NDArray[np.float64] = in_float64(values).cpu().numpy()
    return found


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32; other dtypes are unchanged."""
    return values.float() if values.dtype in HALF else values


_PLAIN_TYPES = (Tensor, nn.Parameter)


def special_kind(tensor: Tensor) -> str | None:
    """Return the kind of a tensor whose values cannot be read directly, with its article; None for plain tensors."""
    if tensor.is_nested:
        return "a nested"
    if tensor.layout != torch.strided:
        return "a sparse"
    if tensor.is_quantized:
        return "a quantised"
    return "a meta" if is_meta(tensor) else None


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device; a subclass that reports it may store its values elsewhere."""
    return tensor.is_meta and type(tensor) in _PLAIN_TYPES
