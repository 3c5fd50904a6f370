"""DecompX in its forward form: every token is carried as a sum of parts, one per start token and one for the biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from literal.forward import Run, deviation, gelu


@dataclass
class Parts:
    """``tokens[i, j]`` is what start token j put into token i, (n, n, d); ``bias[i]`` what biases put there, (n, d).

    Where biases are ``shared``, every start token gets the n-th part of each as it is added, and ``bias`` stays 0.
    """

    tokens: Tensor
    bias: Tensor
    shared: bool = False

    def whole(self) -> Tensor:
        return self.tokens.sum(dim=1) + self.bias

    def plus(self, other: Parts) -> Parts:
        return Parts(self.tokens + other.tokens, self.bias + other.bias, self.shared)

    def biased(self, bias: Tensor) -> Parts:
        if self.shared:
            return Parts(self.tokens + bias / self.tokens.shape[1], self.bias, shared=True)
        return Parts(self.tokens, self.bias + bias)


def decompx(model: VisionTransformer, record: Run, start: int, *, shared: bool = False) -> tuple[Tensor, Tensor]:
    """What each token of x_start and all biases behind it contribute to every logit: (n, classes), (classes,)."""
    count, width = record.tokens[start].shape
    parts = Parts(
        torch.zeros(count, count, width, dtype=torch.float64), torch.zeros(count, width, dtype=torch.float64), shared
    )
    for token in range(count):
        parts.tokens[token, token] = record.tokens[start][token]
    for layer in range(start, record.depth):
        block = model.blocks[layer]
        attended = attention(block.attn, normalise(block.norm1, parts, record.tokens[layer]), record.attention[layer])
        parts = parts.plus(scaled(block.ls1, attended))
        hidden = linear(block.mlp.fc1, normalise(block.norm2, parts, record.middle[layer]))
        hidden_values = record.hidden[layer]
        gate = torch.where(hidden_values == 0, 0.5, gelu(hidden_values) / hidden_values)
        gated = Parts(hidden.tokens * gate[:, None], hidden.bias * gate, shared)
        parts = parts.plus(scaled(block.ls2, linear(block.mlp.fc2, gated)))
    logits = linear(model.head, normalise(model.norm, parts, record.last))
    return logits.tokens[0], logits.bias[0]


def normalise(module: nn.LayerNorm, parts: Parts, real: Tensor) -> Parts:
    """Each part loses its own mean and is divided by the real token's deviation; beta is a bias."""
    deviations = deviation(module, real)
    tokens = (parts.tokens - parts.tokens.mean(dim=-1, keepdim=True)) / deviations[:, None] * module.weight
    bias = (parts.bias - parts.bias.mean(dim=-1, keepdim=True)) / deviations * module.weight
    return Parts(tokens, bias, parts.shared).biased(module.bias)


def linear(module: nn.Linear, parts: Parts) -> Parts:
    return Parts(parts.tokens @ module.weight.T, parts.bias @ module.weight.T, parts.shared).biased(module.bias)


def scaled(module: nn.Module, parts: Parts) -> Parts:
    if isinstance(module, nn.Identity):
        return parts
    return Parts(parts.tokens * module.gamma, parts.bias * module.gamma, parts.shared)


def attention(module: nn.Module, parts: Parts, matrices: list[Tensor]) -> Parts:
    """Values are mixed by the attention matrices as they are; then the output projection."""
    width = parts.bias.shape[1]
    size = width // len(matrices)
    tokens, biases = [], []
    for head, matrix in enumerate(matrices):
        rows = slice(2 * width + head * size, 2 * width + (head + 1) * size)
        weight, bias = module.qkv.weight[rows], module.qkv.bias[rows]
        values = Parts(parts.tokens @ weight.T, parts.bias @ weight.T, parts.shared).biased(bias)
        mixed = torch.zeros_like(values.tokens)
        for to in range(len(mixed)):
            for origin in range(len(mixed)):
                mixed[to] = mixed[to] + matrix[to, origin] * values.tokens[origin]
        tokens.append(mixed)
        biases.append(matrix @ values.bias)
    return linear(module.proj, Parts(torch.cat(tokens, dim=-1), torch.cat(biases, dim=-1), parts.shared))
