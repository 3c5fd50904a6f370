"""quantus: mostly metrics; its ``explain`` hands over to captum with settings of its own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vitreous.methods.pixel_maps import patch_sums
from vitreous.speed.peers.peer import Answer, Peer, Scene


def load() -> Any:
    """The package."""
    with warnings.catch_warnings(action="ignore"):
        import quantus  # noqa: PLC0415 - only with --peers

    return quantus


def input_x_gradient(scene: Scene, layer: int) -> Tensor:
    """Token x gradient at a block's input, which is the output of the block below."""
    attributions = load().explain(
        scene.model,
        scene.images,
        scene.target,
        method="LayerGradientXActivation",
        xai_lib_kwargs={"layer": scene.giving(layer)},
        reduce_axes=(),
        device=str(scene.images.device),
    )
    return scene.patches(torch.from_numpy(attributions).sum(dim=-1))


def integrated_gradients(scene: Scene) -> Tensor:
    """Over pixels, always by the trapezoidal rule with ten steps."""
    attributions = load().explain(
        scene.model,
        scene.images,
        scene.target,
        method="IntegratedGradients",
        device=str(scene.images.device),
    )
    return patch_sums(torch.from_numpy(attributions).sum(dim=1), scene.layout.grid, scene.layout.geometry).flatten(1)


QUANTUS = Peer(
    "quantus",
    load,
    (
        Answer(("ixg:layer={layer}",), input_x_gradient),
        Answer(("integrated_gradients:steps=10",), integrated_gradients),
    ),
    usual=("ixg:layer=6", "integrated_gradients:steps=10"),
    apart=True,
)
