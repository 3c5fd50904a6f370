"""FullGrad [srinivas2019full][] on tokens, and DecompX [modarressi2023decompx][], which is its frozen form.

A piecewise linear network is Σ input x gradient + Σ bias x gradient (FullGrad eq. 5). Biases are those of linear layers
and norms, and what an activation's slope leaves unexplained of it, f(u) - f'(u) u. A bias belongs to the token that it
is added to; behind the pooling, to the tokens that the head reads. Under the plain rule attention and norms make a
Vision Transformer's sum miss the logit; under ``rule=libra`` it is the logit (LibraGrad, Mehri et al., CVPR 2025).
"""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from vitreous.methods.gradient import InputGradient
from vitreous.methods.options import StreamRuleOption
from vitreous.methods.readout import Readout
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import GradientNeeds, Needs


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
        """What each token gets of the biases, (batch, tokens), given by the token that each is added to."""
        return biases


class EquallySharedBiases(FullGradient):
    """Σ_channels x_l * dy_c/dx_l + 1/n Σ bias * dy_c/d(output) over everything from block l on, under the libra rule.

    DecompX with every bias shared equally among the n tokens where it is added. All that follows is linear under that
    rule, so the shares stay equal to the end.
    """

    def shares(self, biases: Tensor) -> Tensor:
        """The n-th part of all for every token."""
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
    """Token x gradient, and bias x gradient of everything above."""
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
    """Token x gradient, summed over all blocks, and bias x gradient, each bias once."""
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
        "leave biases out, give each to the token it is added to, or an equal share of each to all tokens",
    ] = "none",
) -> Readout:
    """What a token contributes to the logit (eq. 14) once attention, variance and gates are constants (eqs. 4, 8, 10).

    The paper has no gated products (SwiGLU) and no features of unit length (CLIP). Here each factor of such a product
    gets half of it and the length is a constant, as in LibraGrad, so that with ``bias=token`` or ``bias=equal`` the
    shares of all tokens add up to the logit on these models as well.

    The paper also shares a bias by how long the parts of a token are, or by how they lie to the bias. Those shares
    depend on every part of every token of every block, which one backward pass never builds, so they are not offered.
    Nor is giving all biases to the class token: the patches then have what ``bias=none`` gives them.
    """
    readouts: dict[str, type[InputGradient]] = {
        "none": InputGradient,
        "token": FullGradient,
        "equal": EquallySharedBiases,
    }
    # On most models this is the frozen rule. A gated product, a(x) b(x) with both factors made of tokens, would count
    # twice under that one, and a unit length would count as 0: this rule gives each factor half and holds the length.
    return readouts[bias]().under("libra")
