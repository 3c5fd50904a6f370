"""ViTs as people write them: each is one of the functions of ``own_reference``, in a hand of its own.

``MODELS[name]`` is the function and what builds the model from a dictionary of weights.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils.checkpoint import checkpoint

import own_attention
from own_attention import Block, OwnViT, Rotary, layer_norm, linear, with_attention
from own_reference import DEPTH, HEAD, PATCH, PATCHES, SCALE, SIDE, WIDTH, Function, Weights

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


class RegistersTakenOff(RegistersBehind):
    """The registers are taken off again in front of the head."""

    def read(self, x: Tensor) -> Tensor:
        x = x[:, : -self.registers.shape[1]]
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


def InDataParallel(given: Weights) -> nn.Module:  # noqa: N802 - it stands for a class
    return nn.DataParallel(OwnViT(given))


def Compiled(given: Weights) -> nn.Module:  # noqa: N802
    return torch.compile(OwnViT(given), backend="eager")


Build = Callable[[Weights], nn.Module]
_PLAIN = Function()
_ATTENTION = {
    _PLAIN: (
        *("Attention", "MaskedByWhere", "MaskedByWhereNumber", "CastSoftmax", "FoldedScale", "AllEinops", "HeadsLast"),
        *("DenseGeneral", "HeadModules", "ConvolvedChannelsFirst"),
    ),
    Function(kv_heads=2): ("Grouped", "GroupedEinsum", "GroupedFused"),
    Function(kv_heads=1): ("MultiQuery", "MultiQueryEinsum"),
    Function(attention="cosine"): ("Cosine", "CosineNormalized"),
    Function(attention="sigmoid"): ("Sigmoid",),
    Function(attention="sink"): ("Sink", "SinkJoined"),
    Function(attention="linear"): ("LinearAttention",),
    Function(positions="rotated"): ("Rotary", "ComplexRotary"),
    Function(positions="distance"): ("Distance",),
    Function(attention="memory"): ("MemoryBehind", "MemoryKeys"),
}
_MODELS = {
    _PLAIN: (
        *(HandNorms, AddedInPlace, Checkpointed, ListsInLists, ChannelsFirst, TokensInOneRow, ClassTokenLast),
        *(DictOutput, TupleOutput, FirstOfTwo, Functional, NormalisedInside, InDataParallel, Compiled),
    ),
    Function(norm="rms", feed="swiglu", positions="rotated"): (Llama, LlamaByHand),
    Function(feed="squared"): (SquaredReLU,),
    Function(factors=True): (LayerScale,),
    Function(place="post"): (PostNorm,),
    Function(prefix=0, pooling="flat"): (KerasPatches,),
    Function(prefix=3): (RegistersBehind, RegistersBetween, RegistersAmongPatches),
    Function(prefix=3, pooling="patches"): (RegistersTakenOff,),
    Function(pooling="mean"): (MeanOfAll,),
    Function(pooling="patches"): (MeanOfPatches,),
    Function(prefix=0, pooling="mean"): (NoClassToken,),
    Function(pooling="both"): (BothPooled,),
    Function(pooling="weighed"): (Weighed,),
}
MODELS: dict[str, tuple[Function, Build]] = {
    **{
        name: (function, with_attention(getattr(own_attention, name), positions=function.positions == "added"))
        for function, names in _ATTENTION.items()
        for name in names
    },
    **{model.__name__: (function, model) for function, models in _MODELS.items() for model in models},
}
