"""Random masks, weighted by the model's output: RISE and HSIC attribution.

RISE [petsiuk2018rise][] averages the masks weighted by the output; HSIC [novello2022making][] measures the statistical
dependence of the output on the presence of a patch.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.occlusion import Of, Painting
from vitreous.methods.options import MOST_EVALUATIONS, AtMost
from vitreous.methods.perturbation import (
    By,
    CellMasks,
    Masks,
    PatchMasks,
    PerturbationMethod,
    PixelMasks,
    balanced,
    blocks_of_patches,
    masked_outputs,
    seeded,
)
from vitreous.methods.readout import Resolution, layout_means
from vitreous.methods.registry import register
from vitreous.methods.view import View

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
