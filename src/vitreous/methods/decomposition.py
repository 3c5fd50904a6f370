"""Methods that decompose a block's output into contributions of tokens: AttIN, GlobEnc and ALTI.

All of them read a matrix of vectors T_i(x_j) (see ``contributions``). They differ in which parts of the block they
include and in how a vector becomes a number: its norm, or its distance to the sum of all.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import has_float64
from vitreous.methods.attention import MeanAttention
from vitreous.methods.contributions import Contributions, GatedContributions, contributions, head_updates, norms
from vitreous.methods.readout import MatrixReadout, Readout, ReadRows, Residual, Row, View, mean_over_heads
from vitreous.methods.registry import register
from vitreous.tape import Needs
from vitreous.tape.attention import Rows

Heads = Literal["together", "apart"]
Norm = Literal["none", "following"]
Setting = Literal["skipplus", "original"]
Zero = Literal["length", "farthest"]

AnyContributions = Contributions | GatedContributions


class ContributionMatrix(MatrixReadout):
    """A matrix of how much each token contributes to each other one."""

    residual: Residual = "none"  # it is part of the contributions

    def row_times(self, view: View, layer: int, row: Row) -> Tensor:
        """Row x matrix; attention pooling, which writes to no residual stream, is read as mean_h A."""
        if layer == view.depth:
            return MeanAttention().row_times(view, layer, row)
        return super().row_times(view, layer, row)


class LengthMatrix(ContributionMatrix):
    """A matrix of norms, whose rows do not sum to 1: their product over 24 blocks exceeds the range of float32."""

    def step(self, view: View, layer: int, row: Row, residual: Residual) -> Row:
        """One block of a rollout, in float64 if the device supports it."""
        wide = row.weights.double() if has_float64(row.weights.device) else row.weights
        return super().step(view, layer, Row(wide, row.rows), residual)

    def finish(self, view: View, row: Row) -> Tensor:
        """Convert to the model's precision; a map that exceeds its range is divided by a power of 2."""
        scores, dtype = super().finish(view, row), view.read_row.weights.dtype
        excess = scores.amax(dim=-1, keepdim=True) / torch.finfo(dtype).max
        return torch.ldexp(scores, -excess.log2().ceil_().clamp_(min=0)).to(dtype)


class AttentionLength(LengthMatrix):
    """||Σ_h A_hij v_hj W_O^h||, or the mean over heads of ||A_hij v_hj W_O^h|| (Kobayashi et al. 2020, section 3)."""

    activations = ("attention", "projections")
    residual = "half"

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def reader(self, view: View, layer: int) -> ReadRows:
        """Lengths with all biases of the values."""
        if self.heads == "together":
            return contributions(view, layer, biases=True, residual=False).lengths
        attention = view.attention(layer)
        updates = head_updates(view, layer)
        return lambda rows: mean_over_heads(attention.rows(rows) * updates.lengths(rows))


class StreamLength(LengthMatrix):
    """||Σ_h A_hij v_hj W_O^h + 1{i=j} x_j|| (Kobayashi et al. 2021, eqs. 7 and 10)."""

    activations = ("tokens", "attention", "projections")

    def reader(self, view: View, layer: int) -> ReadRows:
        """Lengths with all biases of the values."""
        return contributions(view, layer, biases=True, residual=True).lengths


class NormedStreamLength(LengthMatrix):
    """||N(Σ_h A_hij v_hj W_O^h + 1{i=j} x_j)|| with the norm N that reads the sum (Kobayashi et al. 2021, eq. 16)."""

    activations = ("tokens", "residual", "attention", "projections", "linear_norms")

    def reader(self, view: View, layer: int) -> ReadRows:
        """Lengths with all biases of the values, without the norm's."""
        stream = contributions(view, layer, biases=True, residual=True)
        return _after_following_norm(stream, view, layer).lengths


class EncoderLength(LengthMatrix):
    """||y + N_2(y)||, y = Σ_h A_hij v_hj W_O^h + 1{i=j} x_j without biases; post-norm ||N_2(N_1(y))|| (GlobEnc eq. 11).

    How much of a whole block's output comes from token j, with the identity for the feed-forward network (Modarressi et
    al. 2022; for pre-norm blocks as the SkipPLUS authors have it).
    """

    activations = ("tokens", "norms", "residual", "attention", "projections", "linear_norms", "unbiased_values")

    def reader(self, view: View, layer: int) -> ReadRows:
        """GlobEnc's lengths."""
        return encoder_contributions(view, layer).lengths


class Nearness(ContributionMatrix):
    """(||y_i||_1 - ||T_i(x_j) - y_i||_1)^+, rows normalised to sum 1 (Ferrando et al. 2022, eqs. 9-10)."""

    shift = 0.0  # what is added to every difference

    def __init__(self, zero: Zero) -> None:
        self.zero = zero

    @abstractmethod
    def parts_and_whole(self, view: View, layer: int) -> tuple[AnyContributions, Tensor]:
        """T, and y (batch, tokens, channels)."""

    def reader(self, view: View, layer: int) -> ReadRows:
        """Proximity of the parts to the whole."""
        parts, whole = self.parts_and_whole(view, layer)

        def read(rows: Rows) -> Tensor:
            distances = parts.distances(rows, whole, self.shift)
            if self.zero == "farthest":
                zero = distances.amax(dim=-1, keepdim=True)
            else:
                zero = whole[:, rows].abs().sum(dim=-1, keepdim=True)
            return _rows_to_one((zero - distances).clamp_(min=0))

        return read


class NearnessToOutput(Nearness):
    """(||y_i||_1 - ||T_i(x_j) - y_i||_1)^+, rows normalised (ALTI eqs. 9-10); T GlobEnc's, y the block's output.

    This is the SkipPLUS authors' setting.
    """

    activations = EncoderLength.activations

    def needs(self, layer: int, depth: int) -> Needs:
        """Also the block's output."""
        return super().needs(layer, depth) | Needs(tokens=frozenset({layer + 1}))

    def parts_and_whole(self, view: View, layer: int) -> tuple[AnyContributions, Tensor]:
        """Contributions to the output of the block."""
        return encoder_contributions(view, layer), view.tokens(layer + 1)


class NearnessToAttended(Nearness):
    """The original setting: y are the tokens after the attention part, in post-norm blocks after its norm."""

    activations = NormedStreamLength.activations
    shift = 1e-6  # the eps of torch's pairwise_distance, which the authors' code uses

    def parts_and_whole(self, view: View, layer: int) -> tuple[AnyContributions, Tensor]:
        """With the values' biases, as in the authors' code."""
        parts = contributions(view, layer, biases=True, residual=True)
        if view.tape.architecture.blocks[layer].norm_place == "post":
            parts = _after_following_norm(parts, view, layer)
        return parts, view.after_attention(layer)


def encoder_contributions(view: View, layer: int) -> AnyContributions:
    """The contributions to a block's output with the identity for its feed-forward network.

    Post-norm, as Modarressi et al. 2022 have it: N_2(N_1(y)) with the values' biases. Pre-norm, as the SkipPLUS authors
    have it: y + N_2(y) without any bias. The deviations are the real tokens'.
    """
    _, second = norms(view, layer)
    if view.tape.architecture.blocks[layer].norm_place == "post":
        stream = contributions(view, layer, biases=True, residual=True)
        return _after_following_norm(stream, view, layer).through(second, view.residual_post(layer))
    stream = contributions(view, layer, biases=False, residual=True)
    return stream + stream.through(second, view.residual_mid(layer))  # type: ignore[operator]  # both of one kind


def _after_following_norm(stream: AnyContributions, view: View, layer: int) -> AnyContributions:
    """Apply the norm that reads the stream after attention: the first if post-norm, the second if pre-norm."""
    first, second = norms(view, layer)
    following = first if view.tape.architecture.blocks[layer].norm_place == "post" else second
    return stream.through(following, view.residual_mid(layer))


def _rows_to_one(matrix: Tensor) -> Tensor:
    """Normalise rows to sum 1; rows of zeros are unchanged."""
    sums = matrix.sum(dim=-1, keepdim=True)
    return matrix / sums.masked_fill_(sums == 0, 1)


@register(
    "attin",
    family="decomposition",
    paper="Kobayashi et al., Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
    year=2020,
    arxiv="2004.10102",
    bf16=("attin",),
    layer=-1,
    class_specific=False,
    signed=False,
)
def attin(
    *, heads: Annotated[Heads, "the length of the heads' sum, or the mean of their lengths"] = "together"
) -> Readout:
    """Norm of the vector that attention carries from each patch to the class token."""
    return AttentionLength(heads)


@register(
    "attin_residual",
    family="decomposition",
    paper="Kobayashi et al., Incorporating Residual and Normalization Layers into Analysis of Masked Language Models",
    year=2021,
    arxiv="2109.07152",
    bf16=("attin_residual",),
    layer=-1,
    class_specific=False,
    signed=False,
)
def attin_residual(
    *, norm: Annotated[Norm, "following: measured after the norm that reads the sum"] = "none"
) -> Readout:
    """Norm of the vector that attention and residual connection carry from each patch to the class token."""
    return StreamLength() if norm == "none" else NormedStreamLength()


@register(
    "globenc",
    family="decomposition",
    paper="Modarressi et al., GlobEnc: Quantifying Global Token Attribution by Incorporating the Whole Encoder Layer",
    year=2022,
    arxiv="2205.03286",
    bf16=("globenc",),
    aggregation="rollout",
    class_specific=False,
    signed=False,
)
def globenc() -> Readout:
    """Rollout (eq. 12) of the norm of each token's contribution to each block's output, with residuals and norms."""
    return EncoderLength()


@register(
    "alti",
    family="decomposition",
    paper="Ferrando et al., Measuring the Mixing of Contextual Information in the Transformer",
    year=2022,
    arxiv="2203.04212",
    bf16=("alti.skipplus",),
    aggregation="rollout",
    class_specific=False,
    signed=False,
)
def alti(
    *,
    setting: Annotated[Setting, "skipplus: to a block's output, without biases; original: to its attention's"] = (
        "skipplus"
    ),
    zero: Annotated[Zero, "the distance of no contribution: the output's length, or the farthest token's"] = "length",
) -> Readout:
    """Rollout (eq. 11) of the proximity of each token's contribution to the output that it is a part of."""
    return NearnessToOutput(zero) if setting == "skipplus" else NearnessToAttended(zero)
