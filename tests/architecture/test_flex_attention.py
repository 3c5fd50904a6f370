"""A model that attends by flex_attention is refused in one sentence that says how to load it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import vitreous
from small_models import random_images, small_vit
from vitreous.errors import UnsupportedModelError


class Flexible(nn.Module):
    """Attention as timm spells it, by another function."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        packed = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        return self.proj(flex_attention(query, key, value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_flex_attention_is_refused_with_what_to_load_the_model_with(method):
    # 16 channels in each head: flex_attention asks for a power of 2.
    model = small_vit(depth=2, embed_dim=32, num_heads=2, dtype=torch.float32)
    for block in model.blocks:
        block.attn = Flexible(block.attn)
    with pytest.raises(UnsupportedModelError, match=r'flex_attention.*attn_implementation="sdpa" or "eager"') as caught:
        vitreous.explain(model, random_images(dtype=torch.float32), method)
    assert "\n" not in str(caught.value)
