"""Checkpoints: found on the Hugging Face hub or in its local cache, read without running code, loaded strictly."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitreous._utils.messages import short_repr
from vitreous._utils.storage import expanded
from vitreous._utils.torch_state import special_kind
from vitreous.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable


_PROBE_SECONDS = 5


def is_reachable() -> bool:
    """Return whether the hub answers.

    The hub client retries every file for half a minute, so a missing network is detected here first.
    """
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception:  # noqa: BLE001  any error (DNS, proxy, offline mode) means that the hub cannot be used
        return False
    return True


def cached_file(repository: str, names: Iterable[str]) -> Path | None:
    """Return the first of these files that is in the local cache."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):  # not in the cache, or not a valid repository name
            return Path(huggingface_hub.hf_hub_download(repository, name, local_files_only=True))
    return None


def has_file(repository: str, name: str, *, offline: bool) -> bool | None:
    """Return whether a repository has a file; None if unknown.

    Offline, the cache records files that were downloaded, and files that were found to be missing.
    """
    if offline:
        found = huggingface_hub.try_to_load_from_cache(repository, name)
        return None if found is None else isinstance(found, str)
    try:
        return huggingface_hub.file_exists(repository, name)
    except Exception:  # noqa: BLE001  any error means unknown
        return None


def unreachable(name: str, instead: str, lacking: str = "its weights are") -> ModelError:
    """Return the error for a file that is not cached while the hub cannot be reached."""
    return ModelError(
        f"{name}: {lacking} not on this machine and the model hub cannot be reached; connect, or use {instead}"
    )


State = dict[str, Tensor]

# Keys under which training scripts store weights. EMA weights come first: they are the ones that were evaluated.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_COUNTER = "n_averaged"  # torch.optim.swa_utils.AveragedModel stores it with the weights
_SHOWN_KEYS = 3


def read_checkpoint(file: str | Path) -> State:
    """Return the state dict of a safetensors file or a weights-only torch checkpoint, with its original names.

    Raises:
        ModelError: The file is missing or damaged, contains no weights, or would have to run code.
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
    except Exception as error:  # the unpickler can raise any exception on damaged bytes
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
            raise ModelError(f"{path}: {short_repr(key)} is not the name of a weight")
        if not isinstance(value, Tensor):
            raise ModelError(f"{path}: the checkpoint holds {key!r}, which is not a tensor, among its weights")
        if (kind := special_kind(value)) is not None:
            raise ModelError(f"{path}: {key!r} is {kind} tensor; weights are plain ones")
    return dict(content)


def without_prefixes(state: State) -> State:
    """Remove the prefixes that data parallelism, compilation and averaging add to every name."""
    return _namings(state)[-1]


def _namings(state: State) -> list[State]:
    """Return the state dict with its own names, then with one shared prefix after the other removed."""
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
    """Load a state dict strictly, if necessary after timm's conversion for the architecture.

    Args:
        model: The model.
        state: The state dict.
        source: Where it comes from, for error messages.
        creator: The timm function that built the model; its module has the ``checkpoint_filter_fn``.
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
    """Return the state dict with the naming that fits best: a model may itself have a submodule ``model``."""
    expected = model.state_dict().keys()
    # On a tie the names are foreign, and the conversion expects them without prefixes.
    return min(reversed(_namings(state)), key=lambda named: len(expected ^ named.keys()))


def _resampled_kernel(model: nn.Module, state: State, converted: State) -> str | None:
    """Describe a convolution that timm's conversion resampled from another kernel size; None if there is none.

    Resampled position embeddings are accepted: they adapt a model to another image size. A resampled patch embedding
    means that the checkpoint belongs to another model.
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
    """Describe how a state dict differs from the model's; None if it fits."""
    expected = model.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    reshaped = [key for key, value in state.items() if key in expected and value.shape != expected[key].shape]
    parts = [f"{label} {_listed(keys)}" for label, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    if reshaped:
        key = reshaped[0]
        parts.append(f"{key} has shape {tuple(state[key].shape)} where {tuple(expected[key].shape)} is needed")
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
        if "adapt_layer_scale" in inspect.signature(convert).parameters:  # DeiT III names LayerScale gamma_1
            options["adapt_layer_scale"] = any("gamma_1" in key for key in state)
        try:
            return dict(convert(dict(state), model, **options))
        except Exception:  # noqa: BLE001  the conversion fails on foreign weights; the mismatch is reported instead
            return state
    return state


CONFIG = "config.json"
MOST_CLASSES = 1_000_000

# Upper bounds of settings that determine the size of a network, far above any trained model.
_MAX_BY_SETTING = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "depths", "layers", "mlp_ratio"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 10_000),
    **dict.fromkeys(("num_labels", "num_classes"), MOST_CLASSES),
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "projection_dim"), 10**5),
    **dict.fromkeys(("num_channels", "in_chans"), 10**5),
    **dict.fromkeys(("patch_size", "image_size", "img_size", "input_size", "reg_tokens", "num_register_tokens"), 10**5),
}
_MAX_COUNT = 10**7
_MAX_FLOAT = 10**300
_COUNTS = (("num_", "max_"), ("_size", "_dim", "_tokens", "_embeddings"))  # prefixes and suffixes of other counts


def check_folder(name: str, folder: Path) -> None:
    """Check the folder of a model: it has a configuration with plausible sizes, and only files and folders.

    Args:
        name: the name of the model, for error messages.
        folder: the folder.

    Raises:
        ModelError: the folder cannot be loaded from.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise ModelError(f"{name}: there is no {CONFIG} in {folder}")
    # Opening a pipe would block.
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
    """Refuse a configuration of a network that is too large to build.

    Raises:
        ModelError: a number in it is too large.
    """
    for key, value in _numbers(config):
        most = _MAX_BY_SETTING.get(key)
        if most is None and (key.startswith(_COUNTS[0]) or key.endswith(_COUNTS[1])):
            most = _MAX_COUNT
        if most is not None and value > most:
            raise ModelError(f"{name}: its configuration has {key} = {value:.3g}, more than {most:,}")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every number in nested JSON values with its key."""
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(str(name), each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(key, each) for each in value]
        elif isinstance(value, int | float):
            yield key, float(max(-_MAX_FLOAT, min(value, _MAX_FLOAT)))  # an integer may exceed the range of floats
