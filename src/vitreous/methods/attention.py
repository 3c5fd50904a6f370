"""Methods that read attention matrices and their gradients.

Raw attention, Rollout, AttCAM, GAE and GradSAM read both; AGCAM [leem2024attention][] and LeGrad
[bousselham2024legrad][] read gradients of attention alone; Grad-ECLIP [zhao2025grad][] reads values, weighed by the
gradient of attention's output and by how near keys are to the query.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.methods.readout import (
    MatrixReadout,
    Readout,
    ReadRows,
    Residual,
    TokenReadout,
    View,
    mean_over_heads,
    total,
)
from vitreous.methods.registry import RuleOption, register
from vitreous.tape import AttentionRecord, Pass
from vitreous.tape.attention import Rows

Convention = Literal["chefer", "skipplus"]
Spatial = Literal["loosened", "none"]
Feature = Literal["head", "mean"]


class MeanAttention(MatrixReadout):
    """mean_h A; a rollout multiplies (I + mean_h A)/2 (SkipPLUS eq. 2)."""

    activations: ClassVar[tuple[str, ...]] = ("attention",)
    # Rows of mean_h A sum to 1, so normalising the rows of I + A is halving it (SkipPLUS eq. 2).
    residual: Residual = "half"

    def reader(self, view: View, layer: int) -> ReadRows:
        """mean_h A."""
        attention = view.attention(layer)
        return lambda rows: mean_over_heads(attention.rows(rows))


class GradientAttention(MatrixReadout):
    """mean_h (A * dy_c/dA)^+ (GAE eq. 5; GradSAM eq. 3)."""

    activations = ("attention",)
    gradients = ("attention",)

    def reader(self, view: View, layer: int) -> ReadRows:
        """mean_h (A * dA)^+."""

        def read(rows: Rows) -> Tensor:
            gradient = view.attention_gradient(self.backward, layer, rows)
            return mean_over_heads(gradient.mul_(view.attention(layer).rows(rows)).clamp_(min=0))

        return read


class HeadWeightedAttention(MatrixReadout):
    """(mean_h w_h A)^+, w_h the mean of dy_c/dA over the class token's patches (Grad-CAM eqs. 1-2 on heads)."""

    activations = ("attention",)
    gradients = ("attention",)

    def reader(self, view: View, layer: int) -> ReadRows:
        """(mean_h w_h A)^+."""
        head_weights = self.head_weights(view, layer)[:, :, None, None]
        attention = view.attention(layer)
        return lambda rows: mean_over_heads(head_weights * attention.rows(rows)).clamp_(min=0)

    def head_weights(self, view: View, layer: int) -> Tensor:
        """w_h, (batch, head)."""
        rows = view.layout.pooling_queries if layer == view.depth else view.layout.read
        assert rows is not None
        return view.attention_gradient(self.backward, layer, rows)[..., -view.layout.patches :].mean(dim=(2, 3))


class RowHeadWeightedAttention(MatrixReadout):
    """mean_h w_h A, where w_h of every row is the mean of dy_c/dA over its patches; signed.

    The form in the SkipPLUS authors' program. The class token's row is ``HeadWeightedAttention``'s before the clamp.
    """

    activations = ("attention",)
    gradients = ("attention",)
    signed = True

    def reader(self, view: View, layer: int) -> ReadRows:
        """mean_h w_h A."""

        def read(rows: Rows) -> Tensor:
            gradient = view.attention_gradient(self.backward, layer, rows)
            head_weights = gradient[..., -view.layout.patches :].mean(dim=-1, keepdim=True)
            return mean_over_heads(head_weights * view.attention(layer).rows(rows))

        return read


@register(
    "raw_attention",
    family="attention",
    paper="Caron et al., Emerging Properties in Self-Supervised Vision Transformers",
    note="attention of the last block",
    year=2021,
    arxiv="2104.14294",
    bf16=("raw_attention",),
    layer=-1,
    class_specific=False,
    signed=False,
)
def raw_attention() -> Readout:
    """How much the class token attends to each patch in the last block, averaged over heads."""
    return MeanAttention()


@register(
    "rollout",
    family="attention",
    paper="Abnar and Zuidema, Quantifying Attention Flow in Transformers",
    year=2020,
    arxiv="2005.00928",
    bf16=("rollout",),
    aggregation="rollout",
    class_specific=False,
    signed=False,
)
def rollout() -> Readout:
    """Attention multiplied through all blocks, with the residual connection as identity."""
    return MeanAttention()


@register(
    "attcam",
    family="attention",
    paper="Chefer et al., Transformer Interpretability Beyond Attention Visualization",
    note="their baseline: Grad-CAM on attention",
    year=2021,
    arxiv="2012.09838",
    layer=-1,
    class_specific=True,
    signed=False,
)
def attcam(
    *,
    rule: RuleOption = "plain",
    convention: Annotated[Convention, "skipplus: signed, every row weights heads by its own gradient"] = "chefer",
) -> Readout:
    """Attention of the last block with heads weighted by their mean gradient, clamped at zero."""
    return (HeadWeightedAttention() if convention == "chefer" else RowHeadWeightedAttention()).under(rule)


@register(
    "gae",
    family="attention",
    paper="Chefer et al., Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder "
    "Transformers",
    year=2021,
    arxiv="2103.15679",
    bf16=("gae", "gae.propagate"),
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def gae(*, rule: RuleOption = "plain") -> Readout:
    """Rollout of attention x its positive gradient (also called GenAtt)."""
    return GradientAttention().under(rule)


@register(
    "gradsam",
    family="attention",
    paper="Barkan et al., Grad-SAM: Explaining Transformers via Gradient Self-Attention Maps",
    year=2021,
    arxiv="2204.11073",
    bf16=("gradsam",),
    aggregation="plus",
    class_specific=True,
    signed=False,
)
def gradsam(*, rule: RuleOption = "plain") -> Readout:
    """Attention x its positive gradient, summed over all blocks."""
    return GradientAttention().under(rule)


class GradientGuidedBySigmoid(MatrixReadout):
    """Σ_h (dy_c/dA)^+ * sigmoid(S) with S the scores before the softmax (Leem and Seo, AAAI 2024).

    The gradient reaches lower blocks through the residual stream and the feed-forward parts only (rule ``residual``):
    the authors' code detaches the input of the attention. With a sigmoid instead of the softmax the scores of a row do
    not compete with each other, which would leave a few peaks.
    """

    activations = ("attention_rows", "scores")
    gradients = ("attention",)
    backward = Pass("residual", "logit")

    def reader(self, view: View, layer: int) -> ReadRows:
        """Σ_h (dA)^+ * sigmoid(S)."""

        def read(rows: Rows) -> Tensor:
            guide = torch.sigmoid(at_least_float32(view.attention(layer).score_rows(rows)))
            return view.attention_gradient(self.backward, layer, rows).clamp_(min=0).mul_(guide).sum(dim=1)

        return read


class FeatureFormation(TokenReadout):
    """Mean over heads and rows of (dy_l/dA_l)^+, y_l the class score of block l's own output (Bousselham et al. 2024).

    The head is applied to the output of each block as to that of the last one, without the blocks in between: LeGrad
    measures how sensitive feature formation in a block is to its attention. A model with attention pooling is treated
    like any other; the paper reads the pooling attention there.

    The authors' program gives the head the mean of all tokens that leave a block, the class token's included, where the
    model itself gives it the class token alone: ``feature="mean"``.
    """

    gradients = ("attention",)

    def __init__(self, feature: Feature) -> None:
        self.backward = Pass("plain", "intermediate" if feature == "head" else "intermediate_mean")

    def read(self, view: View, layer: int) -> Tensor:
        """Sum the positive gradient of the attention that each token receives."""
        attention = view.attention(layer)
        gradients = (view.attention_gradient(self.backward, layer, rows) for rows in attention.pieces())
        received = total(gradient.clamp_(min=0).sum(dim=(1, 2)) for gradient in gradients)
        return received / (attention.heads * attention.queries)


class WeighedValues(TokenReadout):
    """(λ_i Σ_c w_c v_ic)^+: values v, channel weights w = dy/dO, spatial weights λ (Zhao et al. 2025).

    O is the output of all heads for the token that the head of the model reads, before W_O. λ is the cosine of that
    token's query with each key, over the channels of all heads, scaled to [0, 1] over the patches: the softmax, which
    it stands for, leaves most patches next to nothing. The authors' program runs the blocks that are read with one head
    as wide as all of them together; here the model is run as it is.

    A model that averages its tokens has the mean of their queries and the sum of their gradients; one that pools them
    by attention has those of the pooling query, as in GradToken.
    """

    activations = ("attention_rows", "keys", "scores")
    gradients = ("attention",)

    def __init__(self, spatial: Spatial) -> None:
        self.spatial = spatial

    def read(self, view: View, layer: int) -> Tensor:
        """Scores of all tokens; those of prefix tokens are 0."""
        rows = view.layout.read
        if layer == view.depth - 1:
            layer, rows = view.last_attention
        patches = view.layout.patches
        value = view.value(layer)[:, :, -patches:]
        channels = view.gradients[self.backward].outputs[layer][:, :, rows].sum(dim=2).to(value.dtype)
        scores = torch.einsum("bhnc,bhc->bn", value, channels)
        if self.spatial == "loosened":
            scores = scores * nearness(view.attention(layer), rows, patches)
        return torch.nn.functional.pad(scores.clamp_(min=0), (view.layout.prefix, 0))


def nearness(attention: AttentionRecord, rows: Tensor, patches: int) -> Tensor:
    """The cosine of the mean query of some rows with every patch's key, from 0 to 1 over the patches, (batch, patches).

    How long the query is falls out with the scaling, so that q kᵀ is enough, where a model writes it out itself.
    """
    key = at_least_float32(attention.key)[:, :, -patches:]
    if attention.query is not None:
        query = at_least_float32(attention.query)[:, :, rows].mean(dim=2)
        products = torch.einsum("bhc,bhnc->bn", query, key)
    else:
        scale = attention.scale if attention.head_scale is None else attention.scale * attention.head_scale
        products = (at_least_float32(attention.score_rows(rows)) / scale).mean(dim=2).sum(dim=1)[:, -patches:]
    lengths = key.square().sum(dim=(1, 3)).sqrt()
    cosines = products / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
    low, high = cosines.aminmax(dim=1, keepdim=True)
    return (cosines - low) / (high - low).clamp(min=torch.finfo(lengths.dtype).tiny)


@register(
    "agcam",
    family="attention",
    paper="Leem and Seo, Attention Guided CAM: Visual Explanations of Vision Transformer Guided by Self-Attention",
    year=2024,
    arxiv="2402.04563",
    bf16=("agcam",),
    aggregation="plus",
    class_specific=True,
    signed=False,
)
def agcam() -> Readout:
    """Positive attention gradient x sigmoid of the attention scores, summed over heads and blocks."""
    return GradientGuidedBySigmoid()


@register(
    "legrad",
    family="attention",
    paper="Bousselham et al., LeGrad: Explainability for Vision Transformers via Feature Formation Sensitivity",
    year=2024,
    arxiv="2404.03214",
    aggregation="plus",
    class_specific=True,
    signed=False,
)
def legrad(
    *,
    feature: Annotated[Feature, "mean: the head reads the mean of all tokens, as the authors' program has it"] = "head",
) -> Readout:
    """Positive attention gradient of the score that each block's own output would get, summed over blocks."""
    return FeatureFormation(feature)


@register(
    "grad_eclip",
    family="attention",
    paper="Zhao et al., Grad-ECLIP: Gradient-based Visual and Textual Explanations for CLIP",
    year=2025,
    arxiv="2502.18816",
    layer=-1,
    class_specific=True,
    signed=False,
)
def grad_eclip(
    *,
    rule: RuleOption = "plain",
    spatial: Annotated[
        Spatial, "loosened: values weighed by the cosine of query and key; none: not weighed"
    ] = "loosened",
) -> Readout:
    """Values of the last block along the gradient of attention's output, weighed by how near their keys are."""
    return WeighedValues(spatial).under(rule)
