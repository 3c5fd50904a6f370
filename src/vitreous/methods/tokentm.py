"""TokenTM [wu2024token][]: attention weighted by the transformation of the tokens that it carries.

Letters and equation numbers are the paper's. Per head, E are a block's original tokens x_l and Ẽ = v W_O the
transformed ones; W = diag(L * NECC) with L_j = ||Ẽ_j|| / ||E_j|| (eq. 10) and NECC the softmax over tokens of
cos(E_j, Ẽ_j) (eq. 12). Attention updates by U = I + mean_h[(dp_c/dA)^+ * (A W)], the feed-forward part by U = I + W,
starting from C_0 = diag ||x_0|| (eqs. 14-20). Only the class token's row of the product is computed, from the top down.

The paper's models have only W_O between the heads and the residual sum. If a model has more there (a norm, a gate,
LayerScale), the update of token i by token j is A_ij T_i(v_j), with T_i the linear map of all of these with statistics
and gates held constant. Then Ẽ_j = T_i(v_j), and W has a row for every i. If the stream is multiplied by s before the
sum, the identity of U becomes diag(||s E_j|| / ||E_j||). With T_i = W_O and s = 1 this is the paper's definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.methods.attention import GradientAttention
from vitreous.methods.contributions import head_updates
from vitreous.methods.readout import MatrixReadout, Readout, ReadRows, Residual, Row, View, mean_over_heads
from vitreous.methods.registry import RuleOption, register
from vitreous.tape import Needs, Pass
from vitreous.tape.attention import Rows

Components = Literal["baseline", "af", "af_l", "af_l_necc"]
Necc = Literal["paper", "rescaled"]
Objective = Literal["probability", "logit"]


class TokenTransformation(MatrixReadout):
    """I + mean_h[(dp_c/dA)^+ * (A W_h)], then I + W of the FFN, W = diag(L * NECC) (TokenTM eqs. 8-20)."""

    activations = ("tokens", "residual", "attention", "projections")
    gradients = ("attention",)
    unmoved_by: ClassVar[Mapping[str, str]] = {"residual": "the identity is part of both updates of a block"}

    def __init__(self, objective: Objective, components: Components, necc: Necc) -> None:
        self.backward = Pass("plain", objective)
        self.length = components in {"af_l", "af_l_necc"}
        self.direction = components == "af_l_necc"
        self.necc = necc

    def needs(self, layer: int, depth: int) -> Needs:
        """The tokens of this block, and those of the first for C_0."""
        return super().needs(layer, depth) | Needs(tokens=frozenset({0}))

    def reader(self, view: View, layer: int) -> ReadRows:
        """mean_h[(dp/dA)^+ * (A W_h)]: the attention part without the identity."""
        weight_of = None if layer == view.depth else self.attention_weight(view, layer)
        return lambda rows: self.update(view, layer, rows, None if weight_of is None else weight_of(rows))

    def update(self, view: View, layer: int, rows: Rows, weight: Tensor | None) -> Tensor:
        """mean_h[(dp/dA)^+ * (A W_h)] for some rows, (batch, rows, tokens)."""
        gradient = view.attention_gradient(self.backward, layer, rows)
        matrix = gradient.clamp_(min=0).mul_(view.attention(layer).rows(rows))
        return mean_over_heads(matrix if weight is None else matrix.mul_(weight))

    def step(self, view: View, layer: int, row: Row, residual: Residual) -> Row:
        """Row x U_ffn x U_attention."""
        del residual  # the identity is part of both updates
        attention_skip, feed_forward_skip = self.skips(view, layer)
        entries = row.dense(view.layout.tokens) * (feed_forward_skip + self.feed_forward_weight(view, layer))
        after_feed_forward = Row(entries, slice(None))
        if not isinstance(row.rows, slice):
            after_feed_forward = Row(entries[:, row.rows], row.rows)
        return Row(entries * attention_skip + self.row_times(view, layer, after_feed_forward), slice(None))

    def skips(self, view: View, layer: int) -> tuple[Tensor | float, Tensor | float]:
        """The identity of both updates: 1, or ||s E_j|| / ||E_j|| if the stream is multiplied by s before the sum."""
        if not self.length:
            return 1.0, 1.0
        attention, feed_forward = view.tape.skip(layer)
        before, middle = view.tokens(layer), view.after_attention(layer)
        return _scaled_length(before, attention), _scaled_length(middle, feed_forward)

    def finish(self, view: View, row: Row) -> Tensor:
        """Row x C_0 (eq. 14)."""
        entries = row.dense(view.layout.tokens)
        return entries * view.tokens(0).norm(dim=-1) if self.length else entries

    def attention_weight(self, view: View, layer: int) -> Callable[[Rows], Tensor] | None:
        """W of each head for some rows i, (batch, head, rows or 1, tokens): L and NECC of E_j and Ẽ_j = T_i(v_j).

        Ẽ (batch, head, tokens, channels) is never built: <E, v W_O> = <E W_Oᵀ, v>, and norms are computed likewise.
        """
        if not self.length:
            return None
        updates = head_updates(view, layer)
        tokens = view.tokens(layer).to(updates.value.dtype)
        original = tokens.norm(dim=-1)[:, None, None]

        def weight_of(rows: Rows) -> Tensor:
            return self.weight(updates.lengths(rows), original, updates.products(tokens, rows))

        if updates.by_channel or updates.after is not None:
            return weight_of
        shared = weight_of(slice(None))
        return lambda _rows: shared

    def feed_forward_weight(self, view: View, layer: int) -> Tensor | float:
        """W of the feed-forward part, (batch, tokens): E the tokens before it, Ẽ what it adds."""
        if not self.length:
            return 1.0
        before = view.after_attention(layer)
        return self.weight_between(before, view.residual_post(layer) - before * view.tape.skip(layer)[1])

    def weight_between(self, original: Tensor, transformed: Tensor) -> Tensor:
        """W from E and Ẽ, (batch, tokens, channels) each."""
        product = (original * transformed).sum(-1)
        return self.weight(transformed.norm(dim=-1), original.norm(dim=-1), product)

    def weight(self, transformed: Tensor, original: Tensor, product: Tensor) -> Tensor:
        """L * NECC (eqs. 10-13) from the two lengths and the scalar product, over the last axis."""
        ratio = _quotient(transformed, original)
        if not self.direction:
            return ratio
        cosine = _quotient(product, transformed * original)
        necc = torch.softmax(cosine, dim=-1)
        return ratio * (necc * necc.shape[-1] if self.necc == "rescaled" else necc)


class InputAttention(GradientAttention):
    """Table 6's baseline: eq. 8, mean_h[(dp_c/dA)^+ * A], on the input tokens alone, i.e. in the first block."""

    residual: Residual = "none"
    unmoved_by: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("start", "depth", "residual"), "the baseline is the first block's attention alone"
    )

    def __init__(self, objective: Objective) -> None:
        self.backward = Pass("plain", objective)

    def step(self, view: View, layer: int, row: Row, residual: Residual) -> Row:
        """Skip the blocks above the first."""
        del residual
        return row if layer > 0 else Row(self.row_times(view, layer, row), slice(None))


class ThirdPartyTokenTransformation(TokenTransformation):
    """The variant in the SkipPLUS authors' code, which differs from the paper.

    Head means are taken separately for A and (dy_c/dA)^+, the transformed tokens are those after the residual addition,
    and the gradient is the logit's.
    """

    def __init__(self) -> None:
        super().__init__("logit", "af_l_necc", "paper")

    def update(self, view: View, layer: int, rows: Rows, weight: Tensor | None) -> Tensor:
        """mean_h (dA)^+ * mean_h A, W from the right."""
        gradient = mean_over_heads(view.attention_gradient(self.backward, layer, rows).clamp_(min=0))
        matrix = gradient.mul_(mean_over_heads(view.attention(layer).rows(rows)))
        return matrix if weight is None else matrix.mul_(weight)

    def skips(self, view: View, layer: int) -> tuple[float, float]:
        """1: the transformed tokens already include the residual."""
        del view, layer
        return 1.0, 1.0

    def attention_weight(self, view: View, layer: int) -> Callable[[Rows], Tensor]:
        """W from the stream before and after the attention part, (batch, 1, tokens)."""
        weight = self.weight_between(view.tokens(layer), view.after_attention(layer))[:, None]
        return lambda _rows: weight

    def feed_forward_weight(self, view: View, layer: int) -> Tensor:
        """W from the stream before and after the feed-forward part."""
        return self.weight_between(view.after_attention(layer), view.residual_post(layer))


def _scaled_length(tokens: Tensor, factor: Tensor | float) -> Tensor | float:
    """||s x|| / ||x|| for a scalar s or one factor per channel; 1 for a zero token."""
    if not isinstance(factor, Tensor):
        return abs(factor)
    length = tokens.norm(dim=-1)
    return torch.where(length == 0, 1.0, _quotient((tokens * factor.to(tokens)).norm(dim=-1), length))


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Numerator / denominator, and 0 for a zero denominator."""
    return numerator / denominator.masked_fill(denominator == 0, math.inf)


@register(
    "tokentm",
    family="attention",
    paper="Wu et al., Token Transformation Matters: Towards Faithful Post-hoc Explanation for Vision Transformer",
    year=2024,
    arxiv="2403.14552",
    bf16=("tokentm",),
    aggregation="rollout",
    class_specific=True,
    signed=False,
)
def tokentm(
    *,
    gradient: Annotated[
        Objective, "the output whose gradient is taken; the paper takes the probability"
    ] = "probability",
    components: Annotated[Components, "the rows of the paper's table 6"] = "af_l_necc",
    necc: Annotated[Necc, "as written, of order 1/n, or times the number of tokens"] = "paper",
    variant: Annotated[Literal["paper", "third_party"], "third_party: as the SkipPLUS authors coded it"] = "paper",
    rule: RuleOption = "plain",
) -> Readout:
    """Rollout of attention x gradient, weighted by the change of length and direction of tokens in each block."""
    if necc != "paper" and (components != "af_l_necc" or variant == "third_party"):
        raise MethodError(f"necc={necc} has no effect without NECC as the paper has it")
    if variant == "third_party" and components != "af_l_necc":
        raise MethodError("the third-party variant has no ablations: leave out components")
    if variant == "third_party":
        return ThirdPartyTokenTransformation().under(rule)
    if components == "baseline":
        return InputAttention(gradient).under(rule)
    return TokenTransformation(gradient, components, necc).under(rule)
