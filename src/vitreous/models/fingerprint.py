"""Tells models apart: by their weights, and by what else their answers depend on."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vitreous.source_code import source_hash

if TYPE_CHECKING:
    from torch import nn

# Where a model came from, in which mode it is, and which of two equal ways it computes by: not what it computes.
_BESIDE_THE_POINT = {
    *("training", "fused_attn", "gradient_checkpointing", "name_or_path", "transformers_version", "dtype"),
    *("torch_dtype", "architectures", "grad_checkpointing", "pretrained_cfg", "default_cfg"),
}
# Their code is known by their version; all other code by its content.
_LIBRARIES = {"torch", "timm", "transformers", "torchvision", "open_clip"}


def fingerprint_of(model: nn.Module) -> str:
    """Return the sha256 of a model's parts, their settings, and the names, types, shapes and values of its weights.

    The same weights may be read in many ways: with other numbers of heads, another activation, another pooling.
    """
    digest = hashlib.sha256()
    for line in _structure(model):
        digest.update(f"{line}\n".encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        # Reading the bytes as integers works for every type, bfloat16 included.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _structure(model: nn.Module) -> Iterator[str]:
    """Yield a line for each part, with its class and its settings, for code of one's own, and for the configuration."""
    kinds = {type(part) for part in model.modules()}
    yield from sorted({source_hash(kind) for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES})
    for name, part in model.named_modules():
        kind = type(part)
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
