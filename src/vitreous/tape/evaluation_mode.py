"""Running a model as it is written and in evaluation mode, also when several threads do so with the same model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from vitreous.errors import UnsupportedModelError


@dataclass
class _Visit:
    """The switches of one module that are off for a while, and how many users want them off."""

    users: int = 0
    switched: list[str] = field(default_factory=list)


# Dropout and stochastic depth; recomputing activations in the backward pass, where nobody listens any more.
_SWITCHES = ("training", "grad_checkpointing")
_visits: dict[nn.Module, _Visit] = {}
_eager = ExitStack()
_eager_users = 0
_lock = threading.Lock()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate ``model`` for a while; of a module's concurrent users, the last restores what the first one found."""
    modules = list(model.modules())
    compiled = any(_is_compiled(module) for module in modules)
    with _lock:
        if compiled:
            _enter_eager(type(model).__name__)
        for module in modules:
            _switch_off(module)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _switch_back(module)
            if compiled:
                _leave_eager()


def _switch_off(module: nn.Module) -> None:
    visit = _visits.setdefault(module, _Visit())
    if visit.users == 0:
        visit.switched = [name for name in _SWITCHES if module.__dict__.get(name) is True]
        for name in visit.switched:
            setattr(module, name, False)
    visit.users += 1


def _switch_back(module: nn.Module) -> None:
    visit = _visits[module]
    visit.users -= 1
    if visit.users == 0:
        for name in visit.switched:
            setattr(module, name, True)
        del _visits[module]


# Compiled models: a compiled function does not call the functions that it was made from, so nothing could be heard.


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _enter_eager(name: str) -> None:
    global _eager_users  # noqa: PLW0603 - torch keeps this setting for the whole process, so its users are counted
    if not hasattr(torch.compiler, "set_stance"):
        raise UnsupportedModelError(f"{name} is compiled, which needs torch 2.6 to be explained; give the model itself")
    if _eager_users == 0:
        _eager.enter_context(torch.compiler.set_stance("force_eager"))
    _eager_users += 1


def _leave_eager() -> None:
    global _eager_users  # noqa: PLW0603
    _eager_users -= 1
    if _eager_users == 0:
        _eager.close()
