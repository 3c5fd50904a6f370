"""Looks at a folder with a model before a library opens it: what would make that library wait or build for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitreous.errors import ModelError

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
