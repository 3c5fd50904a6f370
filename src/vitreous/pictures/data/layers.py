"""The start-layer strip: a map summed over the blocks from a start layer up (SkipPLUS Fig. 2)."""

from __future__ import annotations

import math

from vitreous.aggregate import Rollout
from vitreous.pictures.data.strip import Strip, depth_of, strip_of_spellings, with_options
from vitreous.pixels import Images, Model, find_model
from vitreous.spelling import parse, plus_from_every_layer
from vitreous.targets import Target


def start_layer_strip(model: Model, image: Images, method: str, target: Target = None) -> Strip:
    """Give the maps of a method for every start layer; SkipPLUS's own is marked."""
    loaded = find_model(model, image)
    depth = depth_of(loaded, image)
    rollout = isinstance(parse(method).aggregation, Rollout)
    captions = {
        _caption(start, None if rollout else math.ceil(depth / 2)): spelling
        for start, spelling in start_layer_spellings(method, depth).items()
    }
    return strip_of_spellings(loaded, image, method, captions, target)


def start_layer_spellings(method: str, depth: int) -> dict[int, str]:
    """Give the spellings of a method by the first block that counts, in a model of ``depth`` blocks.

    A rollout stays one; everything else is summed over blocks (PLUS).
    """
    if isinstance(parse(method).aggregation, Rollout):
        return {start: with_options(method, drop=("depth",), start=start) for start in range(depth)}
    return dict(enumerate(plus_from_every_layer(method, depth)))


def _caption(start: int, skipplus: int | None) -> str:
    return f"from block {start}" + (" (SkipPLUS)" if start == skipplus else "")
