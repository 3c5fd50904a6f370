"""Names mean nothing: parts of a block, attention above all, by any name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit

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


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(
    ("name", "of_torch"),
    [*((name, True) for name in ("mha", "multihead_attn", "looking")), *((name, False) for name in ("msa", "looking"))],
)
def test_the_maps_are_those_of_the_same_model_under_other_names(name: str, depth: int, *, of_torch: bool) -> None:
    images = random_images()
    found = vitreous.explain(renamed(name, depth=depth, of_torch=of_torch), images, METHODS, TARGET).scores
    expected = vitreous.explain(small_vit(depth=depth), images, METHODS, TARGET).scores
    for method in METHODS:
        assert largest_difference(found[method], expected[method]) < 1e-12  # float64: the same sums in another order


class OwnAttention(nn.Module):
    """timm's attention with names for its four layers; without a last one, the block has it."""

    def __init__(self, attention: nn.Module, layers: tuple[str, ...], projection: str | None) -> None:
        super().__init__()
        self.heads, self.layers, self.last = attention.num_heads, layers, projection
        rows = attention.qkv.weight.chunk(len(layers)), attention.qkv.bias.chunk(len(layers))
        for name, weight, bias in zip(layers, *rows, strict=True):
            layer = nn.Linear(*weight.T.shape)
            layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
            setattr(self, name, layer)
        if projection is not None:
            setattr(self, projection, attention.proj)

    def forward(self, tokens: Tensor) -> Tensor:
        joint = torch.cat([getattr(self, name)(tokens) for name in self.layers], dim=-1)
        query, key, value = joint.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return mixed if self.last is None else getattr(self, self.last)(mixed)


class NamedBlock(nn.Module):
    """timm's block with other names for its parts."""

    def __init__(self, block: nn.Module, norms: tuple[str, str], layers: tuple[str, ...], place: str) -> None:
        super().__init__()
        self.norms, (where, projection) = norms, place.split(".")
        self.attn = OwnAttention(block.attn, layers, projection if where == "attn" else None)
        self.proj = block.attn.proj if where == "block" else None
        setattr(self, norms[0], block.norm1)
        setattr(self, norms[1], block.norm2)
        self.ls1, self.ls2, self.mlp = block.ls1, block.ls2, block.mlp

    def forward(self, tokens: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.norms)
        attended = self.attn(first(tokens))
        tokens = tokens + self.ls1(attended if self.proj is None else self.proj(attended))
        return tokens + self.ls2(self.mlp(second(tokens)))


NORMS, JOINT = ("norm1", "norm2"), ("qkv",)
NAMES = {
    "layer_norm_1": (("layer_norm_1", "layer_norm_2"), JOINT, "attn.proj"),
    "attention_norm": (("attention_norm", "ffn_norm"), ("query", "key", "value"), "attn.out"),
    "rms_norm1": (("rms_norm1", "rms_norm2"), JOINT, "attn.proj"),
    "projection": (NORMS, JOINT, "attn.projection"),
    "projection_layer": (NORMS, ("q_proj", "k_proj", "v_proj"), "attn.projection_layer"),
    "proj in the block": (NORMS, ("proj_q", "proj_k", "proj_v"), "block.proj"),
}


@pytest.mark.parametrize("names", NAMES)
def test_norms_and_projections_have_many_names(names: str) -> None:
    """What a model is called does not matter: the methods that read these parts give the same maps."""
    methods, images, named = ["tokentm", "alti", "globenc", "attin_residual"], random_images(), small_vit()
    named.blocks = nn.Sequential(*(NamedBlock(block, *NAMES[names]) for block in named.blocks)).double().eval()
    found, expected = (vitreous.explain(model, images, methods, TARGET).scores for model in (named, small_vit()))
    for method in methods:
        assert largest_difference(found[method], expected[method]) < 1e-12  # float64: the same sums in another order
