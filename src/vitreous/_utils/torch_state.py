"""Leaving torch as it was, also when Ctrl-C comes at the worst moment.

Grad mode, inference mode, autocast, function modes and global module hooks are changed by context managers that are
written in Python, torch's own among them: an interrupt inside ``__exit__``, before it did its work, leaves the change
behind for good. Whatever is left is found here at the boundary, where a public function returns or raises, by comparing
with the state in which it was called.

The state is restored twice, by two nested ``with`` statements: an interrupt that keeps the first from its work lets the
second do it, and one that comes during the second finds it done. Restoring is comparing and setting, so that it does
no harm to do it again.

An interrupt inside the exit of a context manager that is a generator leaves the generator suspended, and the traceback
keeps it alive: when that is dropped, at any time later, the rest of the generator runs and changes torch's state once
more. So the frames of an interrupt's traceback are cleared first. Errors keep theirs, for debuggers.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from traceback import clear_frames
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import _C
from torch.nn.modules import module as torch_module

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def leaves_torch_as_it_was(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Make a function restore torch's state, whatever ends it; it runs outside inference mode, as graphs have to."""

    @wraps(function)
    def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        state = _TorchState()
        with state, state:
            state.leave_inference_mode()
            return function(*args, **kwargs)

    return wrapper


def function_modes() -> list[Any]:
    """The modes that this thread's calls of torch are told to, the innermost last."""
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]  # noqa: SLF001


def hooks_of_this_thread() -> list[tuple[int, dict[int, Any]]]:
    """The hooks that traced runs of this thread have in torch: their numbers, and the dictionaries they are in."""
    thread, found = threading.get_ident(), []
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):  # noqa: SLF001
        for number, hook in list(hooks.items()):
            if getattr(getattr(hook, "__self__", None), "traced_thread", None) == thread:
                found.append((number, hooks))
    return found


def outside_inference_mode() -> AbstractContextManager[Any]:
    """The context in which a graph can be made; none where there is no inference mode to leave.

    A guard that an interrupt leaves behind ends when its traceback is dropped, and sets grad mode at that moment; so
    none is made without need.
    """
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


class _TorchState:
    """What this thread's torch is set to now, to be restored when the context ends."""

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
            self._inference.__exit__(None, None, None)  # a second time it does nothing
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
        if nesting == 0:  # otherwise weights that were cast now would be used when they have been trained
            torch.clear_autocast_cache()


def _autocast() -> tuple[list[tuple[bool, torch.dtype]], bool, int]:
    devices = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    return devices, torch.is_autocast_cache_enabled(), _nesting()


def _nesting() -> int:
    """How many autocast contexts are open. It can only be asked by changing it, which ``map`` does without a break."""
    steps = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
    return list(map(operator.call, steps))[1]
