"""Torch helpers: float64 on any device, and the global state of torch that a call leaves as it found it."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from traceback import clear_frames
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import _C, Tensor, nn
from torch.nn.modules import module as torch_module

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


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def preserves_torch_state(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function to restore torch's state on exit; it runs outside of inference mode, to build graphs."""

    @wraps(function)
    def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        state = _TorchState()
        with state, state:
            state.leave_inference_mode()
            return function(*args, **kwargs)

    return wrapper


def function_modes() -> list[Any]:
    """Return the torch function modes of this thread, innermost last."""
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]  # noqa: SLF001


def hooks_of_this_thread() -> list[tuple[int, dict[int, Any]]]:
    """Return the global module hooks of this thread's traced runs: their ids and the dictionaries they are in."""
    thread, found = threading.get_ident(), []
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):  # noqa: SLF001
        for number, hook in list(hooks.items()):
            if getattr(getattr(hook, "__self__", None), "traced_thread", None) == thread:
                found.append((number, hooks))
    return found


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context that leaves inference mode, or a null context outside of it.

    A guard left over by an interrupt ends when its traceback is dropped, and sets grad mode then. So it is created only
    if it is needed.
    """
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


class _TorchState:
    """The state of torch in this thread, restored on exit."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._modes = function_modes()
        self._autocast = _autocast()
        self._hooks = {number for number, _ in hooks_of_this_thread()}
        self._inference: torch.inference_mode | None = None

    def leave_inference_mode(self) -> None:
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(mode=False)
            self._inference.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            clear_frames(trace)
        for number, hooks in hooks_of_this_thread():
            if number not in self._hooks:
                hooks.pop(number, None)
        if function_modes() != self._modes:
            while _C._len_torch_function_stack():  # noqa: SLF001 - there is no public name for the stack of modes
                _C._pop_torch_function_stack()  # noqa: SLF001
            for mode in self._modes:
                _C._push_on_torch_function_stack(mode)  # noqa: SLF001
        if _autocast() != self._autocast:
            self._restore_autocast()
        if self._inference is not None and hasattr(self._inference, "_inference_mode_context"):
            self._inference.__exit__(None, None, None)  # a second call does nothing
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)

    def _restore_autocast(self) -> None:
        devices, cache, nesting = self._autocast
        for kind, (enabled, dtype) in zip(_DEVICES, devices, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
        while _nesting() > nesting:
            torch.autocast_decrement_nesting()
        if nesting == 0:  # otherwise cached casts of the weights would outlive an optimiser step
            torch.clear_autocast_cache()


def _autocast() -> tuple[list[tuple[bool, torch.dtype]], bool, int]:
    devices = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    return devices, torch.is_autocast_cache_enabled(), _nesting()


def _nesting() -> int:
    """Return the autocast nesting depth. It is only readable by changing it; ``map`` in C is not interruptible."""
    steps = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
    return list(map(operator.call, steps))[1]
