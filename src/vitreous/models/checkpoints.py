"""Reads weight files without running code from them, and puts them into a model strictly."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitreous.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

State = dict[str, Tensor]

# Training programs wrap the weights; averaged weights come first because they are the ones that were evaluated.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_SHOWN_KEYS = 3


def read_checkpoint(file: str | Path) -> State:
    """Return the tensors of a safetensors file or a weights-only torch checkpoint, unwrapped.

    Raises:
        ModelError: The file is missing, damaged, holds no weights, or would need code to be run.
    """
    path = Path(file).expanduser()
    if not path.exists():
        raise ModelError(f"{path}: there is no such weights file")
    if not path.is_file():
        raise ModelError(f"{path}: this is not a weights file")
    return _without_prefixes(_unwrapped(_read(path), path))


def _read(path: Path) -> Any:
    try:
        if path.suffix.lower() == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise ModelError(f"{path}: no permission to read this file") from error
    except SafetensorError as error:
        raise ModelError(f"{path}: not a safetensors file, or a damaged one") from error
    except Exception as error:  # the unpickler fails on damaged bytes with any type there is
        raise ModelError(
            f"{path}: not a checkpoint of plain weights, or a damaged one (a file that needs code to load is refused)"
        ) from error


def _unwrapped(content: Any, path: Path) -> State:
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ModelError(f"{path}: the checkpoint holds no weights")
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{path}: the checkpoint holds {key!r}, which is not a tensor, among its weights")
    return dict(content)


def _without_prefixes(state: State) -> State:
    """Remove what data parallelism and compilation put before every key."""
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def load_strictly(model: nn.Module, state: State, *, source: str, creator: Callable[..., Any] | None = None) -> None:
    """Load weights that must fit exactly, if need be after timm's own conversion for this kind of model.

    Args:
        model: The timm model to fill.
        state: The weights.
        source: Where they come from, for the error message.
        creator: timm's function that made the model; its module knows how to convert foreign weights.
    """
    problem = mismatch(model, state)
    if problem:
        converted = _converted(model, state, creator)
        if mismatch(model, converted):
            raise ModelError(f"{source}: the weights do not fit the model: {mismatch(model, converted)}")
        state = converted
    model.load_state_dict(state)


def mismatch(model: nn.Module, state: State) -> str | None:
    """Return what keeps the weights from fitting, or None."""
    wanted = model.state_dict()
    missing = [key for key in wanted if key not in state]
    unexpected = [key for key in state if key not in wanted]
    reshaped = [key for key, value in state.items() if key in wanted and value.shape != wanted[key].shape]
    parts = [f"{label} {_listed(keys)}" for label, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    if reshaped:
        key = reshaped[0]
        parts.append(f"{key} has shape {tuple(state[key].shape)} where {tuple(wanted[key].shape)} is needed")
    return "; ".join(parts) or None


def _listed(keys: list[str]) -> str:
    more = len(keys) - _SHOWN_KEYS
    return ", ".join(keys[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")


def _converted(model: nn.Module, state: State, creator: Callable[..., Any] | None) -> State:
    for module in (getattr(creator, "__module__", ""), type(model).__module__):
        convert = getattr(sys.modules.get(module), "checkpoint_filter_fn", None)
        if convert is None:
            continue
        options = {}
        if "adapt_layer_scale" in inspect.signature(convert).parameters:  # DeiT III spells LayerScale gamma_1
            options["adapt_layer_scale"] = any("gamma_1" in key for key in state)
        try:
            return dict(convert(dict(state), model, **options))
        except Exception:  # noqa: BLE001  the conversion stumbles over foreign weights; the mismatch says why
            return state
    return state
