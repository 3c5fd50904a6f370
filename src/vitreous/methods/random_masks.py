"""Methods of random masks: RISE, TIS, and the local linear models LIME and KernelSHAP."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32, in_float64
from vitreous.errors import MethodError
from vitreous.methods.occlusion import Of, Painting
from vitreous.methods.perturbation import (
    By,
    CellMasks,
    Masks,
    PatchMasks,
    PerturbationMethod,
    PixelMasks,
    all_targets,
    balanced,
    blocks_of_patches,
    independent,
    masked_outputs,
    original_output,
    seeded,
    uniform,
)
from vitreous.methods.readout import Resolution, View, layout_means
from vitreous.methods.registry import MOST_EVALUATIONS, AtMost, register
from vitreous.tape import Needs

_MOST_CELLS = 10**8  # of all masks together: 400 MB
Budget = Annotated[int, "number of forward passes per image", MOST_EVALUATIONS]
_LEAST_KEPT = 1e-6
Seed = Annotated[int, "seed of the random masks"]


class Rise(PerturbationMethod):
    """S_c = Σ_j p_c(x ⊙ M_j) M_j / (N p1) (RISE eq. 6).

    Args:
        by: paint patches or drop their tokens.
        resolution: a map of pixels, or its averages over patches. Masks are soft masks of pixels, as in the paper,
            unless tokens are dropped.
        cells: cells of a mask in each direction.
        keep: p1, the probability that a cell is kept.
        budget: N, the number of masks.
        seed: seed of the masks.
        masks: masks to use instead of random ones, (masks, 1, height, width).
    """

    def __init__(
        self,
        *,
        by: By = "paint",
        resolution: Resolution = "pixel",
        cells: int = 7,
        keep: float = 0.5,
        budget: int = 1000,
        seed: int = 0,
        masks: Tensor | None = None,
    ) -> None:
        if by == "drop" and resolution == "pixel":
            raise MethodError("single pixels cannot be dropped; resolution=pixel needs by=paint")
        # The maps are divided by p1, which must not underflow in float32.
        if not _LEAST_KEPT <= keep < 1 or cells < 1 or budget < 1:
            raise MethodError(f"keep must lie between {_LEAST_KEPT:g} and 1, and cells and budget must be at least 1")
        if budget * cells**2 > _MOST_CELLS:
            raise MethodError(
                f"{budget:,} masks of {cells} x {cells} cells take more memory than is allowed: lower cells or budget"
            )
        self._by, self.resolution, self._cells, self._keep = by, resolution, cells, keep
        self._budget, self._seed, self._given = budget, seed, masks
        self.evaluations = budget

    def maps(self, view: View) -> Tensor:
        """The weighted average of the masks."""
        masks = self._masks(view)
        outputs = masked_outputs(view, masks, self._by, "probability")
        maps = masks.weighted_sum(outputs.mT) / (len(masks) * self._keep)
        soft = self._by == "paint" and self.resolution == "patch"
        return layout_means(maps, view.runner.size, view.layout) if soft else maps

    def _masks(self, view: View) -> Masks:
        if self._given is not None:
            return PixelMasks(self._given[:, 0])
        size, layout = view.runner.size, view.layout
        if self._by == "paint":
            return CellMasks(self._budget, self._cells, self._keep, size, seeded(self._seed))
        kept = blocks_of_patches(self._budget, self._cells, self._keep, layout.grid, seeded(self._seed))
        return PatchMasks(kept, layout, size)


@register(
    "rise",
    family="perturbation",
    paper="Petsiuk et al., RISE: Randomized Input Sampling for Explanation of Black-box Models",
    year=2018,
    arxiv="1806.07421",
    class_specific=True,
    signed=False,
)
def rise(
    *,
    by: Annotated[By, "paint cells with 0, or drop their tokens"] = "paint",
    resolution: Annotated[Resolution, "one score per patch, the mean of its pixels, or one per pixel"] = "patch",
    cells: Annotated[int, "cells of a mask in each direction", AtMost(1000)] = 7,
    keep: Annotated[float, "the probability that a cell is kept"] = 0.5,
    budget: Budget = 1000,
    seed: Seed = 0,
) -> Rise:
    """The average of random masks, weighted by the probability of the masked image."""
    return Rise(by=by, resolution=resolution, cells=cells, keep=keep, budget=budget, seed=seed)


class Hsic(PerturbationMethod):
    """HSIC(M_i, y) = tr(K_i H L H) / (n-1)² (Novello et al. eqs. 3 and 5), H = I - 11ᵀ/n.

    K_i is a binary kernel, ½ if two masks agree on patch i and -½ if not; L is a Gaussian kernel of the outputs with
    the median distance as width. With s = ±1 for kept and dropped, K_i = s sᵀ/2, so all patches take one product
    with L.
    """

    def __init__(
        self,
        *,
        by: By = "paint",
        of: Of = "logit",
        budget: int = 1000,
        seed: int = 0,
        kept: Tensor | None = None,
    ) -> None:
        if budget < 2:
            raise MethodError("budget must be at least 2: dependence shows between evaluations")
        self._by, self._of, self._budget, self._seed, self._given = by, of, budget, seed, kept
        self.evaluations = budget

    def maps(self, view: View) -> Tensor:
        """The dependence on every patch."""
        patches = view.layout.patches
        kept = balanced(self._budget, patches, seeded(self._seed)) if self._given is None else self._given
        outputs = masked_outputs(view, PatchMasks(kept, view.layout, view.runner.size), self._by, self._of)
        signs = (2 * kept.to(outputs) - 1) / 2**0.5
        signs = signs - signs.mean(dim=0)
        return torch.stack(
            [torch.stack([dependence(signs, values) for values in image.unbind(dim=1)]) for image in outputs]
        )


def dependence(centred: Tensor, values: Tensor) -> Tensor:
    """Return the HSIC of each column of ``centred`` (n, patches), with product kernels K_i, and ``values`` (n,)."""
    distance = (values[:, None] - values).abs()
    width = distance[~torch.eye(len(values), dtype=torch.bool, device=values.device)].median()
    kernel = torch.exp(-((distance / width.masked_fill(width == 0, 1)) ** 2) / 2)
    return ((kernel @ centred) * centred).sum(dim=0) / (len(values) - 1) ** 2


@register(
    "hsic",
    family="perturbation",
    paper="Novello et al., Making Sense of Dependence: Efficient Black-box Explanations Using Dependence Measure",
    year=2022,
    arxiv="2206.06219",
    class_specific=True,
    signed=False,
)
def hsic(
    *,
    by: Painting = "paint",
    of: Annotated[Of, "the output whose dependence is measured"] = "logit",
    budget: Annotated[int, "number of forward passes per image; memory grows with its square", AtMost(10_000)] = 1000,
    seed: Seed = 0,
) -> Hsic:
    """Statistical dependence (HSIC) of the output on each patch being kept, over random masks."""
    return Hsic(by=by, of=of, budget=budget, seed=seed)


_ROUNDS = 100
_MOVED = 1e-4  # of the largest centre: k-means stops when all centres move less


class TransformerInputSampling(PerturbationMethod):
    """sum_j p_c(x with the patches of M_j) M_j / sum_j M_j (TIS section 3).

    The activations that leave every block, without prefix tokens, are one map of patches for every channel and block.
    They are clustered by k-means into ``budget`` centres; M_j keeps the ``keep`` part of the patches where centre j is
    highest. The division corrects for patches that are in more masks than others; a patch in none gets 0.

    Args:
        by: drop the tokens, as in the paper, or paint the patches.
        budget: number of masks; with as few channels or fewer, every channel is a mask.
        keep: part of the patches that a mask keeps.
        seed: of the first centres, which are channels.
    """

    def __init__(self, *, by: By = "drop", budget: int = 1024, keep: float = 0.5, seed: int = 0) -> None:
        if budget < 1:
            raise MethodError("budget must be at least 1")
        if not 0 < keep < 1:
            raise MethodError("keep must lie between 0 and 1")
        self._by, self._budget, self._keep, self._seed = by, budget, keep, seed

    def needs(self, layer: int, depth: int) -> Needs:
        """What leaves every block."""
        return super().needs(layer, depth) | Needs(tokens=frozenset(range(1, depth + 1)))

    def maps(self, view: View) -> Tensor:
        """The mean probability of the masks that keep a patch; masks differ between images, which run one by one."""
        activations = torch.cat([view.tokens(layer) for layer in range(1, view.depth + 1)], dim=2)
        channels = activations[:, view.layout.prefix :].mT
        found = []
        for image, maps in enumerate(channels):
            masks = self.masks(maps)
            outputs = self._outputs(view, image, masks)
            weights = masks.to(outputs)
            found.append((outputs.mT @ weights) / weights.sum(dim=0).clamp(min=1))
        return torch.stack(found)

    def _outputs(self, view: View, image: int, masks: Tensor) -> Tensor:
        """The probability of every target with the patches of each mask, (masks, targets)."""
        runner, targets = view.runner, all_targets(view)[image]
        pixels = PatchMasks(masks, view.layout, runner.size)
        found = []
        for numbers in torch.split(torch.arange(len(masks), device=masks.device), runner.batch):
            inputs = runner.inputs[torch.full_like(numbers, image)]
            if self._by == "drop":
                logits = runner.logits_of_kept(inputs, masks[numbers].nonzero()[:, 1].view(len(numbers), -1))
            else:
                assert isinstance(inputs, Tensor)
                factors = pixels.pixels(numbers).to(inputs).unsqueeze(runner.channel_axis)
                logits = runner.logits(inputs * factors)
            found.append(runner.explained(at_least_float32(logits), "probability")[:, targets])
        return torch.cat(found)

    def masks(self, maps: Tensor) -> Tensor:
        """Which patches each mask keeps, (masks, patches), given the maps of all channels, (channels, patches)."""
        centres = maps if len(maps) <= self._budget else k_means(maps, self._budget, seeded(self._seed))
        count = max(1, int(self._keep * maps.shape[1]))
        highest = centres.argsort(dim=1, descending=True, stable=True)[:, :count]
        return torch.zeros_like(centres, dtype=torch.bool).scatter(1, highest, True)  # noqa: FBT003


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` centres of points (n, dimensions) by Lloyd's algorithm, started at random points."""
    chosen = torch.randperm(len(points), generator=generator)[:count].to(points.device)
    centres = points[chosen]
    for _ in range(_ROUNDS):
        # The nearest centre has the largest x c - |c|² / 2.
        nearest = torch.addmm(-centres.square().sum(dim=1) / 2, points, centres.T).argmax(dim=1)
        members = torch.bincount(nearest, minlength=count).to(points)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        moved = torch.where(members[:, None] > 0, sums / members.clamp(min=1)[:, None], centres)
        shift, centres = float((moved - centres).abs().max()), moved
        if shift <= _MOVED * float(centres.abs().max()):
            break
    return centres


@register(
    "tis",
    family="perturbation",
    paper="Englebert et al., Explaining through Transformer Input Sampling",
    year=2023,
    url="https://github.com/aenglebert/Transformer_Input_Sampling",
    class_specific=True,
    signed=False,
)
def tis(
    *,
    by: Annotated[By, "drop the tokens of patches, or paint them with 0"] = "drop",
    budget: Annotated[int, "number of masks, one forward pass each", AtMost(10_000)] = 1024,
    keep: Annotated[float, "part of the patches that a mask keeps"] = 0.5,
    seed: Annotated[int, "seed of the clusters"] = 0,
) -> TransformerInputSampling:
    """Mean probability with the half of the patches where a cluster of the model's own channels is highest."""
    return TransformerInputSampling(by=by, budget=budget, keep=keep, seed=seed)


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
