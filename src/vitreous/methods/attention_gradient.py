"""Gradients of attention alone: AGCAM [leem2024attention][] and LeGrad [bousselham2024legrad][]."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous._utils.tensors import exact
from vitreous.methods.readout import MatrixReadout, Readout, ReadRows, TokenReadout, total
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import Pass
from vitreous.tape.attention import Rows


class GradientGuidedBySigmoid(MatrixReadout):
    """Σ_h (dy_c/dA)^+ * sigmoid(S) with S the scores before the softmax (Leem and Seo, AAAI 2024).

    The gradient reaches lower blocks by the residual stream and the feed-forward parts only (rule ``residual``): the
    authors' program detaches what enters the attention. A sigmoid instead of the softmax keeps the scores of a row from
    competing with each other, which would leave a few peaks.
    """

    values = ("attention_rows", "scores")
    slopes = ("attention",)
    backward = Pass("residual", "logit")

    def reader(self, view: View, layer: int) -> ReadRows:
        """Σ_h (dA)^+ * sigmoid(S)."""

        def read(rows: Rows) -> Tensor:
            guide = torch.sigmoid(exact(view.attention(layer).score_rows(rows)))
            return view.attention_gradient(self.backward, layer, rows).clamp_(min=0).mul_(guide).sum(dim=1)

        return read


class FeatureFormation(TokenReadout):
    """Mean over heads and rows of (dy_l/dA_l)^+, y_l the class score of block l's own output (Bousselham et al. 2024).

    The head reads the tokens that leave a block as it reads those of the last one, and the blocks above have no part in
    it: LeGrad asks how sensitive the forming of features in this block is to where it looks. A model that pools its
    tokens by attention is treated like any other; the paper reads the pooling attention itself there.
    """

    slopes = ("attention",)
    backward = Pass("plain", "intermediate")

    def read(self, view: View, layer: int) -> Tensor:
        """How much attention paid to each token helps the class."""
        attention = view.attention(layer)
        gradients = (view.attention_gradient(self.backward, layer, rows) for rows in attention.pieces())
        received = total(gradient.clamp_(min=0).sum(dim=(1, 2)) for gradient in gradients)
        return received / (attention.heads * attention.queries)


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
def legrad() -> Readout:
    """Positive attention gradient of the score that each block's own output would get, summed over blocks."""
    return FeatureFormation()
