"""Methods that read the residual stream and its gradient.

Gradient, IxG, CAT, AttIxG and AttCAT; IxG under a rule, which is conservative LRP [ali2022xai][] or AttnLRP
[achtibat2024attnlrp][]; FullGrad [srinivas2019full][] on tokens, and DecompX [modarressi2023decompx][], its frozen
form.

The output of a piecewise linear network is Σ input x gradient + Σ bias x gradient (FullGrad eq. 5). Biases are those of
linear layers and norms, and the implicit bias f(u) - f'(u) u of an activation. A bias belongs to the token that it is
added to; after the pooling, to the tokens that the head reads. Under the plain rule the sum differs from a Vision
Transformer's logit because of attention and norms; under ``rule=libra`` it is the logit (LibraGrad, Mehri et al., CVPR
2025).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.methods.readout import Readout, TokenReadout, View, total
from vitreous.methods.registry import StreamRuleOption, register
from vitreous.tape import GradientNeeds, Needs

Channels = Annotated[Literal["sum", "l2"], "how channels become one score: their sum, or the length of the vector"]

_ATTCAT = (
    "https://proceedings.neurips.cc/paper_files/paper/2022/hash/"
    "20e45668fefa793bd9f2edf19be12c4b-Abstract-Conference.html"
)


class Gradient(TokenReadout):
    """dy_c/dx_l, one score per token (Simonyan et al. eq. 4).

    Its channel sum is identically 0 on a pre-norm stream: LayerNorm removes the all-ones direction.
    """

    gradients = ("tokens",)

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
        """The vectors that are reduced to scores, (batch, tokens, channels)."""
        return view.token_gradient(self.backward, layer)


class InputGradient(Gradient):
    """Σ_channels x_l * dy_c/dx_l (input x gradient, LibraGrad section 2.1)."""

    activations = ("tokens",)

    def __init__(self, channels: Channels = "sum") -> None:
        super().__init__(channels)

    def vectors(self, view: View, layer: int) -> Tensor:
        """Input x gradient."""
        tokens = view.tokens(layer)
        return tokens * super().vectors(view, layer).to(tokens.dtype)


class AttendedInputGradient(InputGradient):
    """Input x gradient times the attention that a token receives, mean over heads and rows (AttCAT eq. 8).

    ``pairing="next"`` reads the stream after the block, x_{l+1} with A_l, as in the SkipPLUS authors' code; that omits
    the last block.
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
        received = total(at_least_float32(attention.rows(piece)).sum(dim=(1, 2)) for piece in attention.pieces())
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


class FullGradient(InputGradient):
    """Σ_channels x_l * dy_c/dx_l + Σ bias * dy_c/d(output) over everything from block l on (FullGrad eq. 5).

    Over several layers each bias counts once (SkipPLUS eqs. 5-6).
    """

    def needs(self, layer: int, depth: int) -> Needs:
        """The stream at the layer, and the biases from there to the head."""
        biases = GradientNeeds(biases=frozenset(range(layer, depth + 1)))
        return super().needs(layer, depth) | Needs(gradients={self.backward: biases})

    def read(self, view: View, layer: int) -> Tensor:
        """FullGrad started at a layer."""
        return self.read_sum(view, range(layer, layer + 1))

    def read_sum(self, view: View, layers: range) -> Tensor:
        """FullGrad+ (SkipPLUS eqs. 5-6): input x gradient of every layer, and each bias once."""
        scores = super().read(view, layers[0])
        for layer in layers[1:]:
            scores += super().read(view, layer)
        for layer in range(layers[0], view.depth + 1):
            scores += self.shares(view.biases(self.backward, layer))
        return scores

    def shares(self, biases: Tensor) -> Tensor:
        """Distribute bias x gradient (batch, tokens), given for the token that each bias is added to."""
        return biases


class EquallySharedBiases(FullGradient):
    """Σ_channels x_l * dy_c/dx_l + 1/n Σ bias * dy_c/d(output) over everything from block l on, under the libra rule.

    DecompX with every bias shared equally among the n tokens where it is added. All that follows is linear under that
    rule, so the shares stay equal to the end.
    """

    def shares(self, biases: Tensor) -> Tensor:
        """Distribute equally among all tokens."""
        return biases.mean(dim=1, keepdim=True)


@register(
    "fullgrad",
    family="gradient",
    paper="Srinivas and Fleuret, Full-Gradient Representation for Neural Network Visualization",
    year=2019,
    arxiv="1905.00780",
    bf16=("fullgrad",),
    class_specific=True,
    signed=True,
)
def fullgrad(*, rule: StreamRuleOption = "plain") -> Readout:
    """Token x gradient, plus bias x gradient of all layers above."""
    return FullGradient().under(rule)


@register(
    "fullgrad_plus",
    family="gradient",
    paper="Mehri et al., SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers",
    note="FullGrad+",
    year=2024,
    bf16=("fullgrad_plus", "fullgrad_plus.skipplus"),
    aggregation="plus",
    class_specific=True,
    signed=True,
)
def fullgrad_plus(*, rule: StreamRuleOption = "plain") -> Readout:
    """Token x gradient summed over all blocks, plus bias x gradient, each bias once."""
    return FullGradient().under(rule)


@register(
    "decompx",
    family="decomposition",
    paper="Modarressi et al., DecompX: Explaining Transformers Decisions by Propagating Token Decomposition",
    year=2023,
    arxiv="2306.02873",
    bf16=("decompx", "decompx.plus", "decompx.propagate", "decompx.skipplus", "decompx.skipplus.propagate"),
    class_specific=True,
    signed=True,
)
def decompx(
    *,
    bias: Annotated[
        Literal["none", "token", "equal"],
        "omit biases, assign each to the token it is added to, or share each equally among all tokens",
    ] = "none",
) -> Readout:
    """Contribution of a token to the logit (eq. 14) with attention, variance and gates held constant (eqs. 4, 8, 10).

    The paper does not cover gated products (SwiGLU) and features of unit length (CLIP). Here each factor of such a
    product gets half of it and the length is a constant, as in LibraGrad, so that with ``bias=token`` or ``bias=equal``
    the contributions of all tokens sum to the logit on these models as well.

    The paper also distributes biases by the norm of a token's parts, or by their angle to the bias. These weights need
    the decomposition of every token in every block, which a backward pass never builds, so they are not offered. Nor is
    assigning all biases to the class token: the patches then have the scores of ``bias=none``.
    """
    readouts: dict[str, type[InputGradient]] = {
        "none": InputGradient,
        "token": FullGradient,
        "equal": EquallySharedBiases,
    }
    # On most models this equals the frozen rule. Under that one, a gated product a(x) b(x) of two functions of the
    # tokens would count twice and a unit length as 0: the libra rule gives each factor half and holds the length.
    return readouts[bias]().under("libra")
