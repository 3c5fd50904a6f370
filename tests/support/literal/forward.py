"""A Vision Transformer written out step by step for one image, with every intermediate result in the autograd graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


@dataclass
class Run:
    """One forward pass. Lists have one entry per block; ``heads`` entries of q, k, v, A are separate tensors."""

    prefix: int
    tokens: list[Tensor] = field(default_factory=list)  # x_l, (n, d), before the first norm
    query: list[list[Tensor]] = field(default_factory=list)  # per head (n, d_h), before scaling
    key: list[list[Tensor]] = field(default_factory=list)
    value: list[list[Tensor]] = field(default_factory=list)
    attention: list[list[Tensor]] = field(default_factory=list)  # per head (n, n), after the softmax
    middle: list[Tensor] = field(default_factory=list)  # (n, d), after the attention part is added
    hidden: list[Tensor] = field(default_factory=list)  # (n, 4d), before GELU
    feed_forward: list[Tensor] = field(default_factory=list)  # (n, d), what the feed-forward part adds
    last: Tensor | None = None  # (n, d), the last block's output
    logits: Tensor | None = None  # (classes,)

    @property
    def depth(self) -> int:
        return len(self.tokens)


def run(model: VisionTransformer, image: Tensor, last_attention: float | None = None) -> Run:
    """Run a timm ViT with a class token on one image (3, height, width).

    ``last_attention`` times the last block's attention, as a constant, takes the place of that attention.
    """
    record = Run(prefix=model.num_prefix_tokens)
    stream = embed(model, image).detach().requires_grad_()
    for block in model.blocks:
        record.tokens.append(stream)
        factor = last_attention if block is model.blocks[-1] else None
        stream = stream + scaled(block.ls1, attend(block.attn, normalise(block.norm1, stream), record, factor))
        record.middle.append(stream)
        hidden = linear(block.mlp.fc1, normalise(block.norm2, stream))
        record.hidden.append(hidden)
        record.feed_forward.append(scaled(block.ls2, linear(block.mlp.fc2, gelu(hidden))))
        stream = stream + record.feed_forward[-1]
    record.last = stream
    record.logits = head(model, stream)
    return record


def head(model: VisionTransformer, stream: Tensor) -> Tensor:
    """The logits of tokens (n, d) behind a block."""
    return linear(model.head, normalise(model.norm, stream)[0])


def embed(model: VisionTransformer, image: Tensor) -> Tensor:
    """x_0: class token, registers and patches, with positions."""
    convolution = model.patch_embed.proj
    size = convolution.kernel_size[0]
    patches = []
    for top in range(0, image.shape[1], size):
        for left in range(0, image.shape[2], size):
            patch = image[:, top : top + size, left : left + size]
            patches.append(convolution.weight.flatten(1) @ patch.flatten() + convolution.bias)
    tokens = torch.stack(patches)
    prefix = [model.cls_token[0]] + ([model.reg_token[0]] if model.reg_token is not None else [])
    if model.no_embed_class:
        return torch.cat([*prefix, tokens + model.pos_embed[0]])
    return torch.cat([*prefix, tokens]) + model.pos_embed[0]


def attend(module: nn.Module, tokens: Tensor, record: Run, factor: float | None = None) -> Tensor:
    """Multi-head attention, head after head."""
    width = tokens.shape[1] // module.num_heads
    stacked = tokens @ module.qkv.weight.T + module.qkv.bias
    queries, keys, values, matrices, outputs = [], [], [], [], []
    for head in range(module.num_heads):
        columns = [part * tokens.shape[1] + head * width for part in range(3)]
        query, key, value = (stacked[:, column : column + width] for column in columns)
        matrix = softmax_rows(query @ key.T / math.sqrt(width))
        if factor is not None:
            matrix = (factor * matrix).detach().requires_grad_()
        for kept, part in zip((queries, keys, values, matrices), (query, key, value, matrix), strict=True):
            kept.append(part)
        outputs.append(matrix @ value)
    record.query.append(queries)
    record.key.append(keys)
    record.value.append(values)
    record.attention.append(matrices)
    return linear(module.proj, torch.cat(outputs, dim=1))


def softmax_rows(scores: Tensor) -> Tensor:
    powers = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    return powers / powers.sum(dim=1, keepdim=True)


def normalise(module: nn.LayerNorm, tokens: Tensor) -> Tensor:
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    return centred / deviation(module, tokens) * module.weight + module.bias


def deviation(module: nn.LayerNorm, tokens: Tensor) -> Tensor:
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    return torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + module.eps)


def linear(module: nn.Linear, tokens: Tensor) -> Tensor:
    return tokens @ module.weight.T + module.bias


def gelu(values: Tensor) -> Tensor:
    return values * 0.5 * (1 + torch.erf(values / math.sqrt(2)))


def scaled(module: nn.Module, tokens: Tensor) -> Tensor:
    return tokens if isinstance(module, nn.Identity) else tokens * module.gamma


def gradients(objective: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """d objective / d part, each; parts that have no influence get zeros."""
    found = torch.autograd.grad(objective, parts, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(part) if grad is None else grad for part, grad in zip(parts, found, strict=True)]


def attention_gradients(record: Run, objective: Tensor) -> list[list[Tensor]]:
    """d objective / dA, per block and head."""
    heads = len(record.attention[0])
    flat = gradients(objective, [matrix for block in record.attention for matrix in block])
    return [flat[block * heads : (block + 1) * heads] for block in range(record.depth)]


def positive(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, torch.zeros_like(values))


def mean(parts: list[Tensor]) -> Tensor:
    return sum(parts) / len(parts)
