"""Methods that read the residual stream and its gradient: gradient, IxG, CAT, AttIxG, AttCAT and DecompX."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vitreous.methods.readout import Readout, TokenReadout
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Needs, Pass

RuleName = Literal["plain", "frozen"]


class GradientNorm(TokenReadout):
    """||dy_c/dx_l||_2.

    The plain channel sum would be identically 0 on a pre-norm stream: LayerNorm removes the all-ones direction.
    """

    slopes = ("tokens",)

    def __init__(self, rule: RuleName) -> None:
        self.backward = Pass(rule, "logit")

    def read(self, view: View, layer: int) -> Tensor:
        """The Euclidean norm over channels."""
        length: Tensor = torch.linalg.vector_norm(view.token_gradient(self.backward, layer), dim=-1)
        return length


class InputGradient(TokenReadout):
    """Σ_channels x_l * dy_c/dx_l."""

    values = ("tokens",)
    slopes = ("tokens",)

    def __init__(self, rule: RuleName) -> None:
        self.backward = Pass(rule, "logit")

    def read(self, view: View, layer: int) -> Tensor:
        """Input x gradient, summed over channels."""
        tokens = view.tokens(layer)
        return (tokens * view.token_gradient(self.backward, layer).to(tokens.dtype)).sum(dim=-1)


class AttendedInputGradient(InputGradient):
    """Input x gradient times the attention that a token receives, mean over heads and rows (AttCAT eq. 8).

    ``pairing="next"`` reads the stream after the block, x_{l+1} with A_l, as the SkipPLUS authors' program does; that
    leaves out the last block.
    """

    def __init__(self, rule: RuleName, pairing: Literal["same", "next"]) -> None:
        super().__init__(rule)
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
        received = sum(attention.rows(piece).sum(dim=(1, 2)) for piece in attention.pieces())
        assert isinstance(received, Tensor)
        return super().read(view, self._stream(layer)) * (received / (attention.heads * attention.queries))

    def _stream(self, layer: int) -> int:
        return layer + 1 if self.pairing == "next" else layer


@register(
    "gradient",
    family="gradient",
    paper="Simonyan et al., Deep Inside Convolutional Networks",
    year=2013,
    class_specific=True,
    signed=False,
)
def gradient(*, rule: RuleName = "plain") -> Readout:
    """Length of the gradient at each token."""
    return GradientNorm(rule)


@register(
    "ixg",
    family="gradient",
    paper="Shrikumar et al., Learning Important Features Through Propagating Activation Differences",
    year=2017,
    class_specific=True,
    signed=True,
)
def ixg(*, rule: RuleName = "plain") -> Readout:
    """Token x gradient, summed over channels."""
    return InputGradient(rule)


@register(
    "cat",
    family="gradient",
    paper="Qiang et al., AttCAT: Explaining Transformers via Attentive Class Activation Tokens (CAT)",
    year=2022,
    aggregation="plus",
    class_specific=True,
    signed=True,
)
def cat(*, rule: RuleName = "plain") -> Readout:
    """Token x gradient, summed over all blocks."""
    return InputGradient(rule)


@register(
    "attixg",
    family="gradient",
    paper="Qiang et al., AttCAT: Explaining Transformers via Attentive Class Activation Tokens",
    year=2022,
    class_specific=True,
    signed=True,
)
def attixg(*, rule: RuleName = "plain", pairing: Literal["same", "next"] = "same") -> Readout:
    """Token x gradient x the attention the token receives."""
    return AttendedInputGradient(rule, pairing)


@register(
    "attcat",
    family="gradient",
    paper="Qiang et al., AttCAT: Explaining Transformers via Attentive Class Activation Tokens",
    year=2022,
    aggregation="plus",
    class_specific=True,
    signed=True,
)
def attcat(*, rule: RuleName = "plain", pairing: Literal["same", "next"] = "same") -> Readout:
    """Token x gradient x the attention the token receives, summed over all blocks."""
    return AttendedInputGradient(rule, pairing)


@register(
    "decompx",
    family="decomposition",
    paper="Modarressi et al., DecompX: Explaining Transformers Decisions by Propagating Token Decomposition",
    year=2023,
    class_specific=True,
    signed=True,
)
def decompx() -> Readout:
    """What each token contributes to the logit once attention, variance and gates are constants; without biases."""
    return InputGradient("frozen")
