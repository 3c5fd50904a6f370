"""Tells tensors that hold their numbers, one by one in memory, from all other kinds that torch has."""

from __future__ import annotations

import torch
from torch import Tensor


def special_kind(tensor: Tensor) -> str | None:
    """What kind of tensor this is, with its article, where its numbers cannot simply be read; otherwise None."""
    if tensor.is_nested:
        return "a nested"
    if tensor.layout != torch.strided:
        return "a sparse"
    if tensor.is_quantized:
        return "a quantised"
    if tensor.is_meta:
        return "a meta"
    return None
