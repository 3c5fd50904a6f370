"""Tells models apart: by their weights, and by what else their answers depend on."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._utils.user_code import source_hash

# Where a model came from, in which mode it is, and which of two equal ways it computes by: not what it computes.
_BESIDE_THE_POINT = {
    *("training", "fused_attn", "gradient_checkpointing", "name_or_path", "transformers_version", "dtype"),
    *("torch_dtype", "architectures", "grad_checkpointing", "pretrained_cfg", "default_cfg"),
}
# Their code is known by their version; all other code by its content.
_LIBRARIES = {"torch", "timm", "transformers", "torchvision", "open_clip"}


_KNOWN: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def fingerprint_of(model: nn.Module) -> str:
    """Return the sha256 of a model's parts, their settings, and the names, types, shapes and values of its weights.

    The same weights may be read in many ways: with other numbers of heads, another activation, another pooling.
    """
    digest = hashlib.sha256()
    for line in (*_code(model), *_structure(model)):
        digest.update(f"{line}\n".encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def kept_fingerprint_of(model: nn.Module) -> str:
    """Return the fingerprint as it was worked out before, unless a weight was replaced or written to since.

    For who asks with every picture. What torch does not count goes unnoticed: settings, and what is written through
    ``weight.data``.
    """
    weights = (*model.parameters(), *model.buffers())
    state = tuple((weight.data_ptr(), None if weight.is_inference() else weight._version) for weight in weights)  # noqa: SLF001
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        known = _KNOWN[model] = (state, fingerprint_of(model))
    return known[1]


def _bytes(tensor: Tensor) -> memoryview:
    # Reading the bytes as integers works for every type, bfloat16 included.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _code(model: nn.Module) -> list[str]:
    """Return a line for each piece of code of one's own: classes, and functions that were put into parts of others."""
    own = {written for written in _written(model) if _is_own(written)}  # many parts are of one class
    return sorted({source_hash(written) for written in own})


def _written(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        yield type(part)
        yield from (_callee(put) for put in (*vars(part).values(), *_hooks(part)) if callable(put))


def _callee(put: Any) -> Any:
    """Return the function or class behind something that can be called."""
    while isinstance(put, functools.partial):
        put = put.func
    function = getattr(put, "__func__", put)  # of a bound method
    return function if inspect.isfunction(function) or inspect.isclass(function) else type(function)


def _hooks(part: nn.Module) -> list[Any]:
    return [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]  # noqa: SLF001


def _is_own(written: Any) -> bool:
    package = written.__module__.partition(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def _structure(model: nn.Module) -> Iterator[str]:
    """Yield a line for each part, with its class and its settings, and for the configuration."""
    for name, part in model.named_modules():
        kind, hooks = type(part), _hooks(part)
        if hooks:
            yield f"{name}|{json.dumps(_plain(hooks))}"
        yield f"{name}|{kind.__module__}.{kind.__qualname__}|{json.dumps(_settings(vars(part)), sort_keys=True)}"
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        yield json.dumps(_settings(to_dict()), sort_keys=True)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is plain among some attributes; names with an underscore in front are bookkeeping."""
    plain = {
        name: _plain(value)
        for name, value in values.items()
        if not name.startswith("_") and name not in _BESIDE_THE_POINT
    }
    return {name: value for name, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a number, text or function as JSON tells it; None for anything else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if callable(value) and isinstance(name, str) else None
