"""Layer-wise relevance propagation written out rule after rule for one image: Chefer et al.'s rules and absLRP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from literal.forward import Run, attention_gradients, gelu, linear, mean, normalise, positive, run, scaled

SMALL = 1e-9


@dataclass
class Relevance:
    attention: list[list[Tensor]]  # per block and head (n, n)
    tokens: list[Tensor]  # at the block inputs, (n, d)
    pixels: Tensor  # (3, height, width)


def divide(relevance: Tensor, output: Tensor) -> Tensor:
    """The program's safe_divide: R/(Z + 1e-9), 0 where Z is 0."""
    denominator = output + SMALL
    denominator = torch.where(denominator == 0, torch.full_like(denominator, SMALL), denominator)
    return torch.where(output == 0, torch.zeros_like(denominator), relevance / denominator)


def through_linear(module: nn.Linear, tokens: Tensor, relevance: Tensor, *, ours: bool) -> Tensor:
    """alpha = 1: excitatory parts only, together ("ours") or each with its own denominator ("orig")."""
    weight = module.weight
    plus, minus = weight.clamp(min=0), weight.clamp(max=0)
    first, second = tokens.clamp(min=0), tokens.clamp(max=0)
    outputs = [first @ plus.T, second @ minus.T]
    if ours:
        outputs = [outputs[0] + outputs[1]] * 2
    return first * (divide(relevance, outputs[0]) @ plus) + second * (divide(relevance, outputs[1]) @ minus)


def through_sum(left: Tensor, right: Tensor, relevance: Tensor, *, ours: bool) -> tuple[Tensor, Tensor]:
    ratio = divide(relevance, left + right)
    shares = left * ratio, right * ratio
    if not ours:
        return shares
    sums = shares[0].sum(), shares[1].sum()
    size = sums[0].abs() + sums[1].abs()
    wanted = [divide(total.abs(), size) * relevance.sum() for total in sums]
    return shares[0] * divide(wanted[0], sums[0]), shares[1] * divide(wanted[1], sums[1])


def joined(stream: Tensor, *parts: Tensor) -> Tensor:
    """Where a stream forks, its uses' relevances add up; the program divides by the stream and multiplies again."""
    return stream * sum(divide(part, stream) for part in parts)


@torch.no_grad()
def propagate(model: VisionTransformer, image: Tensor, target: int, *, ours: bool) -> Relevance:
    record = run_detached(model, image)
    last = normalise(model.norm, record.last)
    start = torch.zeros(len(record.logits), dtype=torch.float64)
    start[target] = 1
    relevance = torch.zeros_like(last)
    relevance[0] = joined(last[0], through_linear(model.head, last[0], start, ours=ours))
    found = Relevance([], [], torch.empty(0))
    for layer in reversed(range(record.depth)):
        block, tokens, middle = model.blocks[layer], record.tokens[layer], record.middle[layer]
        past, branch = through_sum(middle, record.feed_forward[layer], relevance, ours=ours)
        branch = through_linear(block.mlp.fc2, gelu(record.hidden[layer]), branch, ours=ours)
        branch = through_linear(block.mlp.fc1, normalise(block.norm2, middle), branch, ours=ours)
        relevance = joined(middle, past, branch)
        output = torch.cat([a @ v for a, v in zip(record.attention[layer], record.value[layer], strict=True)], dim=1)
        added = scaled(block.ls1, linear(block.attn.proj, output))
        past, branch = through_sum(tokens, added, relevance, ours=ours)
        branch = through_linear(block.attn.proj, output, branch, ours=ours)
        heads = zip(
            *(branch.chunk(block.attn.num_heads, dim=1), record.query[layer], record.key[layer]),
            *(record.value[layer], record.attention[layer]),
            strict=True,
        )
        parts: list[list[Tensor]] = [[], [], []]
        matrices = []
        for arriving, query, key, value, matrix in heads:
            ratio = divide(arriving, matrix @ value)
            matrices.append(matrix * (ratio @ value.T) / 2)
            parts[2].append(value * (matrix.T @ ratio) / 2)
            ratio = divide(matrices[-1], query @ key.T)
            parts[0].append(query * (ratio @ key) / 2)
            parts[1].append(key * (ratio.T @ query) / 2)
        stacked = torch.cat([torch.cat(part, dim=1) for part in parts], dim=1)
        branch = through_linear(block.attn.qkv, normalise(block.norm1, tokens), stacked, ours=ours)
        found.attention.insert(0, matrices)
        found.tokens.insert(0, past + branch)
        relevance = joined(tokens, past, branch)
    found.pixels = to_pixels(model, image, before_positions(model, image, relevance, ours=ours))
    return found


def run_detached(model: VisionTransformer, image: Tensor) -> Run:
    with torch.enable_grad():
        return run(model, image)


def before_positions(model: VisionTransformer, image: Tensor, relevance: Tensor, *, ours: bool) -> Tensor:
    """What of the first block's input belongs to the patches, (patches, d)."""
    patches = embedded_patches(model, image)
    prefix = model.num_prefix_tokens
    if model.no_embed_class:
        return through_sum(patches, model.pos_embed[0], relevance[prefix:], ours=ours)[0]
    return through_sum(all_tokens(model, patches), model.pos_embed[0], relevance, ours=ours)[0][prefix:]


def all_tokens(model: VisionTransformer, patches: Tensor) -> Tensor:
    return torch.cat([model.cls_token[0], *([] if model.reg_token is None else [model.reg_token[0]]), patches])


def embedded_patches(model: VisionTransformer, image: Tensor) -> Tensor:
    weight = model.patch_embed.proj.weight.flatten(1)
    return torch.stack([weight @ patch.flatten() + model.patch_embed.proj.bias for patch in cut(model, image)])


def cut(model: VisionTransformer, image: Tensor) -> list[Tensor]:
    """The patches as views of the picture, row after row."""
    size = model.patch_embed.proj.kernel_size[0]
    corners = [(top, left) for top in range(0, image.shape[1], size) for left in range(0, image.shape[2], size)]
    return [image[:, top : top + size, left : left + size] for top, left in corners]


def to_pixels(model: VisionTransformer, image: Tensor, relevance: Tensor) -> Tensor:
    """The z^B rule with the picture's own smallest and largest value."""
    weight = model.patch_embed.proj.weight
    plus, minus = weight.clamp(min=0), weight.clamp(max=0)
    low, high = image.min(), image.max()
    result = torch.zeros_like(image)
    for into, patch, arriving in zip(cut(model, result), cut(model, image), relevance, strict=True):
        parts = weight * patch - plus * low - minus * high  # (d, 3, size, size)
        ratio = arriving / (parts.sum(dim=(1, 2, 3)) + SMALL)
        into.copy_((parts * ratio[:, None, None, None]).sum(dim=0))
    return result


def transattr(model: VisionTransformer, image: Tensor, target: int, start: int = 0) -> Tensor:
    record = run(model, image)
    grads = attention_gradients(record, record.logits[target])
    relevance = propagate(model, image, target, ours=True).attention
    product = torch.eye(len(record.tokens[0]), dtype=torch.float64)
    for block in range(start, record.depth):
        pairs = zip(grads[block], relevance[block], strict=True)
        product = product + mean([positive(gradient * part) for gradient, part in pairs]) @ product
    return product[0, record.prefix :]


def plrp(model: VisionTransformer, image: Tensor, target: int, *, ours: bool = False) -> Tensor:
    matrices = propagate(model, image, target, ours=ours).attention[-1]
    return mean([positive(matrix) for matrix in matrices])[0, model.num_prefix_tokens :]


def lrp(model: VisionTransformer, image: Tensor, target: int, *, ours: bool = False) -> Tensor:
    return propagate(model, image, target, ours=ours).pixels.sum(dim=0).flatten()
