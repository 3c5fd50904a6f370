"""AttIN, GlobEnc and ALTI with every vector that token j contributes to token i written out: (n, n, d)."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from literal.forward import Run, deviation, mean, normalise, scaled


def attention_parts(model: VisionTransformer, record: Run, block: int, *, biases: bool) -> list[Tensor]:
    """A_hij v_hj W_O^h per head, (n, n, d); the output projection's bias belongs to no token."""
    module = model.blocks[block]
    tokens, width = record.tokens[block], module.attn.head_dim
    normed = normalise(module.norm1, tokens)
    if not biases:
        normed = normed - module.norm1.bias
    parts = []
    for head, matrix in enumerate(record.attention[block]):
        start = 2 * tokens.shape[1] + head * width
        value = normed @ module.attn.qkv.weight[start : start + width].T
        if biases:
            value = value + module.attn.qkv.bias[start : start + width]
        carried = scaled(module.ls1, value @ module.attn.proj.weight[:, head * width : (head + 1) * width].T)
        parts.append(matrix[:, :, None] * carried[None])
    return parts


def stream_parts(model: VisionTransformer, record: Run, block: int, *, biases: bool) -> Tensor:
    """y_ij: what attention and residual connection bring from token j to token i."""
    tokens = record.tokens[block]
    parts = sum(attention_parts(model, record, block, biases=biases))
    return parts + torch.eye(len(tokens), dtype=tokens.dtype)[:, :, None] * tokens[None]


def norm_of_parts(module: nn.LayerNorm, parts: Tensor, whole: Tensor) -> Tensor:
    """LayerNorm of each part with the deviation of the whole token i, without its bias."""
    centred = parts - parts.mean(dim=-1, keepdim=True)
    return centred / deviation(module, whole)[:, None] * module.weight


def encoder_parts(model: VisionTransformer, record: Run, block: int) -> Tensor:
    """y + LN2(y) without biases."""
    parts = stream_parts(model, record, block, biases=False)
    return parts + norm_of_parts(model.blocks[block].norm2, parts, record.middle[block])


def attin(model: VisionTransformer, record: Run, block: int, heads: str = "together") -> Tensor:
    parts = attention_parts(model, record, block, biases=True)
    return sum(parts).norm(dim=-1) if heads == "together" else mean([part.norm(dim=-1) for part in parts])


def attin_residual(model: VisionTransformer, record: Run, block: int, norm: str = "none") -> Tensor:
    parts = stream_parts(model, record, block, biases=True)
    if norm == "following":
        parts = norm_of_parts(model.blocks[block].norm2, parts, record.middle[block])
    return parts.norm(dim=-1)


def globenc(model: VisionTransformer, record: Run, block: int) -> Tensor:
    return encoder_parts(model, record, block).norm(dim=-1)


def alti(model: VisionTransformer, record: Run, block: int, setting: str = "skipplus", zero: str = "length") -> Tensor:
    """(||y_i||_1 - ||T_i(x_j) - y_i||_1)^+ with rows that sum to 1."""
    if setting == "skipplus":
        parts, whole = encoder_parts(model, record, block), record.middle[block] + record.feed_forward[block]
        distances = (parts - whole[:, None]).abs().sum(dim=-1)
    else:
        parts, whole = stream_parts(model, record, block, biases=True), record.middle[block]
        distances = (parts - whole[:, None] + 1e-6).abs().sum(dim=-1)
    none = whole.abs().sum(dim=-1) if zero == "length" else distances.amax(dim=-1)
    nearness = (none[:, None] - distances).clamp(min=0)
    return nearness / nearness.sum(dim=-1, keepdim=True)
