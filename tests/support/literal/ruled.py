"""A Vision Transformer written out for one image so that ordinary autograd gives a rule's gradient.

What a rule holds constant is detached; where it halves the gradient of a product, half of the product is detached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from literal.forward import deviation, embed, gelu, linear, mean, positive, scaled, softmax_rows

CONSTANT_ATTENTION = {"frozen", "libra", "conservative"}
CONSTANT_DEVIATION = {"frozen", "libra", "attnlrp", "conservative"}
CONSTANT_GATE = {"frozen", "libra", "attnlrp"}


@dataclass
class RuledRun:
    """One forward pass; lists have one entry per block, A, v and O one row of tensors per head."""

    rule: str
    tokens: list[Tensor] = field(default_factory=list)
    attention: list[list[Tensor]] = field(default_factory=list)
    value: list[list[Tensor]] = field(default_factory=list)
    output: list[list[Tensor]] = field(default_factory=list)
    logits: Tensor | None = None

    def input_times_gradient(self, layer: int, target: int) -> Tensor:
        """Scores of all tokens at a block's input."""
        (slope,) = torch.autograd.grad(self.logits[target], self.tokens[layer], retain_graph=True)
        return (self.tokens[layer] * slope).sum(dim=-1)

    def attention_times_gradient(self, layer: int, target: int) -> Tensor:
        """mean_h (A * (dO) vᵀ)^+, the class token's row."""
        slopes = torch.autograd.grad(self.logits[target], self.output[layer], retain_graph=True)
        parts = zip(slopes, self.value[layer], self.attention[layer], strict=True)
        return mean([positive(slope @ value.T * matrix) for slope, value, matrix in parts])[0]


def run_under(rule: str, model: VisionTransformer, image: Tensor) -> RuledRun:
    """Run a timm ViT with a class token on one image (3, height, width)."""
    record = RuledRun(rule)
    stream = embed(model, image).detach().requires_grad_()
    for block in model.blocks:
        record.tokens.append(stream)
        stream = stream + scaled(block.ls1, attend(block.attn, normalise(record, block.norm1, stream), record))
        hidden = linear(block.mlp.fc1, normalise(record, block.norm2, stream))
        active = hidden * (gelu(hidden) / hidden).detach() if rule in CONSTANT_GATE else gelu(hidden)
        stream = stream + scaled(block.ls2, linear(block.mlp.fc2, active))
    record.logits = linear(model.head, normalise(record, model.norm, stream)[0])
    return record


def attend(module: nn.Module, tokens: Tensor, record: RuledRun) -> Tensor:
    width = tokens.shape[1] // module.num_heads
    stacked = linear(module.qkv, tokens)
    matrices, values, outputs = [], [], []
    for head in range(module.num_heads):
        columns = [part * tokens.shape[1] + head * width for part in range(3)]
        query, key, value = (stacked[:, column : column + width] for column in columns)
        scores = query @ key.T / math.sqrt(width)
        matrix = softmax_rows(halved(scores) if record.rule == "attnlrp" else scores)
        output = (matrix.detach() if record.rule in CONSTANT_ATTENTION else matrix) @ value
        if record.rule == "attnlrp":
            output = halved(output)
        if record.rule == "residual":
            output = output.detach().requires_grad_()
        for kept, part in zip((matrices, values, outputs), (matrix, value, output), strict=True):
            kept.append(part)
    record.attention.append(matrices)
    record.value.append(values)
    record.output.append(outputs)
    return linear(module.proj, torch.cat(outputs, dim=1))


def halved(product: Tensor) -> Tensor:
    return product / 2 + (product / 2).detach()


def normalise(record: RuledRun, module: nn.LayerNorm, tokens: Tensor) -> Tensor:
    divisor = deviation(module, tokens)
    divisor = divisor.detach() if record.rule in CONSTANT_DEVIATION else divisor
    return (tokens - tokens.mean(dim=-1, keepdim=True)) / divisor * module.weight + module.bias
