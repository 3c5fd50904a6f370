"""Maps of one photo that differ in one setting, in the order of that setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitreous.architecture import find_architecture
from vitreous.explaining import explain, network_of, stage_of
from vitreous.explanation import Explanation
from vitreous.models import LoadedModel
from vitreous.pixels import Images, Model, find_pixels
from vitreous.targets import Target


@dataclass(frozen=True)
class Strip:
    """Maps of one photo in a row.

    Attributes:
        method: The spelling that they are variations of.
        explanation: What the model says of the photo; its scores include those of the maps where methods made them.
        captions: What each map is.
        maps: Raw scores (maps, patches).
        signed: Whether their sign means something.
        shared: Whether the maps are parts of one sum, so that they share one scale.
    """

    method: str
    explanation: Explanation
    captions: tuple[str, ...]
    maps: Tensor
    signed: bool
    shared: bool = False

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest score of all maps that can be drawn, where they share a scale."""
        drawn = self.maps[self.maps.isfinite().all(dim=1)]
        return (float(drawn.min()), float(drawn.max())) if self.shared and len(drawn) else None


def strip_of_spellings(
    model: Model,
    image: Images,
    method: str,
    spellings: Mapping[str, str],
    target: Target = None,
) -> Strip:
    """Explain one photo by several spellings, given by what they are called in the strip.

    All of them share one forward pass, and a backward pass where they need the same.
    """
    explanation = explain(model, image, list(spellings.values()), target)
    maps = torch.stack([explanation.scores_of(spelling).cpu() for spelling in explanation.methods])
    signed = next(iter(explanation.signed.values()))
    return Strip(method, explanation, tuple(spellings), maps, signed)


def with_options(spelling: str, *, drop: tuple[str, ...] = (), **options: int) -> str:
    """Give a spelling with some of its options set, and others left out."""
    path, _, tail = spelling.strip().partition(":")
    kept = dict(item.split("=", 1) for item in tail.split(",") if item)
    kept = {name.strip(): value.strip() for name, value in kept.items() if name.strip() not in drop}
    kept |= {name: str(value) for name, value in options.items()}
    return path.strip() + (":" + ",".join(f"{name}={value}" for name, value in kept.items()) if kept else "")


def depth_of(model: nn.Module | LoadedModel, images: Images | None = None) -> int:
    """Give the number of blocks of a model; of one whose input size is not known, with these images."""
    network = network_of(model)
    if images is None:
        assert isinstance(model, LoadedModel)
        return find_architecture(network, model.example_input(), stage_of(model)).depth
    return find_architecture(network, find_pixels(model, network, images)[0], stage_of(model)).depth
