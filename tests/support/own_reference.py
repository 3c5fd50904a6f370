"""Functions that people write as ViTs, each written out plainly once: what ``own_models`` is compared with.

``Function`` says which function it is; ``PlainViT`` computes it, always in the same spelling: prefix tokens first,
attention as softmax(scale q kᵀ + bias) v on (batch, head, token, channel), sums as x = x + f(x).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

SIZE, PATCH, WIDTH, HEADS, HIDDEN, DEPTH, CLASSES = 32, 8, 24, 4, 40, 2, 4
HEAD = WIDTH // HEADS
SCALE = HEAD**-0.5
SIDE = SIZE // PATCH
PATCHES = SIDE**2
REGISTERS = 2
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Function:
    """What a model computes.

    Attributes:
        norm: before every part and in front of the head.
        feed: the feed-forward part.
        kv_heads: how many heads keys and values have.
        attention: what makes weights of q and k; with ``memory``, keys and values that are learned stand before them.
        positions: added to the tokens, turning q and k, or a bias on scores that grows with distance.
        prefix: how many tokens stand in front of the patches: the class token, then registers.
        pooling: what the head reads: the first token, the mean of all or of the patches, both the class token and that
            mean, tokens weighed by a softmax, or all patches side by side.
        factors: whether every part is multiplied channel by channel before it is added.
        place: where the norms stand.
    """

    norm: Literal["layer", "rms"] = "layer"
    feed: Literal["gelu", "swiglu", "squared"] = "gelu"
    kv_heads: int = HEADS
    attention: Literal["softmax", "cosine", "sigmoid", "sink", "linear", "memory"] = "softmax"
    positions: Literal["added", "rotated", "distance"] = "added"
    prefix: int = 1
    pooling: Literal["first", "mean", "patches", "both", "weighed", "flat"] = "first"
    factors: bool = False
    place: Literal["pre", "post"] = "pre"


def weights(seed: int = 0) -> Weights:
    """Random weights in float64 for every function: no bias is 0, no norm's weight is 1."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found: Weights = {"cls": 0.5 * noise(1, WIDTH), "registers": 0.5 * noise(REGISTERS, WIDTH)}
    found["memory"] = noise(REGISTERS, WIDTH)
    found["pos"] = 0.5 * noise(PATCHES, WIDTH)

    def linear(name: str, inputs: int, outputs: int) -> None:
        found[f"{name}.weight"] = 1.2 * noise(outputs, inputs) / math.sqrt(inputs)
        found[f"{name}.bias"] = 0.3 * noise(outputs)

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 0.8 + 0.3 * noise(WIDTH), 0.3 * noise(WIDTH)

    linear("patch", 3 * PATCH**2, WIDTH)
    for layer in range(DEPTH):
        for name in ("norm1", "norm2"):
            norm(f"{layer}.{name}")
        for name in ("q", "k", "v", "out"):
            linear(f"{layer}.{name}", WIDTH, WIDTH)
        linear(f"{layer}.fc1", WIDTH, HIDDEN)
        linear(f"{layer}.gate", WIDTH, HIDDEN)
        linear(f"{layer}.fc2", HIDDEN, WIDTH)
        found[f"{layer}.temperature"] = 2 + noise(HEADS).abs()
        found[f"{layer}.factor1"], found[f"{layer}.factor2"] = noise(WIDTH), noise(WIDTH)
    norm("norm")
    linear("pool", WIDTH, 1)
    linear("head", WIDTH, CLASSES)
    linear("head2", 2 * WIDTH, CLASSES)
    linear("flat", PATCHES * WIDTH, CLASSES)
    return found


def images(batch: int = 2) -> Tensor:
    """Pictures of noise."""
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(100), dtype=torch.float64)


def rotation(tokens: int, prefix: int) -> Tensor:
    """By token and pair of channels, the angle by which q and k are turned; prefix tokens are not."""
    speed = 10.0 ** -(torch.arange(HEAD // 2, dtype=torch.float64) / (HEAD // 2))
    place = torch.arange(tokens, dtype=torch.float64).sub(prefix).clamp(min=0)
    return place[:, None] * speed


def distance_bias(tokens: int) -> Tensor:
    """-slope |i - j| for every head, (head, token, token)."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
    place = torch.arange(tokens, dtype=torch.float64)
    return -slopes[:, None, None] * (place[:, None] - place).abs()


class PlainViT(nn.Module):
    """A function, in one spelling.

    Attributes:
        stream: x_0 of the last run.
        matrices: A of every block of the last run, (batch, head, to, from).
    """

    def __init__(self, function: Function, given: Weights) -> None:
        super().__init__()
        self.function, self.given = function, {name: nn.Parameter(value) for name, value in given.items()}
        self.held = nn.ParameterList(self.given.values())
        self.stream, self.matrices = torch.zeros(0), list[Tensor]()

    def forward(self, pictures: Tensor) -> Tensor:
        function = self.function
        kernel = self.given["patch.weight"].view(WIDTH, 3, PATCH, PATCH)
        x = F.conv2d(pictures, kernel, self.given["patch.bias"], stride=PATCH).flatten(2).transpose(1, 2)
        if function.positions == "added":
            x = x + self.given["pos"]
        prefix = torch.cat([self.given["cls"], self.given["registers"]])[: function.prefix]
        if function.prefix:
            x = torch.cat([prefix.expand(len(x), -1, -1), x], dim=1)
        self.stream, self.matrices = x, []
        for layer in range(DEPTH):
            x = self._block(layer, x)
        return self._head(x if function.place == "post" else self._norm("norm", x))

    def _block(self, layer: int, x: Tensor) -> Tensor:
        first, second = (
            self.given[f"{layer}.{name}"] if self.function.factors else 1.0 for name in ("factor1", "factor2")
        )
        if self.function.place == "post":
            x = self._norm(f"{layer}.norm1", x + first * self._attend(layer, x))
            return self._norm(f"{layer}.norm2", x + second * self._feed(layer, x))
        x = x + first * self._attend(layer, self._norm(f"{layer}.norm1", x))
        return x + second * self._feed(layer, self._norm(f"{layer}.norm2", x))

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        function = self.function
        q, k, v = (
            self._linear(f"{layer}.{name}", x, rows=heads * HEAD).unflatten(-1, (heads, HEAD)).transpose(1, 2)
            for name, heads in (("q", HEADS), ("k", function.kv_heads), ("v", function.kv_heads))
        )
        k, v = (part.repeat_interleave(HEADS // function.kv_heads, dim=1) for part in (k, v))
        if function.attention == "memory":
            k, v = (torch.cat([self._memory(layer, name, len(x)), part], dim=2) for name, part in (("k", k), ("v", v)))
        if function.positions == "rotated":
            angle = rotation(x.shape[1], function.prefix)
            cos, sin = torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)
            q, k = (
                part * cos + torch.cat([-part[..., HEAD // 2 :], part[..., : HEAD // 2]], dim=-1) * sin
                for part in (q, k)
            )
        matrix = self._matrix(layer, q, k)
        self.matrices.append(matrix)
        return self._linear(f"{layer}.out", (matrix @ v).transpose(1, 2).flatten(2))

    def _memory(self, layer: int, name: str, batch: int) -> Tensor:
        learned = self._linear(f"{layer}.{name}", self.given["memory"]).unflatten(-1, (HEADS, HEAD))
        return learned.transpose(0, 1).expand(batch, -1, -1, -1)

    def _matrix(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        kind = self.function.attention
        if kind == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            return (q @ k.transpose(-2, -1) * self.given[f"{layer}.temperature"].view(-1, 1, 1)).softmax(dim=-1)
        if kind == "linear":
            products = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)
            return products / products.sum(dim=-1, keepdim=True)
        scores = q @ k.transpose(-2, -1) * SCALE
        if self.function.positions == "distance":
            scores = scores + distance_bias(q.shape[-2])
        if kind == "sigmoid":
            return torch.sigmoid(scores - math.log(q.shape[-2]))
        if kind == "sink":  # what no token gets goes nowhere: softmax with a score of 0 beside the tokens'
            return F.pad(scores, (0, 1)).softmax(dim=-1)[..., :-1]
        return scores.softmax(dim=-1)

    def _feed(self, layer: int, x: Tensor) -> Tensor:
        hidden = self._linear(f"{layer}.fc1", x)
        if self.function.feed == "swiglu":
            hidden = F.silu(self._linear(f"{layer}.gate", x)) * hidden
        else:
            hidden = F.gelu(hidden) if self.function.feed == "gelu" else F.relu(hidden).square()
        return self._linear(f"{layer}.fc2", hidden)

    def _head(self, x: Tensor) -> Tensor:
        function, patches = self.function, x[:, self.function.prefix :]
        if function.pooling == "flat":
            return self._linear("flat", patches.flatten(1))
        if function.pooling == "both":
            return self._linear("head2", torch.cat([x[:, 0], patches.mean(dim=1)], dim=-1))
        if function.pooling == "weighed":
            share = self._linear("pool", x).softmax(dim=1)
            return self._linear("head", (share * x).sum(dim=1))
        pooled = {"first": x[:, 0], "mean": x.mean(dim=1), "patches": patches.mean(dim=1)}[function.pooling]
        return self._linear("head", pooled)

    def _linear(self, name: str, x: Tensor, rows: int | None = None) -> Tensor:
        return F.linear(x, self.given[f"{name}.weight"][:rows], self.given[f"{name}.bias"][:rows])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.given[f"{name}.weight"], self.given[f"{name}.bias"]
        if self.function.norm == "rms":
            return F.rms_norm(x, (WIDTH,), weight, 1e-6)
        return F.layer_norm(x, (WIDTH,), weight, bias, 1e-5)
