"""Linear models fitted to the output on random sets of patches.

LIME [ribeiro2016why][] and KernelSHAP [lundberg2017unified][].
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from vitreous._utils.tensors import in_float64
from vitreous.errors import MethodError
from vitreous.methods.occlusion import Of, Painting
from vitreous.methods.perturbation import (
    By,
    PatchMasks,
    PerturbationMethod,
    independent,
    masked_outputs,
    original_output,
    seeded,
    uniform,
)
from vitreous.methods.registry import register
from vitreous.methods.rise import Budget, Seed
from vitreous.methods.view import View


class Lime(PerturbationMethod):
    """argmin_w Σ_z π(z) (f(z) - w·z - b)² + ridge |w|² (LIME eq. 1 with the choices of its image explainer).

    π(z) = exp(-D²/σ²)^½ with D the cosine distance between z and the whole image, which is a sample as well.

    Args:
        by: paint patches or drop their tokens.
        of: probability or logit.
        width: σ.
        ridge: the weight of |w|²; with 0, the minimum-norm solution of least squares.
        budget: the number of sets of patches.
        seed: seed of the sets.
        kept: sets to use instead of random ones, (masks, patches).
    """

    def __init__(
        self,
        *,
        by: By = "paint",
        of: Of = "probability",
        width: float = 0.25,
        ridge: float = 1.0,
        budget: int = 1000,
        seed: int = 0,
        kept: Tensor | None = None,
    ) -> None:
        if budget < 1 or width <= 0 or ridge < 0:
            raise MethodError("budget must be at least 1, width above 0 and ridge not below 0")
        self._by, self._of, self._width, self._ridge = by, of, width, ridge
        self._budget, self._seed, self._given = budget, seed, kept
        self.evaluations = budget

    def maps(self, view: View) -> Tensor:
        """The coefficients w."""
        patches = view.layout.patches
        kept = independent(self._budget, patches, seeded(self._seed)) if self._given is None else self._given
        outputs = masked_outputs(view, PatchMasks(kept, view.layout, view.runner.size), self._by, self._of)
        samples = torch.cat((torch.ones(1, patches, dtype=torch.bool), kept))
        outcomes = torch.cat((original_output(view, self._of)[:, None], outputs), dim=1)
        # The cosine between a set of k patches and all of them is k / sqrt(k patches).
        distance = 1 - (samples.double().mean(dim=1)).sqrt()
        return fitted(samples, outcomes, (-((distance / self._width) ** 2) / 2).exp(), self._ridge)


class KernelShap(PerturbationMethod):
    """Shapley values by weighted least squares (Lundberg and Lee, theorem 2).

    φ minimises Σ_z π(z) (f(z) - f(∅) - φ·z)² under Σφ = f(x) - f(∅), with π(z) = (M-1) / (C(M,k) k (M-k)) for sets of k
    of the M patches. Sets are drawn in proportion to π, each with its complement; if the budget allows, all sets are
    evaluated with weight π and φ are the exact Shapley values.
    """

    def __init__(self, *, by: By = "paint", of: Of = "probability", budget: int = 1000, seed: int = 0) -> None:
        if budget < 2:
            raise MethodError("budget must be at least 2: one forward pass is for the empty set")
        self._by, self._of, self._budget, self._seed = by, of, budget, seed
        self.evaluations = budget

    def maps(self, view: View) -> Tensor:
        """φ of the patches."""
        patches = view.layout.patches
        kept, weights = coalitions(patches, self._budget - 1, self._seed)
        sets = torch.cat((torch.zeros(1, patches, dtype=torch.bool), kept))
        outputs = masked_outputs(view, PatchMasks(sets, view.layout, view.runner.size), self._by, self._of)
        whole, nothing, outcomes = original_output(view, self._of), outputs[:, 0], outputs[:, 1:]
        mean = (whole - nothing)[..., None] / patches
        # φ = mean + u with Σu = 0: u explains what remains after the mean per patch.
        size = kept.to(mean).sum(dim=1)
        left = outcomes - nothing[:, None] - (mean * size).mT
        centred = kept.double() - kept.double().mean(dim=1, keepdim=True)
        return mean + least_squares(centred, left, weights)


def coalitions(patches: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return proper nonempty sets of patches (sets, patches) and their weights; all of them if ``count`` allows."""
    if patches < 30 and count >= 2**patches - 2:
        numbers = torch.arange(1, 2**patches - 1)
        kept = (numbers[:, None] >> torch.arange(patches)) & 1 == 1
        weights = [
            (patches - 1) / (math.comb(patches, size) * size * (patches - size)) for size in kept.sum(dim=1).tolist()
        ]
        return kept, torch.tensor(weights, dtype=torch.float64)
    generator = seeded(seed)
    sizes = torch.arange(1, patches)
    chances = 1 / (sizes * (patches - sizes)).double()
    pairs = math.ceil(count / 2)
    drawn = sizes[torch.multinomial(chances, pairs, replacement=True, generator=generator)]
    ranks = uniform(pairs, patches, generator=generator).argsort(dim=1).argsort(dim=1)
    kept = ranks < drawn[:, None]
    kept = torch.stack((kept, ~kept), dim=1).flatten(0, 1)[:count]
    return kept, torch.ones(count, dtype=torch.float64)


def fitted(samples: Tensor, outcomes: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """Weighted ridge regression with a free intercept, (batch, samples, targets) -> (batch, targets, patches)."""
    share = weights / weights.sum()
    design = samples.double()
    centred = design - share @ design
    left = outcomes - torch.einsum("s,bst->bt", share.to(outcomes), outcomes)[:, None]
    if ridge == 0:
        return least_squares(centred, left, weights)
    normal = centred.T @ (weights[:, None] * centred)
    normal += ridge * torch.eye(len(normal), dtype=normal.dtype)
    return _by_target(torch.linalg.solve(normal, centred.T @ (weights[:, None] * _flat(left))), left)


def least_squares(design: Tensor, outcomes: Tensor, weights: Tensor) -> Tensor:
    """Return the minimum-norm solution of weighted least squares."""
    root = weights.sqrt()[:, None]
    # By SVD, because the system is rank-deficient with fewer samples than patches or with a constraint.
    found = torch.linalg.lstsq(root * design, root * _flat(outcomes), driver="gelsd").solution
    return _by_target(found, outcomes)


def _flat(outcomes: Tensor) -> Tensor:
    """(batch, samples, targets) -> (samples, batch x targets), in float64 on the CPU."""
    return in_float64(outcomes).cpu().transpose(0, 1).flatten(1)


def _by_target(coefficients: Tensor, outcomes: Tensor) -> Tensor:
    """(patches, batch x targets) -> (batch, targets, patches)."""
    return coefficients.T.reshape(outcomes.shape[0], outcomes.shape[2], -1).to(outcomes)


@register(
    "lime",
    family="perturbation",
    paper="Ribeiro et al., “Why Should I Trust You?”: Explaining the Predictions of Any Classifier",
    year=2016,
    arxiv="1602.04938",
    class_specific=True,
    signed=True,
)
def lime(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "what the linear model predicts"] = "probability",
    width: Annotated[float, "kernel width, in cosine distance to the whole image"] = 0.25,
    ridge: Annotated[float, "ridge penalty"] = 1.0,
    budget: Budget = 1000,
    seed: Seed = 0,
) -> Lime:
    """The coefficients of a linear model of the patches, fitted in the neighbourhood of the image."""
    return Lime(by=by, of=of, width=width, ridge=ridge, budget=budget, seed=seed)


@register(
    "kernel_shap",
    family="perturbation",
    paper="Lundberg and Lee, A Unified Approach to Interpreting Model Predictions",
    year=2017,
    arxiv="1705.07874",
    class_specific=True,
    signed=True,
)
def kernel_shap(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "the output that is distributed among the patches"] = "probability",
    budget: Budget = 1000,
    seed: Seed = 0,
) -> KernelShap:
    """Shapley values of the patches, estimated by weighted least squares."""
    return KernelShap(by=by, of=of, budget=budget, seed=seed)
