"""Attention that a block calls by a name of its own, or by no known name at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.errors import UnsupportedModelError

METHODS = ["gae", "tokentm", "decompx", "legrad"]
TARGET = torch.tensor([1, 3])


class OwnBlock(nn.Module):
    """timm's block with the attention under another name, as timm's module or as torch's with the same weights."""

    def __init__(self, block: nn.Module, name: str, *, of_torch: bool) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, _as_multihead(block.attn) if of_torch else block.attn)
        self.norm1, self.norm2, self.ls1, self.ls2, self.mlp = (
            getattr(block, part) for part in ("norm1", "norm2", "ls1", "ls2", "mlp")
        )

    def forward(self, tokens: Tensor) -> Tensor:
        attention, given = getattr(self, self.name), self.norm1(tokens)
        attended = (
            attention(given, given, given)[0] if isinstance(attention, nn.MultiheadAttention) else attention(given)
        )
        tokens = tokens + self.ls1(attended)
        return tokens + self.ls2(self.mlp(self.norm2(tokens)))


def _as_multihead(attention: nn.Module) -> nn.MultiheadAttention:
    multihead = nn.MultiheadAttention(attention.qkv.in_features, attention.num_heads, batch_first=True).double()
    multihead.in_proj_weight, multihead.in_proj_bias = attention.qkv.weight, attention.qkv.bias
    multihead.out_proj.weight, multihead.out_proj.bias = attention.proj.weight, attention.proj.bias
    return multihead


def renamed(name: str, *, depth: int, of_torch: bool) -> nn.Module:
    """``small_vit`` with blocks of one's own."""
    model = small_vit(depth=depth)
    model.blocks = nn.Sequential(*(OwnBlock(block, name, of_torch=of_torch) for block in model.blocks))
    return model.eval()


@pytest.mark.parametrize("depth", [3, 4])  # alike modules without attention count as blocks from four on
@pytest.mark.parametrize(
    ("name", "of_torch"), [("mha", True), ("multihead_attn", True), ("looking", True), ("msa", False), ("mha", False)]
)
def test_the_maps_are_those_of_the_same_model_under_known_names(name: str, depth: int, *, of_torch: bool) -> None:
    images = random_images()
    found = vitreous.explain(renamed(name, depth=depth, of_torch=of_torch), images, METHODS, TARGET).scores
    expected = vitreous.explain(small_vit(depth=depth), images, METHODS, TARGET).scores
    for method in METHODS:
        assert largest_difference(found[method], expected[method]) < 1e-12  # float64: the same sums in another order


def test_a_name_that_nobody_knows_is_said_to_be_unknown() -> None:
    """It may well be attention; what is written here is what was seen."""
    with pytest.raises(UnsupportedModelError, match=r"gae cannot explain.*: no attention part was found .* by name"):
        vitreous.explain(renamed("looking", depth=4, of_torch=False), random_images(), "gae", TARGET)
    with pytest.raises(UnsupportedModelError, match=r"no stack of transformer blocks: .* found by its name"):
        vitreous.explain(renamed("looking", depth=3, of_torch=False), random_images(), "gae", TARGET)
