"""Attention with all heads of a batch in one row, (batch x head, token, channel), is read as any other is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

import vitreous
from small_models import random_images, small_vit
from vitreous.tape.runner import ModelRunner

TARGET = torch.tensor([3, 0])
# Those that read A, its gradient, q and k, values and W_O, biases; rules that hold A constant or follow its scores.
METHODS = [
    *("raw_attention", "rollout", "gae", "ixg", "gradtoken", "legrad", "attcat", "tokentm", "alti", "gradsam"),
    *("decompx", "decompx.skipplus", "attnlrp", "fullgrad:rule=libra", "agcam", "dix"),
]


class InOneRow(Attention):
    """Heads of one image after those of another."""

    def forward(self, x: Tensor, **_: object) -> Tensor:
        query, key, value = self.parts(x)
        return self.proj(self.together(self.attend(query, key, value), len(x)))

    def parts(self, x: Tensor) -> list[Tensor]:
        packed = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        return [part.transpose(1, 2).flatten(0, 1) for part in packed.unbind(2)]

    def together(self, output: Tensor, batch: int) -> Tensor:
        return output.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class ByHand(InOneRow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.bmm((torch.bmm(query, key.transpose(1, 2)) * self.scale).softmax(dim=-1), value)


class Masked(InOneRow):
    """With a bias for every head."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = len(query) // self.num_heads
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias_of(self, query).repeat(rows, 1, 1))


class HeadsFirst(InOneRow):
    """The first head of all images, then the second, as ``torch.cat(x.split(width, 2), 0)`` makes them."""

    def parts(self, x: Tensor) -> list[Tensor]:
        return [torch.cat(part.split(self.head_dim, 2), 0) for part in self.qkv(x).chunk(3, dim=-1)]

    def together(self, output: Tensor, batch: int) -> Tensor:
        return torch.cat(output.split(batch, 0), 2)


class Ordinary(Attention):
    """Four axes, with the same bias."""

    def forward(self, x: Tensor, **_: object) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias_of(self, query))
        return self.proj(output.transpose(1, 2).flatten(2))


def bias_of(attention: Attention, query: Tensor) -> Tensor:
    places = torch.arange(query.shape[-2], dtype=query.dtype)
    distance = (places[:, None] - places).abs() / len(places)
    return -distance * torch.arange(1, attention.num_heads + 1, dtype=query.dtype)[:, None, None]


def with_attention(kind: type[Attention], **options: object) -> nn.Module:
    model = small_vit(**options)
    for block in model.blocks:
        block.attn.__class__ = kind
    return model


def assert_same_maps(model: nn.Module, ordinary: nn.Module, images: Tensor, methods: list[str]) -> None:
    target = TARGET[: len(images)]
    torch.testing.assert_close(model(images), ordinary(images), rtol=1e-10, atol=1e-12)
    found = vitreous.explain(model, images, methods, target).scores
    expected = vitreous.explain(ordinary, images, methods, target).scores
    for method in methods:
        # Float64; the same operations, in another order at most.
        torch.testing.assert_close(found[method], expected[method], rtol=1e-8, atol=1e-11, msg=method)


@pytest.mark.parametrize("kind", [InOneRow, ByHand])
def test_heads_in_one_row_give_the_same_maps(kind):
    assert_same_maps(with_attention(kind), small_vit(), random_images(), METHODS)


@pytest.mark.parametrize("kind", [InOneRow, ByHand])
def test_one_head_with_as_many_tokens_as_channels(kind):
    """Nothing in the shapes tells tokens from channels then."""
    shape = {"num_heads": 1, "embed_dim": 17}
    assert_same_maps(with_attention(kind, **shape), small_vit(**shape), random_images(), METHODS)


def test_a_bias_for_every_head():
    assert_same_maps(with_attention(Masked), with_attention(Ordinary), random_images(), METHODS)


def test_scores_of_heads_in_one_row_are_edited_alike():
    images, factors = random_images(), torch.rand(2, 17, dtype=torch.float64)
    found, expected = (
        ModelRunner(model, images).logits_of_damped(images, factors)
        for model in (with_attention(InOneRow), small_vit())
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # float64, the same operations


class HeadsFirstByHand(HeadsFirst):
    attend = ByHand.attend


class HeadsFirstWithGates(HeadsFirst):
    """The values do not come from a linear layer alone; where O goes tells the order of the heads."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value * value.sigmoid())


class Gates(InOneRow):
    attend = HeadsFirstWithGates.attend


def test_the_order_of_heads_shows_behind_attention_too():
    methods = ["raw_attention", "rollout", "gae", "gradtoken", "decompx"]
    assert_same_maps(with_attention(HeadsFirstWithGates), with_attention(Gates), random_images(), methods)


class HeadsFirstMasked(HeadsFirst):
    """With a bias for every head, and for every image the same."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = len(query) // self.num_heads
        bias = bias_of(self, query).repeat_interleave(rows, dim=0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("kind", [HeadsFirst, HeadsFirstByHand])
def test_heads_before_images_give_the_same_maps(kind, images):
    assert_same_maps(with_attention(kind), small_vit(), random_images()[:images], METHODS)


@pytest.mark.parametrize("images", [1, 2])
def test_heads_before_images_with_a_bias_for_every_head(images):
    assert_same_maps(with_attention(HeadsFirstMasked), with_attention(Ordinary), random_images()[:images], METHODS)


@pytest.mark.parametrize("kind", [HeadsFirst, HeadsFirstByHand])
def test_scores_of_heads_before_images_are_edited_alike(kind):
    images, factors = random_images(), torch.rand(2, 17, dtype=torch.float64)
    found, expected = (
        ModelRunner(model, images).logits_of_damped(images, factors) for model in (with_attention(kind), small_vit())
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # float64, the same operations
