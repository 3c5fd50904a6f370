"""One small ViT in the ways that people write it: every model here computes a variant of ``spelling_reference``.

``SPELLINGS[variant][name](weights)`` builds a model from one dictionary of weights. Most differ from the plain one in
one place: how attention is multiplied out, how the sums are written, how blocks are kept, how patches are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from einops import einsum as einops_einsum
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from spelling_reference import DEPTH, HEADS, HIDDEN, PATCH, SCALE, WIDTH, Weights

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Sum = Callable[[Tensor, Tensor], Tensor]


def linear(given: Weights, name: str) -> nn.Linear:
    outputs, inputs = given[f"{name}.weight"].shape
    return _set(nn.Linear(inputs, outputs), given, name)


def norm(given: Weights, name: str) -> nn.LayerNorm:
    return _set(nn.LayerNorm(WIDTH), given, name)


def mlp(given: Weights, layer: int) -> nn.Sequential:
    return nn.Sequential(linear(given, f"{layer}.fc1"), nn.GELU(), linear(given, f"{layer}.fc2"))


def _set(module: nn.Module, given: Weights, name: str) -> nn.Module:
    module.double()
    module.load_state_dict({key: given[f"{name}.{key}"] for key in ("weight", "bias")})
    return module


# softmax(q k^T) v on (batch, heads, tokens, channels) -----------------------------------------------------------------


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=q.new_zeros(q.shape[-2], k.shape[-2]), scale=SCALE)


def matmul_scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q * SCALE, k.transpose(-2, -1)), dim=-1), v)


def at_scaled_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * SCALE).softmax(dim=-1) @ v


def at_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT) / math.sqrt(q.shape[-1]), dim=-1) @ v


def scale_shared_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    root = math.sqrt(SCALE)
    return ((q * root) @ (k * root).permute(0, 1, 3, 2)).softmax(-1).matmul(v)


def softmax_module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.Dropout(0.0)(nn.Softmax(dim=-1)(q.matmul(k.transpose(2, 3)).mul(SCALE))) @ v


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns, values = (part.flatten(0, 1) for part in (q, k, v))
    weights = torch.bmm(rows, columns.transpose(1, 2)).mul_(SCALE).softmax(dim=-1)
    return torch.bmm(weights, values).unflatten(0, q.shape[:2])


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns, values = (part.flatten(0, 1) for part in (q, k, v))
    bias = q.new_zeros(1, 1, 1)
    weights = torch.baddbmm(bias, rows, columns.mT, beta=1.0, alpha=SCALE).softmax(dim=-1)
    return weights.bmm(values).unflatten(0, q.shape[:2])


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(SCALE).softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def einsum_other_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(torch.einsum("bhjd,bhid->bhij", k, q * SCALE), -1)
    return torch.einsum("bhjd,bhij->bhid", v, weights)


def einops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = einops_einsum(q, k, "b h i d, b h j d -> b h i j").mul(SCALE).softmax(dim=-1)
    return einops_einsum(weights, v, "b h i j, b h j d -> b h i d")


def exp_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(q @ k.mT * SCALE)
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


def exp_with_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    weights = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    return weights.div(weights.sum(-1, keepdim=True)).matmul(v)


def divided_behind_the_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    weights = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.log_softmax(q @ k.mT * SCALE, dim=-1).exp() @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The matrix is (from, to), with the softmax over its rows' axis."""
    weights = (k @ q.mT * SCALE).softmax(dim=-2)
    return (v.mT @ weights).mT


def mask_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return (q @ k.mT * SCALE).masked_fill(mask, -torch.finfo(q.dtype).max).softmax(-1) @ v


def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = []
    for head in range(q.shape[1]):
        weights = (q[:, head] @ k[:, head].mT * SCALE).softmax(dim=-1)
        found.append(weights @ v[:, head])
    return torch.stack(found, dim=1)


CORES: dict[str, Core] = {
    core.__name__: core
    for core in (
        *(fused, fused_with_mask, matmul_scaled_before, at_scaled_after, at_divided, scale_shared_out, softmax_module),
        *(bmm, baddbmm, einsum, einsum_other_order, einops, exp_and_sum, exp_with_maximum, divided_behind_the_values),
        *(log_softmax, keys_first, mask_filled, head_by_head),
    )
}

# x + y ----------------------------------------------------------------------------------------------------------------


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


SUMS: dict[str, Sum] = {
    "in_place": in_place,
    "add_": lambda x, y: x.add_(y),
    "torch_add": torch.add,
    "branch_first": lambda x, y: y + x,
    "stacked": lambda x, y: torch.stack([x, y]).sum(dim=0),
    "lerp": lambda x, y: torch.lerp(x, x + 2 * y, 0.5),
    "out_of_place_method": lambda x, y: x.add(y, alpha=1.0),
}


# The plain model, with one part that may be another -------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, given: Weights, layer: int, core: Core = fused) -> None:
        super().__init__()
        self.core = core
        self.qkv, self.proj = linear(given, f"{layer}.qkv"), linear(given, f"{layer}.out")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, given: Weights, layer: int, core: Core = fused, add: Sum = torch.Tensor.__add__) -> None:
        super().__init__()
        self.add = add
        self.norm1, self.norm2 = norm(given, f"{layer}.norm1"), norm(given, f"{layer}.norm2")
        self.attn, self.mlp = Attention(given, layer, core), mlp(given, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.attn(self.norm1(x)))
        return self.add(x, self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Sixty lines, as in a tutorial; subclasses change ``run_blocks`` or ``patches``."""

    def __init__(self, given: Weights, core: Core = fused, add: Sum = torch.Tensor.__add__) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH).double()
        with torch.no_grad():
            self.patch_embed.weight.copy_(given["patch.weight"].view(WIDTH, 3, PATCH, PATCH))
            self.patch_embed.bias.copy_(given["patch.bias"])
        self.cls_token, self.pos_embed = nn.Parameter(given["cls"].view(1, 1, -1)), nn.Parameter(given["pos"][None])
        self.keep_blocks(given, core, add)
        self.norm, self.head = norm(given, "norm"), linear(given, "head")

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        self.blocks = nn.ModuleList(Block(given, layer, core, add) for layer in range(DEPTH))

    def patches(self, pictures: Tensor) -> Tensor:
        return self.patch_embed(pictures).flatten(2).transpose(1, 2)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.run_blocks(x)[:, 0]))


# Blocks kept and called in other ways ---------------------------------------------------------------------------------


class PairsInLists(ViT):
    """[attention, feed-forward part] in lists inside a list, each behind its norm; as in vit-pytorch."""

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        self.layers = nn.ModuleList(
            nn.ModuleList([
                nn.Sequential(norm(given, f"{layer}.norm1"), Attention(given, layer, core)),
                nn.Sequential(norm(given, f"{layer}.norm2"), mlp(given, layer)),
            ])
            for layer in range(DEPTH)
        )  # fmt: skip

    def run_blocks(self, x: Tensor) -> Tensor:
        for attention, feed in self.layers:
            x = attention(x) + x
            x = feed(x) + x
        return x


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.fn = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class FlatSequence(ViT):
    """Residual modules in one nn.Sequential; nothing is a block."""

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        parts = []
        for layer in range(DEPTH):
            parts += [nn.Sequential(norm(given, f"{layer}.norm1"), Attention(given, layer, core))]
            parts += [nn.Sequential(norm(given, f"{layer}.norm2"), mlp(given, layer))]
        self.net = nn.Sequential(*map(Residual, parts))

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.net(x)


class Functions(ViT):
    """Blocks are functions of a dictionary of weights; there are no modules."""

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        numbered = {name.replace(".", "_"): nn.Parameter(value) for name, value in given.items() if name[0].isdigit()}
        self.w = nn.ParameterDict(numbered)

    def run_blocks(self, x: Tensor) -> Tensor:
        for layer in range(DEPTH):
            w = {name: (self.w[f"{layer}_{name}_weight"], self.w[f"{layer}_{name}_bias"])
                 for name in ("norm1", "norm2", "qkv", "out", "fc1", "fc2")}  # fmt: skip
            y = F.layer_norm(x, (WIDTH,), *w["norm1"])
            q, k, v = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in F.linear(y, *w["qkv"]).split(WIDTH, -1)
            )
            x = x + F.linear((torch.softmax(q @ k.mT * SCALE, -1) @ v).transpose(1, 2).reshape(x.shape), *w["out"])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,), *w["norm2"]), *w["fc1"])), *w["fc2"])
        return x


class Aufmerksamkeit(nn.Module):
    """Names in a language that no list of names has, and three projections."""

    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        parts = {key: given[f"{layer}.qkv.{key}"].chunk(3) for key in ("weight", "bias")}
        self.frage, self.merkmal, self.inhalt = (
            linear({f"p.{key}": value[number] for key, value in parts.items()}, "p") for number in range(3)
        )
        self.ausgang = linear(given, f"{layer}.out")

    def forward(self, zeichen: Tensor) -> Tensor:
        frage, merkmal, inhalt = (
            rearrange(teil(zeichen), "b n (h d) -> b h n d", h=HEADS)
            for teil in (self.frage, self.merkmal, self.inhalt)
        )
        anteile = (frage @ merkmal.mT / math.sqrt(frage.shape[-1])).softmax(-1)
        return self.ausgang(rearrange(anteile @ inhalt, "b h n d -> b n (h d)"))


class Stufe(nn.Module):
    def __init__(self, given: Weights, layer: int) -> None:
        super().__init__()
        self.blick, self.denken = Aufmerksamkeit(given, layer), mlp(given, layer)
        self.vorher, self.danach = norm(given, f"{layer}.norm1"), norm(given, f"{layer}.norm2")

    def forward(self, zeichen: Tensor) -> Tensor:
        zeichen = zeichen + self.blick(self.vorher(zeichen))
        return zeichen + self.denken(self.danach(zeichen))


class ForeignNames(ViT):
    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        self.stufen = nn.ModuleList(Stufe(given, layer) for layer in range(DEPTH))

    def run_blocks(self, x: Tensor) -> Tensor:
        for stufe in self.stufen:
            x = stufe(x)
        return x


class TwoStreams(ViT):
    """Streams side by side as with hyper-connections; blocks and head read the first, and write to both."""

    def run_blocks(self, x: Tensor) -> Tensor:
        share = torch.tensor([1.0, 0.5], dtype=x.dtype).view(2, 1, 1, 1)
        streams = x.expand(2, *x.shape)
        for block in self.blocks:
            streams = streams + share * block.attn(block.norm1(streams[0]))
            streams = streams + share * block.mlp(block.norm2(streams[0]))
        return streams[0]


# torch's own attention ------------------------------------------------------------------------------------------------


def multihead(given: Weights, layer: int, *, batch_first: bool = True) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).double()
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias"}
    names |= {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}
    module.load_state_dict({key: given[f"{layer}.{name}"] for key, name in names.items()})
    return module


class Multihead(ViT):
    """nn.MultiheadAttention on (batch, tokens, channels) or (tokens, batch, channels), with or without its weights."""

    def __init__(self, given: Weights, *, need_weights: bool = False, batch_first: bool = True) -> None:
        self.need_weights, self.batch_first = need_weights, batch_first
        super().__init__(given)

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        super().keep_blocks(given, core, add)
        for layer, block in enumerate(self.blocks):
            block.attn = multihead(given, layer, batch_first=self.batch_first)

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        for block in self.blocks:
            y = block.norm1(x)
            x = x + block.attn(y, y, y, need_weights=self.need_weights)[0]
            x = x + block.mlp(block.norm2(x))
        return x if self.batch_first else x.transpose(0, 1)


class MultiheadFunction(Multihead):
    """F.multi_head_attention_forward, called by the model itself on (tokens, batch, channels)."""

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for block in self.blocks:
            y, own = block.norm1(x), block.attn
            x = x + F.multi_head_attention_forward(
                y, y, y, WIDTH, HEADS, own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0,  # noqa: FBT003
                own.out_proj.weight, own.out_proj.bias, training=False, need_weights=False,
            )[0]  # fmt: skip
            x = x + block.mlp(block.norm2(x))
        return x.transpose(0, 1)


class Encoder(ViT):
    """nn.TransformerEncoder."""

    def __init__(self, given: Weights, *, norm_first: bool) -> None:
        self.norm_first = norm_first
        super().__init__(given)
        self.norm = self.norm if norm_first else nn.Identity()

    def keep_blocks(self, given: Weights, core: Core, add: Sum) -> None:
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, activation="gelu", batch_first=True, norm_first=self.norm_first
        )
        self.encoder = nn.TransformerEncoder(layer.double(), DEPTH, enable_nested_tensor=False)
        for number, one in enumerate(self.encoder.layers):
            one.self_attn = multihead(given, number)
            for mine, name in (("linear1", "fc1"), ("linear2", "fc2"), ("norm1", "norm1"), ("norm2", "norm2")):
                _set(getattr(one, mine), given, f"{number}.{name}")

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.encoder(x)


# Patches --------------------------------------------------------------------------------------------------------------


class Unfolded(ViT):
    def patches(self, pictures: Tensor) -> Tensor:
        rows = F.unfold(pictures, PATCH, stride=PATCH).transpose(1, 2)
        return F.linear(rows, self.patch_embed.weight.flatten(1), self.patch_embed.bias)


class Rearranged(ViT):
    def patches(self, pictures: Tensor) -> Tensor:
        rows = rearrange(pictures, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH)
        return F.linear(rows, self.patch_embed.weight.flatten(1), self.patch_embed.bias)


class Sliced(ViT):
    """Patches cut out one by one, as first programs do."""

    def patches(self, pictures: Tensor) -> Tensor:
        cut = [
            pictures[:, :, row : row + PATCH, column : column + PATCH].flatten(1)
            for row in range(0, pictures.shape[2], PATCH)
            for column in range(0, pictures.shape[3], PATCH)
        ]
        return F.linear(torch.stack(cut, dim=1), self.patch_embed.weight.flatten(1), self.patch_embed.bias)
