"""Blocks in which tokens meet in another way than by one attention: two of them, one that has no name, none at all."""

from __future__ import annotations

import pytest
import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, random_images, small_vit
from vitreous.errors import UnsupportedModelError
from whole_maps import all_token_scores

# Float64; sums of some hundred terms in another order.
SAME = {"rtol": 1e-9, "atol": 1e-12}
TARGET = torch.tensor([1, 4])
WIDTH = 24


def input_times_gradient(model: nn.Module, images: Tensor, layer: int) -> Tensor:
    """By a hook and autograd alone, (batch, patches)."""
    streams: list[Tensor] = []
    with model.blocks[layer].register_forward_pre_hook(lambda _, given: streams.append(given[0])):
        logits = model(images.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), streams)
    return (streams[0] * gradient).sum(dim=-1)[:, -PATCHES:]


class TestTwoAttentionsInABlock:
    """timm's differential attention: A v of one pair of queries and keys less that of another."""

    @pytest.mark.parametrize("fused", [True, False])
    def test_gradients_of_the_stream_are_served(self, *, fused: bool) -> None:
        model, images = small_vit(attn_layer=DiffAttention), random_images()
        for block in model.blocks:
            block.attn.fused_attn = fused
        for layer in (0, 3):
            scores = vitreous.explain(model, images, f"ixg:layer={layer}", TARGET).scores[f"ixg:layer={layer}"]
            torch.testing.assert_close(scores, input_times_gradient(model, images, layer).detach(), **SAME)

    def test_a_rule_holds_both_constant(self) -> None:
        model, images = small_vit(attn_layer=DiffAttention), random_images()
        scores, logits = all_token_scores(model, images, "fullgrad:rule=libra", TARGET)
        torch.testing.assert_close(scores.sum(dim=1), logits, **SAME)

    def test_there_is_no_one_matrix_to_read(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"gae .*attends more than once in its block 0") as refusal:
            vitreous.explain(small_vit(attn_layer=DiffAttention), random_images(), "gae")
        promised = str(refusal.value).partition("Methods that work on it: ")[2].split(", ")
        assert {"ixg", "decompx", "attnlrp", "fullgrad"} <= set(promised)
        assert not {"rollout", "tokentm", "gradtoken"} & set(promised)


class Nameless(nn.Module):
    """A block whose attention is written in another way."""

    def __init__(self, kind: str, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.mixer(self.norm(tokens)).chunk(3, dim=-1)
        if self.kind == "fused":
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=1 / 5)
        elif self.kind == "one head by einsum":
            scores = torch.einsum("bic,bjc->bij", query, key) / 5
            mixed = torch.einsum("bij,bjc->bic", scores.softmax(dim=-1), value)
        elif self.kind == "keys over tokens":  # efficient attention, CoaT
            mixed = query @ (key.softmax(dim=1).mT @ value)
        elif self.kind == "between channels":  # cross-covariance attention, XCiT
            mixed = value @ (key.mT @ query / 5).softmax(dim=-2)
        elif self.kind == "between channels, fused":
            mixed = nn.functional.scaled_dot_product_attention(query.mT, key.mT, value.mT).mT
        else:  # linear attention
            mixed = nn.functional.elu(query) @ (nn.functional.elu(key).mT @ value) / 17
        return tokens + self.out(mixed)


def nameless(kind: str, width: int = WIDTH) -> nn.Module:
    model = small_vit(embed_dim=width, num_heads=1)
    torch.manual_seed(0)
    model.blocks = nn.Sequential(*(Nameless(kind, width) for _ in range(4))).double()
    return model


def test_one_head_by_einsum_gives_the_maps_of_fused_attention() -> None:
    methods = ["decompx.skipplus", "attnlrp", "conservative_lrp", "ixg:rule=libra", "rollout", "gae", "gradtoken"]
    images = random_images()
    found, expected = (
        vitreous.explain(nameless(kind), images, methods, TARGET).scores for kind in ("one head by einsum", "fused")
    )
    for method in methods:
        torch.testing.assert_close(found[method], expected[method], **SAME)


@pytest.mark.parametrize("width", [WIDTH, 17])  # 17 tokens: nothing in the shapes tells them from channels then
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("keys over tokens", "no attention was seen in its block 0"),
        ("no softmax", "no attention was seen in its block 0"),
        ("between channels", "a rule does not know what to hold constant"),
        ("between channels, fused", "a rule does not know what to hold constant"),
    ],
)
def test_rules_refuse_what_they_cannot_hold_constant(kind: str, reason: str, width: int) -> None:
    model, images = nameless(kind, width), random_images()
    torch.testing.assert_close(
        vitreous.explain(model, images, "ixg", TARGET).scores["ixg"],
        input_times_gradient(model, images, 0).detach(),
        **SAME,
    )
    for method in ("decompx.skipplus", "attnlrp", "conservative_lrp", "ixg:rule=libra"):
        with pytest.raises(UnsupportedModelError, match=reason):
            vitreous.explain(model, images, method)
    for method in ("rollout", "gae", "tokentm", "atman"):
        with pytest.raises(UnsupportedModelError, match=r"is between channels|no attention was seen"):
            vitreous.explain(model, images, method)


class Experts(Block):
    """Beside its attention a block weighs what experts say by a softmax of each token."""

    def __init__(self, dim: int, *args: object, **options: object) -> None:
        super().__init__(dim, *args, **options)
        self.router, self.experts = nn.Linear(dim, 2), nn.Linear(dim, 2 * dim)

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = super().forward(tokens, **options)
        said = self.experts(tokens).unflatten(-1, (2, -1))
        return tokens + (self.router(tokens).softmax(dim=-1)[..., None] * said).sum(dim=-2)


def test_a_softmax_besides_the_attention_is_no_attention() -> None:
    model, images = small_vit(block_fn=Experts), random_images()
    scores = vitreous.explain(model, images, ["rollout", "gae", "ixg"], TARGET).scores
    torch.testing.assert_close(scores["ixg"], input_times_gradient(model, images, 0).detach(), **SAME)
    with pytest.raises(UnsupportedModelError, match="in its block 0 tokens are multiplied with each other, or weighed"):
        vitreous.explain(model, images, "ixg:rule=libra")
