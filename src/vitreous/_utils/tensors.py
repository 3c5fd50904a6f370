"""Tensors: number types, float64 where a device has none, and which tensors hold plain numbers in memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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


_TORCHS_OWN = (Tensor, nn.Parameter)


def special_kind(tensor: Tensor) -> str | None:
    """What kind of tensor this is, with its article, where its numbers cannot simply be read; otherwise None."""
    if tensor.is_nested:
        return "a nested"
    if tensor.layout != torch.strided:
        return "a sparse"
    if tensor.is_quantized:
        return "a quantised"
    return "a meta" if holds_no_numbers(tensor) else None


def holds_no_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has a shape only; a subclass that says it is on ``meta`` may keep its numbers elsewhere."""
    return tensor.is_meta and type(tensor) in _TORCHS_OWN
