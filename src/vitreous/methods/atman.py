"""AtMan: what it costs when nobody looks at a patch any more."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.asking import Questioning, ask_pairs, unperturbed
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Needs
from vitreous.tape.output import Objective

Measure = Literal["loss", "logit", "probability"]


class AtMan(Questioning):
    """L(target | token i suppressed) - L(target) (AtMan eq. 5), L the cross entropy.

    Suppressed means that in all heads and blocks column k of the scores before the softmax is multiplied by 1 - f s_ik,
    where s_ik is the cosine similarity of the tokens that enter the first block, for k = i and for all patches with
    s_ik ≥ η (eqs. 6 and 7; f = 0.9, as in the authors' program). Attention that pools the tokens is treated alike.
    """

    def __init__(self, *, factor: float = 0.9, similarity: float = 0.7, of: Measure = "loss") -> None:
        if not 0 < factor < 1:
            raise MethodError("factor must lie between 0 and 1")
        self._factor, self._similarity = factor, similarity
        self._of: Objective = "log_probability" if of == "loss" else of

    def needs(self, layer: int, depth: int) -> Needs:
        """The tokens that enter the first block; and attention that can be seen, or it could not be suppressed."""
        del layer
        return Needs(tokens=frozenset({0}), attention_rows=frozenset({depth - 1}))

    def maps(self, view: View) -> Tensor:
        """What suppressing every patch costs."""
        subject, factors = view.subject, self.factors(view)
        said = ask_pairs(
            view,
            [torch.arange(view.layout.patches)],
            lambda image, patch: subject.logits_of_damped(subject.inputs[image], factors[image, patch]),
            self._of,
        )
        return unperturbed(view, self._of)[..., None] - said.mT

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
    paper="Deiseroth, Deb, Weinbach, Brack, Schramowski, Kersting: AtMan: Understanding Transformer Predictions "
    "Through Memory Efficient Attention Manipulation, NeurIPS",
    year=2023,
    class_specific=True,
    signed=True,
)
def atman(
    *,
    factor: Annotated[float, "how much attention scores are suppressed; 1 would be to 0"] = 0.9,
    similarity: Annotated[float, "patches as alike as this are suppressed together; above 1, none"] = 0.7,
    of: Annotated[Measure, "of what the change is measured"] = "loss",
) -> AtMan:
    """What suppressing the attention to each patch costs; one evaluation for every patch."""
    return AtMan(factor=factor, similarity=similarity, of=of)
