"""``flex_attention`` is fused attention where it hides scores or adds to them, and refused where it does more."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex_attention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.architecture.trace import uncompiled
from vitreous.errors import UnsupportedModelError

METHODS = ["tokentm", "gradtoken", "gae", "decompx.skipplus", "ixg", "attnlrp", "rise:by=drop,budget=4"]
EXACT = 1e-10  # float64: sums in another order


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def nearer(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - 0.1 * (head + 1) * (query - key).abs()


def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


class Flexible(nn.Module):
    """Attention as timm spells it, by another function; or the same in plain torch."""

    def __init__(self, attention: nn.Module, kind: str, *, plain: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = attention.qkv, attention.proj, attention.num_heads
        self.kind, self.plain = kind, plain

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        packed = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        count = tokens.shape[1]
        if self.plain:
            scores = query @ key.mT * query.shape[-1] ** -0.5
            place = torch.arange(count)
            if self.kind == "causal":
                scores = scores.masked_fill(place[:, None] < place, float("-inf"))
            if self.kind == "nearer":
                scores = scores + nearer(0, 0, torch.arange(self.heads).view(-1, 1, 1), place[:, None], place)
            return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        options = {
            "plain": {},
            "causal": {"block_mask": create_block_mask(causal, None, None, count, count, device="cpu")},
            "nearer": {"score_mod": nearer},
            "capped": {"score_mod": capped},
        }
        attended = flex_attention(query, key, value, **options[self.kind])
        return self.proj(attended.transpose(1, 2).flatten(2))


def flexible(kind: str, *, plain: bool = False) -> nn.Module:
    # 16 channels in each head: flex_attention asks for a power of 2.
    model = small_vit(depth=2, embed_dim=32, num_heads=2)
    for block in model.blocks:
        block.attn = Flexible(block.attn, kind, plain=plain)
    return model


@pytest.mark.parametrize("kind", ["plain", "causal", "nearer"])
def test_it_has_the_maps_of_attention_that_is_written_out(kind):
    methods = METHODS if kind != "causal" else METHODS[:-1]  # whose order of patches counts
    images = random_images()
    found = vitreous.explain(flexible(kind), images, methods, 1).scores
    expected = vitreous.explain(flexible(kind, plain=True), images, methods, 1).scores
    for method in methods:
        assert largest_difference(found[method], expected[method]) < EXACT, method


def test_scores_that_are_changed_in_another_way_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"score_mod that does more than add.*use another attention"):
        vitreous.explain(flexible("capped"), random_images(), "gae")


def test_other_threads_compile_it_as_before():
    seen: list[bool] = []
    with uncompiled():
        thread = threading.Thread(
            target=lambda: seen.append(bool(torch_flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG))
        )
        thread.start()
        thread.join()
        assert torch_flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    assert seen == [False]
    assert not torch_flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
