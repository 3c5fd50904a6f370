"""Attention as people write it, and the frame of a ViT around it; ``own_models`` has what differs elsewhere."""

from __future__ import annotations

import math

import torch
from einops import einsum as einops_einsum
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from own_reference import DEPTH, HEAD, HEADS, PATCH, PATCHES, SCALE, WIDTH, Weights, distance_bias, rotation


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


def with_attention(attention: type[nn.Module], *, positions: bool = True) -> type[OwnViT]:
    """The usual model with another attention; without positions that are added, where attention has its own."""

    class Own(OwnViT):
        def make(self, given: Weights) -> None:
            if not positions:
                self.pos.data.zero_()

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


class CosineNormalized(Cosine):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q, p=2.0, dim=-1), F.normalize(k, p=2.0, dim=-1)
        return F.softmax(torch.matmul(q, k.transpose(-2, -1)) * self.logit_scale.exp(), dim=-1) @ v


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


class MemoryBehind(Attention):
    """Learned tokens that only keys and values have, joined behind the others."""

    def make(self, given: Weights, layer: int) -> None:
        self.memory = nn.Parameter(given["memory"])

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([x, self.memory.expand(len(x), -1, -1)], dim=1)
        q = F.linear(x, self.qkv.weight[:WIDTH], self.qkv.bias[:WIDTH])
        k, v = F.linear(joined, self.qkv.weight[WIDTH:], self.qkv.bias[WIDTH:]).chunk(2, dim=-1)
        return self.merge(self.core(*(rearrange(part, "b n (h d) -> b h n d", h=HEADS) for part in (q, k, v))))


class MemoryKeys(Attention):
    """Learned keys and values for every head, in front of the others."""

    def make(self, given: Weights, layer: int) -> None:
        for name in "kv":
            made = F.linear(given["memory"], given[f"{layer}.{name}.weight"], given[f"{layer}.{name}.bias"])
            setattr(self, f"memory_{name}", nn.Parameter(made.unflatten(-1, (HEADS, HEAD)).transpose(0, 1)))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        learned = (part.expand(len(q), -1, -1, -1) for part in (self.memory_k, self.memory_v))
        k, v = (torch.cat(pair, dim=-2) for pair in zip(learned, (k, v), strict=True))
        return F.scaled_dot_product_attention(q, k, v)


class LinearAttention(Attention):
    """q (kᵀ v): there is no A."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q * k.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True)
