"""pnpxai: captum's gradients under its own interface, and attention rollout by zennit's hooks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

from torch import Tensor

from vitreous.methods.readout import patch_sums
from vitreous.speed.peers.peer import Peer, PeerInput, PeerMethod

_PARENTS = ("pnpxai", "pnpxai.core", "pnpxai.explainers")


def load(name: str = "grad_x_input") -> Any:
    """Import one of pnpxai's explainers without the other imports of its packages: optuna, shap and gensim."""
    full = f"pnpxai.explainers.{name}"
    if full not in sys.modules:
        found = importlib.util.find_spec("pnpxai")
        if found is None or not found.submodule_search_locations:
            raise ImportError("No module named 'pnpxai'", name="pnpxai")
        before = {parent: sys.modules.get(parent) for parent in _PARENTS}
        for parent in _PARENTS:
            _open(parent, found.submodule_search_locations[0])
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(full)
        finally:
            for parent, module in before.items():
                sys.modules.pop(parent)
                if module is not None:
                    sys.modules[parent] = module
    return sys.modules[full]


def _open(name: str, root: str) -> None:
    """Register an empty package whose submodules can be imported without running its ``__init__``."""
    package = types.ModuleType(name)
    package.__path__ = ["/".join([root, *name.split(".")[1:]])]
    sys.modules[name] = package


def input_x_gradient(given: PeerInput, layer: int) -> Tensor:
    """Token x gradient at a block's input, which is the output of the block below."""
    explainer = load("grad_x_input").GradientXInput(given.model, layer=given.previous_block(layer))
    return given.patches(explainer.attribute(given.images, given.target).sum(dim=-1))


def integrated_gradients(given: PeerInput, steps: int) -> Tensor:
    """Integrated gradients over pixels, all steps in one batch."""
    explainer = load("integrated_gradients").IntegratedGradients(given.model, n_steps=steps)
    attributions = explainer.attribute(given.images, given.target)
    return patch_sums(attributions.detach().sum(dim=1), given.layout.grid, given.layout.geometry).flatten(1)


def rollout(given: PeerInput) -> Tensor:
    """Attention rollout with the mean over heads and nothing discarded."""
    module = load("attention_rollout")
    explainer = module.AttentionRollout(given.model, head_fusion_method="mean", discard_ratio=0.0)
    matrices = explainer.collect_attention_map(given.images, given.target)
    return given.patches(explainer.rollout(*matrices)[:, 0])


PNPXAI = Peer(
    "pnpxai",
    load,
    (
        PeerMethod(("ixg:layer={layer}",), input_x_gradient),
        PeerMethod(("integrated_gradients:steps={steps}",), integrated_gradients),
        PeerMethod(("rollout",), rollout),
    ),
    usual=("ixg:layer=6", "integrated_gradients:steps=10", "rollout"),
    apart=True,
)
