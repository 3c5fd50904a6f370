"""quantus: mostly metrics; its ``explain`` calls captum with its own settings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vitreous.methods.readout import patch_sums
from vitreous.speed.peers.peer import Peer, PeerInput, PeerMethod


def load() -> Any:
    """Import quantus."""
    with warnings.catch_warnings(action="ignore"):
        import quantus  # noqa: PLC0415 - only with --peers

    return quantus


def input_x_gradient(given: PeerInput, layer: int) -> Tensor:
    """Token x gradient at a block's input, which is the output of the block below."""
    attributions = load().explain(
        given.model,
        given.images,
        given.target,
        method="LayerGradientXActivation",
        xai_lib_kwargs={"layer": given.previous_block(layer)},
        reduce_axes=(),
        device=str(given.images.device),
    )
    return given.patches(torch.from_numpy(attributions).sum(dim=-1))


def integrated_gradients(given: PeerInput) -> Tensor:
    """Integrated gradients over pixels; quantus always uses the trapezoidal rule with ten steps."""
    attributions = load().explain(
        given.model,
        given.images,
        given.target,
        method="IntegratedGradients",
        device=str(given.images.device),
    )
    return patch_sums(torch.from_numpy(attributions).sum(dim=1), given.layout.grid, given.layout.geometry).flatten(1)


QUANTUS = Peer(
    "quantus",
    load,
    (
        PeerMethod(("ixg:layer={layer}",), input_x_gradient),
        PeerMethod(("integrated_gradients:steps=10",), integrated_gradients),
    ),
    usual=("ixg:layer=6", "integrated_gradients:steps=10"),
    apart=True,
)
