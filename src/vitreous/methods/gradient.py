"""Methods that read the residual stream and its gradient: gradient, IxG, CAT, AttIxG and AttCAT.

Relevance as input x gradient under a rule: conservative LRP [ali2022xai][] and AttnLRP [achtibat2024attnlrp][].
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.tensors import exact
from vitreous.methods.options import StreamRuleOption
from vitreous.methods.readout import Readout, TokenReadout, total
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Needs

Channels = Annotated[Literal["sum", "l2"], "how channels become one score: their sum, or the length of the vector"]

_ATTCAT = (
    "https://proceedings.neurips.cc/paper_files/paper/2022/hash/"
    "20e45668fefa793bd9f2edf19be12c4b-Abstract-Conference.html"
)


class Gradient(TokenReadout):
    """dy_c/dx_l, one score per token (Simonyan et al. eq. 4).

    Its channel sum is identically 0 on a pre-norm stream: LayerNorm removes the all-ones direction.
    """

    slopes = ("tokens",)

    def __init__(self, channels: Channels = "l2") -> None:
        self.channels = channels
        self.signed = channels == "sum"

    def read(self, view: View, layer: int) -> Tensor:
        """The sum or Euclidean norm over channels."""
        vectors = self.vectors(view, layer)
        if self.channels == "sum":
            return vectors.sum(dim=-1)
        length: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return length

    def vectors(self, view: View, layer: int) -> Tensor:
        """What has a score, (batch, tokens, channels)."""
        return view.token_gradient(self.backward, layer)


class InputGradient(Gradient):
    """Σ_channels x_l * dy_c/dx_l (input x gradient, LibraGrad section 2.1)."""

    values = ("tokens",)

    def __init__(self, channels: Channels = "sum") -> None:
        super().__init__(channels)

    def vectors(self, view: View, layer: int) -> Tensor:
        """Input x gradient."""
        tokens = view.tokens(layer)
        return tokens * super().vectors(view, layer).to(tokens.dtype)


class AttendedInputGradient(InputGradient):
    """Input x gradient times the attention that a token receives, mean over heads and rows (AttCAT eq. 8).

    ``pairing="next"`` reads the stream after the block, x_{l+1} with A_l, as the SkipPLUS authors' program does; that
    leaves out the last block.
    """

    def __init__(self, pairing: Literal["same", "next"]) -> None:
        super().__init__()
        self.pairing = pairing

    def needs(self, layer: int, depth: int) -> Needs:
        """The stream of this block or the next one, and this block's attention."""
        stream = self._stream(layer)
        if stream >= depth:
            return Needs()
        return super().needs(stream, depth) | Needs(attention=frozenset({layer}))

    def read(self, view: View, layer: int) -> Tensor:
        """IxG * AttnFrom."""
        if self._stream(layer) >= view.depth:
            return view.read_row.weights.new_zeros(len(view.tape.logits), view.layout.tokens)
        attention = view.attention(layer)
        received = total(exact(attention.rows(piece)).sum(dim=(1, 2)) for piece in attention.pieces())
        return super().read(view, self._stream(layer)) * (received / (attention.heads * attention.queries))

    def _stream(self, layer: int) -> int:
        return layer + 1 if self.pairing == "next" else layer


@register(
    "gradient",
    family="gradient",
    paper="Simonyan et al., Deep Inside Convolutional Networks: Visualising Image Classification Models and "
    "Saliency Maps",
    year=2013,
    arxiv="1312.6034",
    bf16=("gradient",),
    class_specific=True,
    signed=False,
)
def gradient(*, rule: StreamRuleOption = "plain", channels: Channels = "l2") -> Readout:
    """Length of the gradient at each token."""
    return Gradient(channels).under(rule)


@register(
    "ixg",
    family="gradient",
    paper="Shrikumar et al., Learning Important Features Through Propagating Activation Differences",
    year=2017,
    arxiv="1704.02685",
    bf16=("ixg", "ixg.plus", "ixg.skipplus"),
    class_specific=True,
    signed=True,
)
def ixg(*, rule: StreamRuleOption = "plain", channels: Channels = "sum") -> Readout:
    """Token x gradient, summed over channels."""
    return InputGradient(channels).under(rule)


@register(
    "cat",
    family="gradient",
    paper="Qiang et al., AttCAT: Explaining Transformers via Attentive Class Activation Tokens",
    note="CAT",
    year=2022,
    url=_ATTCAT,
    bf16=("cat",),
    aggregation="plus",
    class_specific=True,
    signed=True,
)
def cat(*, rule: StreamRuleOption = "plain", channels: Channels = "sum") -> Readout:
    """Token x gradient, summed over all blocks."""
    return InputGradient(channels).under(rule)


@register(
    "attixg",
    family="gradient",
    paper="Qiang et al., AttCAT: Explaining Transformers via Attentive Class Activation Tokens",
    year=2022,
    url=_ATTCAT,
    bf16=("attixg",),
    class_specific=True,
    signed=True,
)
def attixg(*, rule: StreamRuleOption = "plain", pairing: Literal["same", "next"] = "same") -> Readout:
    """Token x gradient x the attention the token receives."""
    return AttendedInputGradient(pairing).under(rule)


@register(
    "attcat",
    family="gradient",
    paper="Qiang et al., AttCAT: Explaining Transformers via Attentive Class Activation Tokens",
    year=2022,
    url=_ATTCAT,
    bf16=("attcat", "attcat.skipplus"),
    aggregation="plus",
    class_specific=True,
    signed=True,
)
def attcat(*, rule: StreamRuleOption = "plain", pairing: Literal["same", "next"] = "same") -> Readout:
    """Token x gradient x the attention the token receives, summed over all blocks."""
    return AttendedInputGradient(pairing).under(rule)


@register(
    "conservative_lrp",
    family="relevance",
    paper="Ali et al., XAI for Transformers: Better Explanations through Conservative Propagation",
    year=2022,
    arxiv="2202.07304",
    bf16=("conservative_lrp",),
    class_specific=True,
    signed=True,
)
def conservative_lrp() -> Readout:
    """Token x gradient with attention (eq. 8) and the norms' variance (eq. 9) held constant."""
    return InputGradient().under("conservative")


@register(
    "attnlrp",
    family="relevance",
    paper="Achtibat et al., AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers",
    year=2024,
    arxiv="2402.05602",
    bf16=("attnlrp",),
    class_specific=True,
    signed=True,
)
def attnlrp() -> Readout:
    """Token x gradient with variance (prop. 3.4) and gates (eq. 9) constant and products' gradients halved (eq. 7)."""
    return InputGradient().under("attnlrp")
