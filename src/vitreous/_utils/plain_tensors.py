"""Tells tensors that hold their numbers, one by one in memory, from all other kinds that torch has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
