"""Multi-query attention, in which all heads share k and v, is what it is with k and v repeated for every head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit

HEADS, WIDTH = 3, 8
TARGET = torch.tensor([3, 0])
# Those that read A, its gradient, values; rules that hold A constant, follow its scores or carry relevance.
METHODS = [
    *("raw_attention", "rollout", "gae", "ixg", "gradtoken", "legrad", "attcat", "agcam", "dix", "tokentm"),
    *("decompx", "decompx.skipplus", "attnlrp", "fullgrad:rule=libra", "transattr", "lrp"),
]


class MultiQuery(nn.Module):
    """Queries for every head, one k and one v for all; ``form`` says who multiplies them."""

    def __init__(self, packed: nn.Linear, proj: nn.Linear, form: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, width) for width in (HEADS * WIDTH, WIDTH, WIDTH))
        self.proj, self.form = proj, form
        sizes = (HEADS * WIDTH, WIDTH, WIDTH)
        starts = (0, HEADS * WIDTH, 2 * HEADS * WIDTH)
        for layer, start, size in zip((self.q, self.k, self.v), starts, sizes, strict=True):
            layer.weight.data, layer.bias.data = packed.weight.data[start:][:size], packed.bias.data[start:][:size]

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.form == "fused":
            output = F.scaled_dot_product_attention(query, key, value)
        else:
            output = (query @ key.transpose(-2, -1) * WIDTH**-0.5).softmax(dim=-1) @ value
        return self.proj(output.transpose(1, 2).flatten(2))


def models(form: str) -> tuple[nn.Module, nn.Module]:
    """One whose heads share k and v, and one that has the same weights once for every head."""
    shared, repeated = small_vit(depth=3), small_vit(depth=3)
    for own, block in zip(shared.blocks, repeated.blocks, strict=True):
        packed = block.attn.qkv
        for parameter in (packed.weight.data, packed.bias.data):
            by_head = parameter.unflatten(0, (3, HEADS, WIDTH))
            by_head[1:] = by_head[1:, :1].clone()
        own.attn = MultiQuery(packed, block.attn.proj, form)
    return shared, repeated


@pytest.mark.parametrize("form", ["fused", "by hand"])
def test_heads_that_share_keys_and_values_give_the_same_maps(form: str) -> None:
    shared, repeated = models(form)
    images = random_images()
    found = vitreous.explain(shared, images, METHODS, TARGET).scores
    expected = vitreous.explain(repeated, images, METHODS, TARGET).scores
    for method in METHODS:
        # Float64; sums over heads are taken before the linear layers instead of in them, which LRP's sums amplify.
        assert largest_difference(found[method], expected[method]) < 1e-8, method
