"""GradToken [cheng2025gradtoken][]: the gradient of the class token's query, times the patches' keys.

G_h = dy_c/dq of the class token in the last block and M_h = k_h . G_h for every patch (eqs. 6-9); M is then spread by
the attention of the lower blocks (eqs. 10-17) and the heads are integrated (eq. 18). Only the last block needs a
backward pass. Models without a class token use the gradient summed over all queries. With a class token this is the
same: no other query of the last block can change the output.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError
from vitreous.methods.attention import MeanAttention
from vitreous.methods.readout import Readout, TokenReadout, View, mean_over_heads, total
from vitreous.methods.registry import RuleOption, register
from vitreous.tape import Needs, Pass
from vitreous.tape.attention import score_gradient

Propagation = Literal["none", "rollout_elementwise", "rollout_matrix", "average_elementwise", "average_matrix"]
Heads = Literal["relu_average", "average"]


class QueryGradientKey(TokenReadout):
    """M_h = k_h . dy_c/dq (GradToken eqs. 6-9), spread by the blocks below and integrated over heads (eqs. 10-18)."""

    activations = ("attention_rows", "keys")
    gradients = ("attention",)

    def __init__(self, propagation: Propagation, heads: Heads, depth: int | None) -> None:
        self.propagation = propagation
        self.heads = heads
        self.propagation_depth = depth
        self.signed = heads == "average"

    def needs(self, layer: int, depth: int) -> Needs:
        """The gradient at one layer; the attention of the blocks below it."""
        if self.propagation_depth is not None and not 0 <= self.propagation_depth < depth:
            raise MethodError(
                f"depth={self.propagation_depth} is not between 0 and {depth - 1}, the blocks below the last one"
            )
        below = frozenset() if self.propagation == "none" else frozenset(self.blocks_below(layer))
        return super().needs(layer, depth) | Needs(attention=below)

    def blocks_below(self, layer: int) -> range:
        """The blocks that M is propagated through: those below ``layer``, ``propagation_depth`` of them."""
        return range(0 if self.propagation_depth is None else max(0, layer - self.propagation_depth), layer)

    def read(self, view: View, layer: int) -> Tensor:
        """Scores of all tokens; those of prefix tokens are 0."""
        maps = self.propagate(view, self.maps(view, layer), layer)
        integrated = (maps.clamp(min=0) if self.heads == "relu_average" else maps).mean(dim=-1)
        return torch.nn.functional.pad(integrated, (view.layout.prefix, 0))

    def maps(self, view: View, layer: int) -> Tensor:
        """M_h, (batch, patches, head)."""
        if layer == view.depth - 1 and view.layout.pooled_by_attention:
            layer = view.depth  # the pooling query takes the place of the class token's
        key = at_least_float32(view.attention(layer).key)
        gradient = query_gradient(view, self.backward, layer).to(key.dtype)
        return torch.einsum("bhnk,bhk->bnh", key[:, :, -view.layout.patches :], gradient)

    def propagate(self, view: View, maps: Tensor, layer: int) -> Tensor:
        """Variants 0 to 4 of the paper's table 3."""
        blocks = self.blocks_below(layer)
        if self.propagation == "none" or not blocks:
            return maps
        if self.propagation == "average_matrix":
            return spread(view, blocks, maps)
        if self.propagation == "rollout_matrix":
            return rollout_times(view, blocks, maps)
        if self.propagation == "average_elementwise":
            row = average_attention_row(view, blocks)
        else:
            row = rollout_row(view, blocks)
        return maps * row[:, view.layout.prefix :, None]


def query_gradient(view: View, backward: Pass, layer: int) -> Tensor:
    """G_h = Σ_i dy_c/dq_i, (batch, head, channel): through the softmax from dA = (dO) Vᵀ (eqs. 4-5).

    If heads are mixed before or after the softmax, or scores are dropped, the gradient follows the model's own path
    from q kᵀ to A; q and k of a head are then those that were multiplied, and A the matrix that multiplies the values.
    """
    attention = view.attention(layer)
    only_read = layer == view.depth - 1 and view.layout.reads_prefix_only
    key = at_least_float32(attention.key)
    if attention.product_gradient is not None:
        products = attention.product_gradient(view.gradients[backward].outputs[layer])
        return torch.einsum("bhn,bhnk->bhk", products.sum(dim=2).to(key.dtype), key)
    scores = total(
        score_gradient(attention.rows(rows), view.attention_gradient(backward, layer, rows)).sum(dim=2)
        for rows in ([view.layout.read] if only_read else attention.pieces())
    )
    gradient = torch.einsum("bhn,bhnk->bhk", scores.to(key.dtype), key) * attention.scale
    return gradient if attention.head_scale is None else gradient * attention.head_scale[..., 0]


def spread(view: View, blocks: range, maps: Tensor) -> Tensor:
    """Ā[patches, patches] maps with Ā = 1/B Σ_blocks mean_h A (eq. 13), B one more than the blocks averaged."""
    maps = _with_prefix(view, maps)
    result = total(attention_times(view, block, maps) for block in blocks)
    return result[:, view.layout.prefix :] / (len(blocks) + 1)


def rollout_times(view: View, blocks: range, maps: Tensor) -> Tensor:
    """(I + A_1) ... (I + A_{B-1}) maps, the product from the bottom; paths through prefix tokens count."""
    maps = _with_prefix(view, maps)
    for block in reversed(blocks):
        maps = maps + attention_times(view, block, maps)
    return maps[:, view.layout.prefix :]


def attention_times(view: View, block: int, maps: Tensor) -> Tensor:
    """mean_h A times (batch, tokens, maps)."""
    attention = view.attention(block)
    return torch.cat([mean_over_heads(attention.rows(rows)).to(maps.dtype) @ maps for rows in attention.pieces()], 1)


def _with_prefix(view: View, maps: Tensor) -> Tensor:
    """Maps of patches with zeros for the prefix tokens."""
    return torch.nn.functional.pad(maps, (0, 0, view.layout.prefix, 0))


def average_attention_row(view: View, blocks: range) -> Tensor:
    """The class token's row of Ā, (batch, tokens)."""
    readout = MeanAttention()
    return total(readout.row_times(view, block, readout.top_row(view)) for block in blocks) / (len(blocks) + 1)


def rollout_row(view: View, blocks: range) -> Tensor:
    """The class token's row of Π (I + mean_h A), computed from the top."""
    readout = MeanAttention()
    row = readout.top_row(view)
    for block in reversed(blocks):
        row = readout.step(view, block, row, "add")
    return row.dense(view.layout.tokens)


@register(
    "gradtoken",
    family="attention",
    paper="Cheng et al., GradToken: Decoupling tokens with class-aware gradient for visual explanation of Transformer",
    year=2025,
    doi="10.1016/j.neunet.2024.106837",
    layer=-1,
    propagates=True,
    class_specific=True,
    signed=False,
)
def gradtoken(
    *,
    propagation: Annotated[Propagation, "variants 0, 1, 2, 3 and 4 of the paper, in this order"] = "average_matrix",
    heads: Annotated[Heads, "variants ii and i of the paper"] = "relu_average",
    depth: Annotated[int | None, "how many blocks below the last one M is spread through; all by default"] = None,
    rule: RuleOption = "plain",
) -> Readout:
    """Key . gradient of the class token's query in the last block, spread by the attention below."""
    return QueryGradientKey(propagation, heads, depth).under(rule)
