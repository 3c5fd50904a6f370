"""Reads weight files without running code from them, and puts them into a model strictly."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitreous._utils.messages import shown
from vitreous._utils.storage import expanded
from vitreous._utils.tensors import special_kind
from vitreous.errors import ModelError

State = dict[str, Tensor]

# Training programs wrap the weights; averaged weights come first because they are the ones that were evaluated.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_COUNTER = "n_averaged"  # torch's AveragedModel keeps it beside the weights
_SHOWN_KEYS = 3


def read_checkpoint(file: str | Path) -> State:
    """Return the tensors of a safetensors file or a weights-only torch checkpoint, by the names they have there.

    Raises:
        ModelError: The file is missing, damaged, holds no weights, or would need code to be run.
    """
    path = expanded(file)
    if not path.exists():
        raise ModelError(f"{path}: there is no such weights file")
    if not path.is_file():
        raise ModelError(f"{path}: this is not a weights file")
    return _unwrapped(_read(path), path)


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
        if not isinstance(key, str):
            raise ModelError(f"{path}: {shown(key)} is not the name of a weight")
        if not isinstance(value, Tensor):
            raise ModelError(f"{path}: the checkpoint holds {key!r}, which is not a tensor, among its weights")
        if (kind := special_kind(value)) is not None:
            raise ModelError(f"{path}: {key!r} is {kind} tensor; weights are plain ones")
    return dict(content)


def without_prefixes(state: State) -> State:
    """Remove all that data parallelism, compilation and averaging put before every name."""
    return _namings(state)[-1]


def _namings(state: State) -> list[State]:
    """Return the weights as they are named, and with one more prefix removed as often as all names share one."""
    namings = [state]
    if _COUNTER in state:
        state = {key: value for key, value in state.items() if key != _COUNTER}
    while state and (prefix := _shared_prefix(state)):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
        namings.append(state)
    return namings


def _shared_prefix(state: State) -> str | None:
    return next((prefix for prefix in _PREFIXES if all(key.startswith(prefix) for key in state)), None)


def load_strictly(model: nn.Module, state: State, *, source: str, creator: Callable[..., Any] | None = None) -> None:
    """Load weights that must fit exactly, if need be after timm's own conversion for this kind of model.

    Args:
        model: The model to fill.
        state: The weights.
        source: Where they come from, for the error message.
        creator: timm's function that made the model; its module knows how to convert foreign weights.
    """
    state = _best_named(model, state)
    if mismatch(model, state):
        converted = _converted(model, state, creator)
        problem = mismatch(model, converted) or _resampled_kernel(model, state, converted)
        if problem:
            raise ModelError(f"{source}: the weights do not fit the model: {problem}")
        state = converted
    model.load_state_dict(state)


def _best_named(model: nn.Module, state: State) -> State:
    """Return the weights under those of their names that fit best: a model may itself hold another as ``model``."""
    wanted = model.state_dict().keys()
    # Where no naming is better than another, the names are foreign, and a conversion knows them without prefixes.
    return min(reversed(_namings(state)), key=lambda named: len(wanted ^ named.keys()))


def _resampled_kernel(model: nn.Module, state: State, converted: State) -> str | None:
    """Return which convolution timm's conversion made up from one of another size, or None.

    Positions may be resampled, since that is how a model is made for another image size; weights for another size of
    patches are those of another model.
    """
    for name, part in model.named_modules():
        weight = converted.get(f"{name}.weight")
        if weight is None or not isinstance(part, nn.Conv2d):
            continue
        kernel = weight.shape
        stored = [value.shape for value in state.values() if value.dim() == 4 and value.shape[:2] == kernel[:2]]
        if stored and kernel not in stored:
            found, needed = (" x ".join(map(str, shape[2:])) for shape in (stored[0], kernel))
            return f"{name} takes patches of {needed} pixels, and the weights are for {found}"
    return None


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


CONFIG = "config.json"
MOST_CLASSES = 1_000_000

# The largest value of settings that say how many numbers or modules a network has, far above any that was trained.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "depths", "layers", "mlp_ratio"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 10_000),
    **dict.fromkeys(("num_labels", "num_classes"), MOST_CLASSES),
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "projection_dim"), 10**5),
    **dict.fromkeys(("num_channels", "in_chans"), 10**5),
    **dict.fromkeys(("patch_size", "image_size", "img_size", "input_size", "reg_tokens", "num_register_tokens"), 10**5),
}
_MOST_OF_ANY = 10**7
_BEYOND = 10**300
_COUNTS = (("num_", "max_"), ("_size", "_dim", "_tokens", "_embeddings"))  # how names of other counts begin or end


def check_folder(name: str, folder: Path) -> None:
    """Raise where a folder has no configuration, one with impossible sizes, or something else than files in it.

    Args:
        name: what the model was asked for by.
        folder: where its files are.

    Raises:
        ModelError: the folder cannot be loaded from.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise ModelError(f"{name}: there is no {CONFIG} in {folder}")
    # Opening a pipe would wait for ever.
    odd = next((each for each in folder.iterdir() if each.exists() and not (each.is_file() or each.is_dir())), None)
    if odd is not None:
        raise ModelError(f"{name}: {odd.name} in this folder is not a file")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: its {CONFIG} is damaged: it is not JSON") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name}: its {CONFIG} is damaged: it describes no model")
    check_sizes(name, config)


def check_sizes(name: str, config: Mapping[str, Any]) -> None:
    """Raise where a configuration asks for a network that no machine could build.

    Raises:
        ModelError: a number in it is too large.
    """
    for key, value in _numbers(config):
        most = _MOST.get(key)
        if most is None and (key.startswith(_COUNTS[0]) or key.endswith(_COUNTS[1])):
            most = _MOST_OF_ANY
        if most is not None and value > most:
            raise ModelError(f"{name}: its configuration has {key} = {value:.3g}, more than {most:,}")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Give every number in JSON values with the name that stands before it."""
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(str(name), each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(key, each) for each in value]
        elif isinstance(value, int | float):
            yield key, float(max(-_BEYOND, min(value, _BEYOND)))  # an integer may be one that no float can hold
