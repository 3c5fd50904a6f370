"""HSIC attribution [novello2022making][]: how much the output depends on the presence of a patch."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.masks import PatchMasks, balanced, seeded
from vitreous.methods.occlusion import Of, Painting
from vitreous.methods.options import AtMost
from vitreous.methods.perturbation import By, PerturbationMethod, masked_outputs
from vitreous.methods.registry import register
from vitreous.methods.rise import Seed
from vitreous.methods.view import View


class Hsic(PerturbationMethod):
    """HSIC(M_i, y) = tr(K_i H L H) / (n-1)² (Novello et al. eqs. 3 and 5), H = I - 11ᵀ/n.

    K_i is the kernel of two values, ½ where two masks agree on patch i and -½ where they do not; L is Gaussian in what
    the model says, as wide as the median distance. With s = ±1 for kept and dropped, K_i = s sᵀ/2, so all patches
    together are one product with L.
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
    """HSIC of every column of ``centred`` (n, patches), whose product kernels are K_i, with ``values`` (n,)."""
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
    of: Annotated[Of, "whose dependence is measured"] = "logit",
    budget: Annotated[
        int, "how many evaluations of the model an image may cost; memory grows with its square", AtMost(10_000)
    ] = 1000,
    seed: Seed = 0,
) -> Hsic:
    """How much what the model says depends on each patch being kept, over random masks."""
    return Hsic(by=by, of=of, budget=budget, seed=seed)
