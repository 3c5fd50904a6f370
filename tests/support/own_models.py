"""ViTs as people write them: each is one of the functions of ``own_reference``, in a hand of its own.

``MODELS[name]`` is the function and what builds the model from a dictionary of weights.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable

import torch
from einops import einsum as einops_einsum
from einops import rearrange, reduce, repeat
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils.checkpoint import checkpoint

from own_reference import (
    DEPTH,
    HEAD,
    HEADS,
    PATCH,
    PATCHES,
    SCALE,
    SIDE,
    WIDTH,
    Function,
    Weights,
    distance_bias,
    rotation,
)


def linear(given: Weights, name: str, rows: int | None = None) -> nn.Linear:
    weight, bias = given[f"{name}.weight"][:rows], given[f"{name}.bias"][:rows]
    module = nn.Linear(weight.shape[1], weight.shape[0]).double()
    module.load_state_dict({"weight": weight, "bias": bias})
    return module


def layer_norm(given: Weights, name: str) -> nn.LayerNorm:
    module = nn.LayerNorm(WIDTH).double()
    module.load_state_dict({"weight": given[f"{name}.weight"], "bias": given[f"{name}.bias"]})
    return module


def mlp(given: Weights, layer: int) -> nn.Sequential:
    return nn.Sequential(
        linear(given, f"{layer}.fc1"), nn.GELU(), nn.Dropout(0.1), linear(given, f"{layer}.fc2"), nn.Dropout(0.1)
    )


def joined_qkv(given: Weights, layer: int) -> nn.Linear:
    module = nn.Linear(WIDTH, 3 * WIDTH).double()
    parts = {key: [given[f"{layer}.{name}.{key}"] for name in "qkv"] for key in ("weight", "bias")}
    module.load_state_dict({key: torch.cat(each) for key, each in parts.items()})
    return module


class OwnViT(nn.Module):
    """The frame that most share: a patch convolution, a class token, blocks in a list, a head on the class token."""

    def __init__(self, given: Weights) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, PATCH, PATCH).double()
        self.patch.load_state_dict({
            "weight": given["patch.weight"].view(WIDTH, 3, PATCH, PATCH), "bias": given["patch.bias"]
        })  # fmt: skip
        self.cls, self.registers = nn.Parameter(given["cls"][None]), nn.Parameter(given["registers"][None])
        self.pos = nn.Parameter(given["pos"][None])
        self.make(given)
        self.blocks = nn.ModuleList(self.block(given, layer) for layer in range(DEPTH))
        self.norm, self.head = layer_norm(given, "norm"), linear(given, "head")

    def make(self, given: Weights) -> None:
        """Further parts."""

    def block(self, given: Weights, layer: int) -> nn.Module:
        return Block(given, layer)

    def embed(self, img: Tensor) -> Tensor:
        x = self.patch(img).flatten(2).transpose(1, 2) + self.pos
        return torch.cat((self.cls.expand(x.size(0), -1, -1), x), dim=1)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def read(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)[:, 0])

    def forward(self, img: Tensor) -> Tensor:
        return self.read(self.run(self.embed(img)))


class Block(nn.Module):
    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer_norm(given, f"{layer}.norm1"), layer_norm(given, f"{layer}.norm2")
        self.attn, self.mlp = self.attention(given, layer), mlp(given, layer)

    def attention(self, given: Weights, layer: int) -> nn.Module:
        return Attention(given, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """qkv.chunk(3), view and transpose."""

    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.qkv, self.proj = joined_qkv(given, layer), linear(given, f"{layer}.out")
        self.make(given, layer)

    def make(self, given: Weights, layer: int) -> None:
        """Further parts."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return tuple(part.view(b, n, HEADS, HEAD).transpose(1, 2) for part in (q, k, v))

    def merge(self, o: Tensor) -> Tensor:
        b, h, n, d = o.shape
        return self.proj(o.transpose(1, 2).contiguous().view(b, n, h * d))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(HEAD), dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.core(*self.split(x)))


def with_attention(attention: type[nn.Module]) -> type[OwnViT]:
    """The usual model with another attention."""

    class Own(OwnViT):
        def block(self, given: Weights, layer: int) -> nn.Module:
            block = Block(given, layer)
            block.attn = attention(given, layer)
            return block

    Own.__name__ = attention.__name__
    return Own


# Attention -----------------------------------------------------------------------------------------------------------


class MaskedByWhere(Attention):
    """Nothing is hidden, but the mask is there."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * SCALE
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        scores = torch.where(mask, scores, torch.tensor(float("-inf"), dtype=scores.dtype))
        return torch.matmul(scores.softmax(-1), v)


class MaskedByWhereNumber(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * SCALE
        mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        return torch.matmul(torch.where(mask, -1e9, scores).softmax(-1), v)


class CastSoftmax(Attention):
    """Softmax in a named precision, and back."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(q @ k.mT * SCALE, dim=-1, dtype=torch.float64).to(q.dtype).type_as(v)
        return weights.double() @ v


class FoldedScale(Attention):
    """1 / sqrt(d) is in the weights of q."""

    def make(self, given: Weights, layer: int) -> None:
        with torch.no_grad():
            self.qkv.weight[:WIDTH] *= SCALE
            self.qkv.bias[:WIDTH] *= SCALE

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class AllEinops(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=HEADS)
        dots = einops_einsum(q, k, "b h i d, b h j d -> b h i j") * SCALE
        out = einops_einsum(dots.softmax(dim=-1), v, "b h i j, b h j d -> b h i d")
        return self.proj(rearrange(out, "b h n d -> b n (h d)"))


class HeadsLast(Attention):
    """Scores of (b, i, j, h), as ports from JAX have them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).unbind(2)
        weights = torch.softmax(torch.einsum("bihd,bjhd->bijh", q, k) * SCALE, dim=2)
        return self.proj(torch.einsum("bijh,bjhd->bihd", weights, v).flatten(2))


class DenseGeneral(nn.Module):
    """Weights with an axis for heads, by einsum."""

    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        for name in "qkv":
            weight, bias = given[f"{layer}.{name}.weight"], given[f"{layer}.{name}.bias"]
            setattr(self, f"w{name}", nn.Parameter(weight.T.reshape(WIDTH, HEADS, HEAD)))
            setattr(self, f"b{name}", nn.Parameter(bias.reshape(HEADS, HEAD)))
        self.wo = nn.Parameter(given[f"{layer}.out.weight"].T.reshape(HEADS, HEAD, WIDTH))
        self.bo = nn.Parameter(given[f"{layer}.out.bias"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("bnc,chd->bnhd", x, weight) + bias
            for weight, bias in ((self.wq, self.bq), (self.wk, self.bk), (self.wv, self.bv))
        )
        weights = torch.einsum("bqhd,bkhd->bhqk", q * SCALE, k).softmax(-1)
        return torch.einsum("bnhd,hdc->bnc", torch.einsum("bhqk,bkhd->bqhd", weights, v), self.wo) + self.bo


class OneHead(nn.Module):
    def __init__(self, given: Weights, layer: int, head: int) -> None:
        super().__init__()
        rows = slice(head * HEAD, (head + 1) * HEAD)
        cut = {name: given[f"{layer}.{name}"][rows] for name in (f"{p}.{k}" for p in "qkv" for k in ("weight", "bias"))}
        self.query, self.key, self.value = (linear(cut, name) for name in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * HEAD**-0.5
        return F.softmax(wei, dim=-1) @ v


class HeadModules(nn.Module):
    """Every head is a module; what they give is joined."""

    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([OneHead(given, layer, head) for head in range(HEADS)])
        self.proj = linear(given, f"{layer}.out")

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class ConvolvedChannelsFirst(nn.Module):
    """q, k, v by nn.Conv1d(kernel_size=1) on (b, c, n)."""

    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv1d(WIDTH, WIDTH, 1).double() for _ in range(4))
        for name, module in (("q", self.q), ("k", self.k), ("v", self.v), ("out", self.out)):
            module.load_state_dict(
                {"weight": given[f"{layer}.{name}.weight"][..., None], "bias": given[f"{layer}.{name}.bias"]}
            )

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        q, k, v = (module(x).reshape(len(x), HEADS, HEAD, -1) for module in (self.q, self.k, self.v))
        weights = torch.softmax((q * SCALE).transpose(2, 3) @ k, dim=-1)
        return self.out((v @ weights.transpose(2, 3)).flatten(1, 2)).transpose(1, 2)


class Rotary(Attention):
    """x cos + rotate_half(x) sin, on patches alone, put behind the class token again."""

    def make(self, given: Weights, layer: int) -> None:
        angle = rotation(PATCHES, 0)
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        first, x = x[:, :, :1], x[:, :, 1:]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([first, x * self.cos + torch.cat((-x2, x1), dim=-1) * self.sin], dim=2)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)


class ComplexRotary(Rotary):
    """Rotation as a product of complex numbers."""

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.cat([torch.zeros(1, HEAD // 2, dtype=torch.float64), rotation(PATCHES, 0)])
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(turned).transpose(-1, -2).flatten(-2)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Attention.core(self, self.turned(q), self.turned(k), v)


class Distance(Attention):
    """ALiBi."""

    def make(self, given: Weights, layer: int) -> None:
        self.register_buffer("bias", distance_bias(PATCHES + 1))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / HEAD**0.5
        scores += self.bias
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class Grouped(nn.Module):
    """Keys and values of fewer heads, each expanded for its group of queries."""

    kv_heads = 2

    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.wq, self.wo = linear(given, f"{layer}.q"), linear(given, f"{layer}.out")
        self.wk, self.wv = (linear(given, f"{layer}.{name}", self.kv_heads * HEAD) for name in "kv")

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, HEADS, HEAD).transpose(1, 2)
        k, v = (part(x).view(b, n, self.kv_heads, HEAD).transpose(1, 2) for part in (self.wk, self.wv))
        groups = HEADS // self.kv_heads
        k, v = (
            part[:, :, None].expand(b, self.kv_heads, groups, n, HEAD).reshape(b, HEADS, n, HEAD) for part in (k, v)
        )
        return self.wo((torch.softmax(q @ k.mT * SCALE, -1) @ v).transpose(1, 2).reshape(b, n, -1))


class GroupedEinsum(Grouped):
    """The group is an axis of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.wq(x), "b n (g r d) -> b g r n d", g=self.kv_heads, d=HEAD)
        k, v = (rearrange(part(x), "b n (g d) -> b g n d", g=self.kv_heads) for part in (self.wk, self.wv))
        weights = (torch.einsum("bgrid,bgjd->bgrij", q, k) * SCALE).softmax(dim=-1)
        return self.wo(rearrange(torch.einsum("bgrij,bgjd->bgrid", weights, v), "b g r n d -> b n (g r d)"))


class GroupedFused(Grouped):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class MultiQuery(Grouped):
    """One head of keys and values, broadcast."""

    kv_heads = 1

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = self.wk(x)[:, None], self.wv(x)[:, None]
        return self.wo(((q @ k.mT * SCALE).softmax(-1) @ v).transpose(1, 2).flatten(2))


class MultiQueryEinsum(MultiQuery):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x).unflatten(-1, (HEADS, HEAD)), self.wk(x), self.wv(x)
        weights = torch.einsum("bihd,bjd->bhij", q, k).mul(SCALE).softmax(-1)
        return self.wo(torch.einsum("bhij,bjd->bihd", weights, v).flatten(2))


class Cosine(Attention):
    """Lengths taken off by hand, and a temperature that is learned as its logarithm."""

    def make(self, given: Weights, layer: int) -> None:
        self.logit_scale = nn.Parameter(given[f"{layer}.temperature"].log().view(HEADS, 1, 1))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
        return (q @ k.mT * self.logit_scale.clamp(max=math.log(100)).exp()).softmax(-1) @ v


class Sigmoid(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.mT / math.sqrt(HEAD) - math.log(q.shape[-2])) @ v


class Sink(Attention):
    """exp(s) / (1 + Σ exp(s))."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.exp(q @ k.mT * SCALE)
        return weights / (1 + weights.sum(dim=-1, keepdim=True)) @ v


class SinkJoined(Attention):
    """A score of 0 is joined to every row and left out behind the softmax."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * SCALE
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1)
        return scores.softmax(dim=-1)[..., :-1] @ v


class LinearAttention(Attention):
    """q (kᵀ v): there is no A."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q * k.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True)


# Blocks and norms ----------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, given: Weights, name: str) -> None:
        super().__init__()
        self.g = nn.Parameter(given[f"{name}.weight"])

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class SwiGLU(nn.Module):
    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (linear(given, f"{layer}.{name}") for name in ("gate", "fc2", "fc1"))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SwiGLUByHand(SwiGLU):
    """One projection for both, a silu that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        both = F.linear(x, torch.cat([self.w1.weight, self.w3.weight]), torch.cat([self.w1.bias, self.w3.bias]))
        gate, hidden = both.chunk(2, dim=-1)
        return self.w2(gate * torch.sigmoid(gate) * hidden)


class Llama(OwnViT):
    """RMSNorm, SwiGLU and grouped queries, all by hand; no position is added."""

    feed = SwiGLU

    def make(self, given: Weights) -> None:
        self.pos.data.zero_()

    def block(self, given: Weights, layer: int) -> nn.Module:
        block = Block(given, layer)
        block.attn, block.mlp = Rotary(given, layer), self.feed(given, layer)
        block.norm1, block.norm2 = (RMSNorm(given, f"{layer}.{name}") for name in ("norm1", "norm2"))
        return block

    def __init__(self, given: Weights) -> None:
        super().__init__(given)
        self.norm = RMSNorm(given, "norm")


class LlamaByHand(Llama):
    feed = SwiGLUByHand


class HandNorm(nn.Module):
    """LayerNorm with mean and standard deviation by hand."""

    def __init__(self, given: Weights, name: str) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(given[f"{name}.weight"]), nn.Parameter(given[f"{name}.bias"])

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + 1e-5) + self.beta


class HandNorms(OwnViT):
    def block(self, given: Weights, layer: int) -> nn.Module:
        block = Block(given, layer)
        block.norm1, block.norm2 = (HandNorm(given, f"{layer}.{name}") for name in ("norm1", "norm2"))
        return block


class SquaredReLU(OwnViT):
    def block(self, given: Weights, layer: int) -> nn.Module:
        block = Block(given, layer)
        block.mlp[1] = nn.ReLU()
        block.mlp[2].forward = lambda hidden: hidden**2
        return block


class AddedInPlace(OwnViT):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x.add_(block.attn(block.norm1(x)))
            x.add_(block.mlp(block.norm2(x)))
        return x


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        return x.div(keep) * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep)


class LayerScale(OwnViT):
    """Factors as parameters in lists in a list, with DropPath around."""

    def make(self, given: Weights) -> None:
        self.drop = DropPath(0.2)
        self.scales = nn.ModuleList(
            nn.ParameterList([given[f"{layer}.factor1"], given[f"{layer}.factor2"]]) for layer in range(DEPTH)
        )

    def run(self, x: Tensor) -> Tensor:
        for (first, second), block in zip(self.scales, self.blocks, strict=True):
            x = x + self.drop(first * block.attn(block.norm1(x)))
            x = torch.add(self.drop(block.mlp(block.norm2(x)) * second), x)
        return x


class PostNorm(OwnViT):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.norm1(x + block.attn(x))
            x = block.norm2(block.mlp(x) + x)
        return x

    def read(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])


class Checkpointed(OwnViT):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class ListsInLists(OwnViT):
    """Modules by hand in lists in a dictionary; a sum over a list."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            parts = {"attend": [block.norm1, block.attn], "think": [block.norm2, [*block.mlp]]}
            for name in ("attend", "think"):
                y, (norm, part) = x, parts[name]
                y = norm(y)
                for layer in part if isinstance(part, list) else [part]:
                    y = layer(y)
                x = sum([x, y])
        return x


class ChannelsFirst(OwnViT):
    """The stream is (b, c, n)."""

    def run(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = x + block.attn(block.norm1(x.transpose(1, 2))).transpose(1, 2)
            x = x + block.mlp(block.norm2(x.transpose(1, 2))).transpose(1, 2)
        return x.transpose(1, 2)


class TokensInOneRow(OwnViT):
    """Images and tokens lie in one axis: (b n, c)."""

    def run(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, WIDTH)
        for block in self.blocks:
            x = x + block.attn(block.norm1(x).view(shape)).view(-1, WIDTH)
            x = x + block.mlp(block.norm2(x))
        return x.view(shape)


# In front and behind -------------------------------------------------------------------------------------------------


class KerasPatches(nn.Module):
    """Patches by unfold and a dense layer, positions by an embedding, all tokens flattened in front of the head."""

    def __init__(self, given: Weights) -> None:
        super().__init__()
        self.projection = linear(given, "patch")
        self.position_embedding = nn.Embedding(PATCHES, WIDTH).double()
        self.position_embedding.load_state_dict({"weight": given["pos"]})
        self.encoder = nn.ModuleList(Block(given, layer) for layer in range(DEPTH))
        self.norm, self.classifier = layer_norm(given, "norm"), linear(given, "flat")

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
        patches = patches.permute(0, 2, 3, 1, 4, 5).contiguous().view(len(images), -1, 3 * PATCH * PATCH)
        positions = torch.arange(PATCHES, device=images.device)
        encoded = self.projection(patches) + self.position_embedding(positions)
        for block in self.encoder:
            encoded = block(encoded)
        return self.classifier(nn.Flatten()(self.norm(encoded)))


class ClassTokenLast(OwnViT):
    def embed(self, img: Tensor) -> Tensor:
        x = rearrange(self.patch(img), "b c h w -> b (h w) c") + self.pos
        return torch.cat([x, repeat(self.cls, "1 1 c -> b 1 c", b=len(x))], dim=1)

    def read(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x[:, -1]))


class RegistersBehind(OwnViT):
    def embed(self, img: Tensor) -> Tensor:
        return torch.cat([super().embed(img), self.registers.expand(len(img), -1, -1)], dim=1)


class RegistersBetween(OwnViT):
    """Class token, registers, patches."""

    def embed(self, img: Tensor) -> Tensor:
        x = self.patch(img).flatten(2).transpose(1, 2) + self.pos
        prefix = [part.expand(len(x), -1, -1) for part in (self.cls, self.registers)]
        return torch.cat([*prefix, x], dim=1)


class RegistersAmongPatches(OwnViT):
    """The registers stand in the middle of the patches."""

    def embed(self, img: Tensor) -> Tensor:
        x = super().embed(img)
        return torch.cat([x[:, :9], self.registers.expand(len(x), -1, -1), x[:, 9:]], dim=1)


class ParallelRegisters(OwnViT):
    """The registers are taken off again in front of the head."""

    def embed(self, img: Tensor) -> Tensor:
        x = super().embed(img)
        x = torch.cat([x, self.registers.repeat(len(x), 1, 1)], dim=1)
        self.count = x.shape[1] - PATCHES - 1
        return x

    def read(self, x: Tensor) -> Tensor:
        x = x[:, : -self.count]
        return self.head(self.norm(x)[:, 1:].mean(1))


class MeanOfAll(OwnViT):
    def read(self, x: Tensor) -> Tensor:
        return self.head(reduce(self.norm(x), "b n c -> b c", "mean"))


class MeanOfPatches(OwnViT):
    def read(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool1d(self.norm(x)[:, 1:].transpose(1, 2), 1).squeeze(-1))


class NoClassToken(OwnViT):
    def embed(self, img: Tensor) -> Tensor:
        grid = self.patch(img) + self.pos.transpose(1, 2).view(1, WIDTH, SIDE, SIDE)
        return grid.flatten(2).permute(0, 2, 1)

    def read(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).sum(dim=1) / x.size(1))


class BothPooled(OwnViT):
    """As DINOv2's linear classifier."""

    def make(self, given: Weights) -> None:
        self.classifier = linear(given, "head2")

    def read(self, x: Tensor) -> Tensor:
        cls, patches = torch.split(self.norm(x), [1, PATCHES], dim=1)
        return self.classifier(torch.cat([cls.squeeze(1), patches.mean(1)], dim=1))


class Weighed(OwnViT):
    """Sequence pooling: a softmax over tokens, as a product of matrices."""

    def make(self, given: Weights) -> None:
        self.pool = linear(given, "pool")

    def read(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.matmul(F.softmax(self.pool(x), dim=1).transpose(-1, -2), x).squeeze(-2))


class DictOutput(OwnViT):
    def forward(self, img: Tensor) -> dict[str, Tensor]:
        x = self.run(self.embed(img))
        return {"features": x, "logits": self.read(x)}


Output = namedtuple("Output", ["logits", "hidden_states"])  # noqa: PYI024 - as people write it


class TupleOutput(OwnViT):
    def forward(self, img: Tensor) -> Output:
        hidden = [self.embed(img)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return Output(self.read(hidden[-1]), hidden)


class FirstOfTwo(OwnViT):
    """(logits, attention matrices)."""

    def forward(self, img: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, kept = self.embed(img), []
        for block in self.blocks:
            q, k, v = block.attn.split(block.norm1(x))
            kept.append((q @ k.transpose(-1, -2) * SCALE).softmax(dim=-1))
            x = x + block.attn.merge(kept[-1] @ v)
            x = x + block.mlp(block.norm2(x))
        return self.read(x), kept


class Functional(nn.Module):
    """No submodule at all: parameters in a list, functions of them."""

    def __init__(self, given: Weights) -> None:
        super().__init__()
        self.names = list(given)
        self.values = nn.ParameterList(given.values())

    def forward(self, img: Tensor) -> Tensor:
        w = dict(zip(self.names, self.values, strict=True))

        def dense(name: str, x: Tensor) -> Tensor:
            return torch.addmm(w[f"{name}.bias"], x.flatten(0, -2), w[f"{name}.weight"].t()).view(*x.shape[:-1], -1)

        def norm(name: str, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

        patches = F.unfold(img, kernel_size=PATCH, stride=PATCH).transpose(1, 2)
        x = torch.cat([w["cls"].repeat(len(img), 1, 1), dense("patch", patches) + w["pos"]], 1)
        for i in range(DEPTH):
            q, k, v = (
                torch.stack(dense(f"{i}.{name}", norm(f"{i}.norm1", x)).split(HEAD, dim=-1), dim=1) for name in "qkv"
            )
            heads = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * SCALE, -1), v)
            x = x + dense(f"{i}.out", torch.cat(heads.unbind(1), dim=-1))
            x = x + dense(f"{i}.fc2", F.gelu(dense(f"{i}.fc1", norm(f"{i}.norm2", x))))
        return dense("head", norm("norm", x)[:, 0])


class NormalisedInside(OwnViT):
    """Pictures of 0 to 1, brought to the mean and deviation of ImageNet by the model itself."""

    def forward(self, img: Tensor) -> Tensor:
        mean, std = (img.new_tensor(each).view(1, 3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        return super().forward(((img * std + mean) - mean) / std)


def wrapped(given: Weights) -> nn.Module:
    return nn.DataParallel(OwnViT(given))


Build = Callable[[Weights], nn.Module]
_PLAIN = Function()
MODELS: dict[str, tuple[Function, Build]] = {
    **{
        attention.__name__: (function, with_attention(attention))
        for function, attentions in (
            (_PLAIN, (Attention, MaskedByWhere, MaskedByWhereNumber, CastSoftmax, FoldedScale, AllEinops, HeadsLast)),
            (_PLAIN, (DenseGeneral, HeadModules, ConvolvedChannelsFirst)),
            (Function(kv_heads=2), (Grouped, GroupedEinsum, GroupedFused)),
            (Function(kv_heads=1), (MultiQuery, MultiQueryEinsum)),
            (Function(attention="cosine"), (Cosine,)),
            (Function(attention="sigmoid"), (Sigmoid,)),
            (Function(attention="sink"), (Sink, SinkJoined)),
            (Function(attention="linear"), (LinearAttention,)),
        )
        for attention in attentions
    },
    **{
        model.__name__: (function, model)
        for function, models in (
            (_PLAIN, (HandNorms, AddedInPlace, Checkpointed, ListsInLists, ChannelsFirst, TokensInOneRow)),
            (_PLAIN, (ClassTokenLast, DictOutput, TupleOutput, FirstOfTwo, Functional, NormalisedInside)),
            (Function(norm="rms", feed="swiglu", positions="rotated"), (Llama, LlamaByHand)),
            (Function(feed="squared"), (SquaredReLU,)),
            (Function(factors=True), (LayerScale,)),
            (Function(place="post"), (PostNorm,)),
            (Function(prefix=0, pooling="flat"), (KerasPatches,)),
            (Function(prefix=3), (RegistersBehind, RegistersBetween, RegistersAmongPatches)),
            (Function(prefix=3, pooling="patches"), (ParallelRegisters,)),
            (Function(pooling="mean"), (MeanOfAll,)),
            (Function(pooling="patches"), (MeanOfPatches,)),
            (Function(prefix=0, pooling="mean"), (NoClassToken,)),
            (Function(pooling="both"), (BothPooled,)),
            (Function(pooling="weighed"), (Weighed,)),
        )
        for model in models
    },
    "DataParallel": (_PLAIN, wrapped),
}
