"""The other functions of ``spelling_reference`` in some spellings each, and the table of all spellings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import spellings
from spelling_reference import DEPTH, HEADS, SCALE, STEP, TOP, Weights
from spellings import Attention, Block, Core, Sum, ViT, at_scaled_after, einsum, fused, linear, norm

Build = Callable[[Weights], nn.Module]


class MeanPooled(ViT):
    """No class token; the mean of all patches is read."""

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.run_blocks(self.patches(pictures) + self.pos_embed[:, 1:])
        return self.head(self.norm(x.mean(dim=1)))


class PostNorm(ViT):
    """norm(x + part(x)); there is no norm before the head."""

    def __init__(self, given: Weights, core: Core = fused) -> None:
        super().__init__(given, core)
        self.norm = nn.Identity()

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.norm1(x + block.attn(x))
            x = block.norm2(x + block.mlp(x))
        return x


class Parallel(ViT):
    """One norm, one sum."""

    def __init__(self, given: Weights, core: Core = fused, *, nested: bool = False) -> None:
        self.nested = nested
        super().__init__(given, core)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block.norm1(x)
            x = x + (block.attn(y) + block.mlp(y)) if self.nested else x + block.attn(y) + block.mlp(y)
        return x


class SandwichNorm(ViT):
    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        super().keep_blocks(given, core, add)
        self.behind = nn.ModuleList(
            nn.ModuleList([norm(given, f"{layer}.norm3"), norm(given, f"{layer}.norm4")]) for layer in range(DEPTH)
        )

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, (third, fourth) in zip(self.blocks, self.behind, strict=True):
            x = block.add(x, third(block.attn(block.norm1(x))))
            x = block.add(x, fourth(block.mlp(block.norm2(x))))
        return x


def interpolate(x: Tensor, y: Tensor) -> Tensor:
    return torch.lerp(x, y, STEP)


class Shared(ViT):
    """One block, run three times."""

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        self.block = Block(given, 0, core, add)

    def run_blocks(self, x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = self.block(x)
        return x


class SharedInList(Shared):
    """The same block three times in a list."""

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        self.blocks = nn.ModuleList([Block(given, 0, core, add)] * DEPTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        return ViT.run_blocks(self, x)


class TalkingHeads(Attention):
    def __init__(self, given: Weights, layer: int, *, einsum: bool = False) -> None:
        super().__init__(given, layer)
        self.einsum = einsum
        self.before, self.after = (nn.Parameter(given[f"{layer}.{name}"]) for name in ("before", "after"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = self.mixed(self.mixed(q @ k.mT * SCALE, self.before).softmax(dim=-1), self.after)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))

    def mixed(self, matrix: Tensor, heads: Tensor) -> Tensor:
        if self.einsum:
            return torch.einsum("bhij,gh->bgij", matrix, heads)
        return nn.functional.linear(matrix.permute(0, 2, 3, 1), heads).permute(0, 3, 1, 2)


class TopK(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * SCALE
        least = scores.topk(TOP, dim=-1).values[..., -1:]
        weights = scores.masked_fill(scores < least, float("-inf")).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class GatedValues(Attention):
    def __init__(self, given: Weights, layer: int, core: Core = fused) -> None:
        super().__init__(given, layer, core)
        self.gate = linear(given, f"{layer}.gate")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class OtherAttention(ViT):
    """The plain model with another attention module."""

    def __init__(self, given: Weights, attention: Callable[[Weights, int], nn.Module]) -> None:
        self.attention = attention
        super().__init__(given)

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        super().keep_blocks(given, core, add)
        for layer, block in enumerate(self.blocks):
            block.attn = self.attention(given, layer)


def _other(attention: Callable[..., nn.Module], **options: object) -> Build:
    return partial(OtherAttention, attention=partial(attention, **options))


_PLAIN: dict[str, Build] = {
    **{name: partial(ViT, core=core) for name, core in spellings.CORES.items()},
    **{f"sum_{name}": partial(ViT, add=add) for name, add in spellings.SUMS.items()},
    "pairs_in_lists": partial(spellings.PairsInLists, core=at_scaled_after),
    "pairs_in_lists_einsum": partial(spellings.PairsInLists, core=einsum),
    "flat_sequence": spellings.FlatSequence,
    "functions": spellings.Functions,
    "foreign_names": spellings.ForeignNames,
    "two_streams": spellings.TwoStreams,
    "multihead": spellings.Multihead,
    "multihead_weights": partial(spellings.Multihead, need_weights=True),
    "multihead_tokens_first": partial(spellings.Multihead, batch_first=False),
    "multihead_function": partial(spellings.MultiheadFunction, batch_first=False),
    "encoder": partial(spellings.Encoder, norm_first=True),
    "patches_unfolded": spellings.Unfolded,
    "patches_rearranged": spellings.Rearranged,
    "patches_sliced": spellings.Sliced,
    "in_place_einsum": partial(ViT, core=einsum, add=spellings.in_place),
}
SPELLINGS: dict[str, dict[str, Build]] = {
    "plain": _PLAIN,
    "mean_pooled": {"fused": MeanPooled, "einsum": partial(MeanPooled, core=einsum)},
    "post_norm": {
        "fused": PostNorm,
        "written_out": partial(PostNorm, core=at_scaled_after),
        "encoder": partial(spellings.Encoder, norm_first=False),
    },
    "parallel": {"three_terms": Parallel, "two_terms": partial(Parallel, nested=True)},
    "sandwich_norm": {"fused": SandwichNorm, "in_place": partial(SandwichNorm, add=spellings.in_place)},
    "interpolated": {
        "lerp": partial(ViT, add=interpolate),
        "sum": partial(ViT, add=lambda x, y: x + STEP * (y - x)),
        "weighted": partial(ViT, add=lambda x, y: (1 - STEP) * x + STEP * y),
    },
    "shared": {"loop": Shared, "list": SharedInList, "loop_einsum": partial(Shared, core=einsum)},
    "talking_heads": {"linear": _other(TalkingHeads), "einsum": _other(TalkingHeads, einsum=True)},
    "top_k": {"masked": _other(TopK)},
    "gated_values": {"fused": _other(GatedValues), "written_out": _other(GatedValues, core=at_scaled_after)},
}
ALL = [(variant, name) for variant, builds in SPELLINGS.items() for name in builds]


def build(variant: str, name: str, given: Weights) -> nn.Module:
    """A model in evaluation mode with weights of its own."""
    return SPELLINGS[variant][name]({key: value.clone() for key, value in given.items()}).double().eval()
