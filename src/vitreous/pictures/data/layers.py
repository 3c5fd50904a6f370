"""The start-layer strip: a map summed over the blocks from a start layer up (SkipPLUS Fig. 2)."""

from __future__ import annotations

import math

from torch import nn

from vitreous.aggregate import Rollout
from vitreous.errors import MethodError
from vitreous.models import LoadedModel
from vitreous.pictures.data.strip import Strip, depth_of, strip_of_spellings, with_options
from vitreous.pixels import Images
from vitreous.spelling import parse
from vitreous.targets import Target


def start_layer_strip(model: nn.Module | LoadedModel, image: Images, method: str, target: Target = None) -> Strip:
    """Give the maps of a method for every start layer; SkipPLUS's own is marked."""
    depth = depth_of(model)
    rollout = isinstance(parse(method).aggregation, Rollout)
    captions = {
        _caption(start, None if rollout else math.ceil(depth / 2)): spelling
        for start, spelling in start_layer_spellings(method, depth).items()
    }
    return strip_of_spellings(model, image, method, captions, target)


def start_layer_spellings(method: str, depth: int) -> dict[int, str]:
    """Give the spellings of a method by the first block that counts, in a model of ``depth`` blocks.

    A rollout stays one; everything else is summed over blocks (PLUS).
    """
    recipe = parse(method)
    if not recipe.info.has_layers:
        raise MethodError(f"{method!r} has no layers to start at")
    if isinstance(recipe.aggregation, Rollout):
        return {start: with_options(method, drop=("depth",), start=start) for start in range(depth)}
    _, colon, tail = method.partition(":")
    propagate = ".propagate" if recipe.propagate else ""
    summed = f"{recipe.info.name}.plus{propagate}{colon}{tail}"
    return {start: with_options(summed, drop=("layer", "half"), start=start) for start in range(depth)}


def _caption(start: int, skipplus: int | None) -> str:
    return f"from block {start}" + (" (SkipPLUS)" if start == skipplus else "")
