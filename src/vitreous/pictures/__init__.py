"""Pictures of explanations: overlays, figures and their numbers; none of them touches pyplot or other global state."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Look": "backdrop",
    "Shown": "figures",
    "classes_figure": "figures",
    "comparison_figure": "figures",
    "curves_figure": "figures",
    "overlay_figure": "figures",
    "strips_figure": "figures",
    "transformation_figure": "figures",
    "depth_strip": "data.depth",
    "heads_strip": "data.heads",
    "perturbation_curves": "data.curves",
    "start_layer_strip": "data.layers",
    "token_transformation": "data.transformation",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: explanations themselves use parts of this package."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vitreous.pictures' has no attribute {name!r}")
    value = getattr(import_module(f"vitreous.pictures.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names that are imported when they are used."""
    return sorted({*globals(), *_HOMES})
