"""Methods that read or integrate the gradient at the attention, with matrices between all tokens written out."""

from __future__ import annotations

import math

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from literal.forward import Run, attention_gradients, embed, gradients, head, mean, positive, run, scaled


def agcam(model: VisionTransformer, image: Tensor, target: int) -> Tensor:
    """Σ over blocks and heads of (dy/dA)^+ sigmoid(q kᵀ / sqrt d): the class token's row.

    dy/dA is taken in a run in which what enters the attention is a constant: then it is the gradient by the residual
    stream and the feed-forward parts alone.
    """
    stream = run(model, image).tokens[0].detach().requires_grad_()
    matrices, sigmoids = [], []
    for block in model.blocks:
        count = block.attn.num_heads
        parts = block.attn.qkv(block.norm1(stream).detach()).chunk(3, dim=1)
        query, key, value = (part.unflatten(1, (count, -1)).transpose(0, 1) for part in parts)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        matrix = torch.softmax(scores, dim=-1).detach().requires_grad_()
        matrices.append(matrix)
        sigmoids.append(1 / (1 + torch.exp(-scores)))
        stream = stream + scaled(block.ls1, block.attn.proj((matrix @ value).transpose(0, 1).flatten(1)))
        stream = stream + scaled(block.ls2, block.mlp(block.norm2(stream)))
    found = gradients(head(model, stream)[target], matrices)
    rows = [(positive(slope) * sigmoid).sum(dim=0)[0] for slope, sigmoid in zip(found, sigmoids, strict=True)]
    return sum(rows)[model.num_prefix_tokens :]


def legrad(model: VisionTransformer, record: Run, target: int) -> Tensor:
    """Σ over blocks l of the mean over heads and rows of (d head(x_{l+1})_c / dA_l)^+."""
    total = 0
    for block, matrices in enumerate(record.attention):
        after = record.tokens[block + 1] if block + 1 < record.depth else record.last
        slopes = gradients(head(model, after)[target], matrices)
        total = total + mean([positive(slope).mean(dim=0) for slope in slopes])
    return total[record.prefix :]


def legrad_of_means(model: VisionTransformer, record: Run, target: int) -> Tensor:
    """The same with the mean of all tokens behind a block in the place of each of them."""
    total = 0
    for block, matrices in enumerate(record.attention):
        after = record.tokens[block + 1] if block + 1 < record.depth else record.last
        mean_token = after.mean(dim=0, keepdim=True).expand_as(after)
        slopes = gradients(head(model, mean_token)[target], matrices)
        total = total + mean([positive(slope).mean(dim=0) for slope in slopes])
    return total[record.prefix :]


def grad_eclip(model: VisionTransformer, image: Tensor, target: int, blocks: list[int]) -> Tensor:
    """Σ over blocks of (λ_i Σ_c w_c v_ic)^+; w_c = dy/do_cls, λ = cos(q_cls, k_i) from 0 to 1 over the patches.

    o, q, k and v have the channels of all heads. A block's o_cls is a leaf of its own graph: written out here by adding
    a zero to it, whose gradient is that at o.
    """
    prefix, stream = model.num_prefix_tokens, embed(model, image)
    kept = []
    for block in model.blocks:
        inner = block.norm1(stream)
        query, key, value = block.attn.qkv(inner).chunk(3, dim=-1)
        heads, width = block.attn.num_heads, value.shape[-1] // block.attn.num_heads
        outputs = []
        for start in range(0, heads * width, width):
            q, k, v = (part[:, start : start + width] for part in (query, key, value))
            outputs.append(torch.softmax(q @ k.T / math.sqrt(width), dim=-1) @ v)
        zero = torch.zeros_like(value).requires_grad_()
        stream = stream + scaled(block.ls1, block.attn.proj(torch.cat(outputs, dim=-1) + zero))
        stream = stream + scaled(block.ls2, block.mlp(block.norm2(stream)))
        kept.append((zero, query[0], key[prefix:], value[prefix:]))
    slopes = gradients(head(model, stream)[target], [zero for zero, *_ in kept])
    total = 0
    for number in blocks:
        _, query, key, value = kept[number]
        cosine = (key @ query) / (key.norm(dim=1) * query.norm())
        spatial = (cosine - cosine.min()) / (cosine.max() - cosine.min())
        total = total + positive(spatial * (value @ slopes[number][0]))
    return total.detach()


def gradient_rollout(model: VisionTransformer, image: Tensor, target: int, pictures: list[float]) -> Tensor:
    """IIA with all ``pictures`` as scales of the image; DIX with the image alone."""
    sums = None
    factors = [step / 5 for step in range(6)]
    for picture in pictures:
        for factor in factors:
            record = run(model, picture * image, factor)
            slopes = attention_gradients(record, record.logits[target])
            here = [
                mean([positive(A * dA) for A, dA in zip(*heads, strict=True)])
                for heads in zip(record.attention, slopes, strict=True)
            ]
            sums = here if sums is None else [a + b for a, b in zip(sums, here, strict=True)]
    product = torch.eye(len(sums[0]), dtype=torch.float64)
    for matrix in sums:
        augmented = matrix / (len(pictures) * len(factors)) + torch.eye(len(matrix), dtype=torch.float64)
        product = (augmented / augmented.sum(dim=1, keepdim=True)) @ product
    return product[0, model.num_prefix_tokens :]


def integrated_gradient(model: VisionTransformer, image: Tensor, target: int, steps: int) -> Tensor:
    """mean_h of (the mean of dy/dA of the last block over a x)^+, all rows."""
    total = None
    for step in range(steps):
        record = run(model, step / (steps - 1) * image)
        slopes = gradients(record.logits[target], record.attention[-1])
        total = slopes if total is None else [a + b for a, b in zip(total, slopes, strict=True)]
    return mean([positive(slope / steps) for slope in total])


def transition_attention_maps(model: VisionTransformer, image: Tensor, target: int, start: int, steps: int) -> Tensor:
    """s = A_L; s <- s A + s downwards; times the integrated gradient."""
    record = run(model, image)
    state = mean(record.attention[-1])[0]
    for block in reversed(range(start, record.depth - 1)):
        state = state @ mean(record.attention[block]) + state
    return (state * integrated_gradient(model, image, target, steps)[0])[record.prefix :]


def beyond_intuition_token(model: VisionTransformer, image: Tensor, target: int, start: int, steps: int) -> Tensor:
    """R <- R + mean_h A diag(||v W_O|| / ||x||) R."""
    record = run(model, image)
    product = torch.eye(len(record.tokens[0]), dtype=torch.float64)
    for block in range(start, record.depth):
        moved = torch.cat(record.value[block], dim=1) @ model.blocks[block].attn.proj.weight.T
        ratio = scaled(model.blocks[block].ls1, moved).norm(dim=1) / record.tokens[block].norm(dim=1)
        product = product + mean(record.attention[block]) @ torch.diag(ratio) @ product
    return (product.abs() * integrated_gradient(model, image, target, steps))[0, record.prefix :]


def beyond_intuition_head(model: VisionTransformer, image: Tensor, target: int, start: int, steps: int) -> Tensor:
    """R <- R + Σ_h I_h A_h R with I_h the share of mean |A_hᵀ dA_h|."""
    record = run(model, image)
    slopes = attention_gradients(record, record.logits[target])
    product = torch.eye(len(record.tokens[0]), dtype=torch.float64)
    for block in range(start, record.depth):
        sizes = [(A.T @ dA).abs().mean() for A, dA in zip(record.attention[block], slopes[block], strict=True)]
        weighed = sum(size / sum(sizes) * A for size, A in zip(sizes, record.attention[block], strict=True))
        product = product + weighed @ product
    return (product * integrated_gradient(model, image, target, steps))[0, record.prefix :]
