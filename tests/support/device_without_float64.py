"""A device of its own that knows no float64, as Apple's GPUs: real numbers, computed by the processor behind it.

Tensors on it say that they are on ``meta``, the one device that torch knows on every machine and that autograd accepts.
Their numbers lie in a tensor of the processor, on which everything is computed; that a result would be float64 is an
error, in the words of torch on an Apple. Nothing gets there or back but by being moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
_TELLS_A_NUMBER = {"aten::_local_scalar_dense", "aten::equal"}


class There(Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, here: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        made.here = here
        return made

    def __repr__(self) -> str:
        return f"There({self.here})"

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    known: dict[int, There] = {}

    def behind(value):
        if not isinstance(value, There):
            return value
        known[id(value.here)] = value
        return value.here

    args, kwargs = tree_map(behind, (args, kwargs))
    there = bool(known)
    if kwargs.get("device") is not None:
        there = kwargs["device"].type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*args, **kwargs)
    if not there or func._schema.name in _TELLS_A_NUMBER:
        return result

    def placed(value):
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.float64:
            raise TypeError(f"{func}: cannot convert a tensor to float64, which this device does not support")
        return known[id(value)] if id(value) in known else There(value)  # in place, a tensor stays itself

    return tree_map(placed, result)


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def device_without_float64() -> Iterator[torch.device]:
    """The device, for as long as the context lasts."""
    there = {"get_autocast_dtype", "is_autocast_enabled", "autocast"}  # which torch knows of no device called meta
    known = {name: getattr(torch, name) for name in there}

    def of(name: str):
        return lambda kind, *args, **kwargs: known[name]("cpu" if kind == DEVICE.type else kind, *args, **kwargs)

    with (
        patch.multiple(torch, **{name: of(name) for name in there}),
        patch("vitreous._utils.torch_state._WITHOUT_FLOAT64", frozenset({DEVICE.type})),
        _Device(),
    ):
        yield DEVICE
