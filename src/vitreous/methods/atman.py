"""AtMan [deiseroth2023atman][]: the drop of the output when attention to a patch is suppressed."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.masks import windows_within
from vitreous.methods.occlusion import average_over
from vitreous.methods.options import MOST_EVALUATIONS
from vitreous.methods.perturbation import PerturbationMethod, original_output, run_pairs
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Needs
from vitreous.tape.output import Quantity

Measure = Literal["loss", "logit", "probability"]


class AtMan(PerturbationMethod):
    """L(target | token i suppressed) - L(target) (AtMan eq. 5), L the cross entropy.

    Suppressed means that in all heads and blocks column k of the scores before the softmax is multiplied by 1 - f s_ik,
    where s_ik is the cosine similarity of the tokens that enter the first block, for k = i and for all patches with
    s_ik ≥ η (eqs. 6 and 7; f = 0.9, as in the authors' program). Attention that pools the tokens is treated alike.

    Args:
        factor: f.
        similarity: η.
        of: what is compared; the loss in the paper.
        budget: evaluations per image. Where there are more patches, those of a square are suppressed together, each
            column as much as the patch of the square that suppresses it most would, and share the score; the squares
            are the smallest that are few enough. ``None`` for every patch by itself, as in the paper.
    """

    def __init__(
        self, *, factor: float = 0.9, similarity: float = 0.7, of: Measure = "loss", budget: int | None = None
    ) -> None:
        if not 0 < factor < 1:
            raise MethodError("factor must lie between 0 and 1")
        if budget is not None and budget < 1:
            raise MethodError("budget must be at least 1")
        self._budget = budget
        self._factor, self._similarity = factor, similarity
        self._of: Quantity = "log_probability" if of == "loss" else of

    def needs(self, layer: int, depth: int) -> Needs:
        """The tokens that enter the first block; and attention that can be seen, or it could not be suppressed."""
        del layer
        return Needs(tokens=frozenset({0}), attention_rows=frozenset({depth - 1}))

    def maps(self, view: View) -> Tensor:
        """What suppressing every patch, or the square that it lies in, costs."""
        runner, squares = view.runner, windows_within(self._budget, view.layout.grid, 1, 1)
        single = self.factors(view)
        factors = torch.stack([single[:, square].amin(dim=1) for square in squares], dim=1)
        outputs = run_pairs(
            view,
            [torch.arange(len(squares))],
            lambda image, square: runner.logits_of_damped(runner.inputs[image], factors[image, square]),
            self._of,
        )
        return average_over(squares, original_output(view, self._of)[..., None] - outputs.mT)

    def factors(self, view: View) -> Tensor:
        """What every column is multiplied with when a patch is suppressed, (batch, patches, tokens)."""
        prefix = view.layout.prefix
        patches = torch.nn.functional.normalize(view.tokens(0)[:, prefix:], dim=-1)
        alike = (patches @ patches.mT).clamp(max=1)
        alike = alike.masked_fill(alike < self._similarity, 0)
        alike.diagonal(dim1=1, dim2=2).fill_(1)
        return 1 - self._factor * torch.nn.functional.pad(alike, (prefix, 0))


@register(
    "atman",
    family="perturbation",
    paper="Deiseroth et al., AtMan: Understanding Transformer Predictions Through Memory Efficient Attention "
    "Manipulation",
    year=2023,
    arxiv="2301.08110",
    class_specific=True,
    signed=True,
)
def atman(
    *,
    factor: Annotated[float, "how much attention scores are suppressed; 1 would be to 0"] = 0.9,
    similarity: Annotated[float, "patches as alike as this are suppressed together; above 1, none"] = 0.7,
    of: Annotated[Measure, "of what the change is measured"] = "loss",
    budget: Annotated[
        int | None,
        "how many evaluations an image may cost at most; where there are more patches, squares of them are suppressed "
        "together, the smallest that are few enough; any number by default",
        MOST_EVALUATIONS,
    ] = None,
) -> AtMan:
    """What suppressing the attention to each patch costs; one evaluation for every patch."""
    return AtMan(factor=factor, similarity=similarity, of=of, budget=budget)
