"""GradToken (Cheng et al., Neural Networks 2025), equations 6 to 18, with dy/dq from autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from literal.forward import Run, gradients, mean, positive


def gradtoken(
    record: Run,
    target: int,
    *,
    propagation: str = "average_matrix",
    heads: str = "relu_average",
    depth: int | None = None,
) -> Tensor:
    """M_h = k_h . dy/dq_cls of the last block, propagated through the blocks below, heads integrated."""
    grads = gradients(record.logits[target], record.query[-1])
    maps = []
    for key, gradient in zip(record.key[-1], grads, strict=True):
        values = [key[token] @ gradient[0] for token in range(record.prefix, len(key))]
        maps.append(propagate(record, torch.stack(values), propagation, depth))
    return mean([positive(values) for values in maps]) if heads == "relu_average" else mean(maps)


def propagate(record: Run, values: Tensor, propagation: str, depth: int | None) -> Tensor:
    """Variants 0 to 4; ``depth`` blocks below the last one take part."""
    last = record.depth - 1
    blocks = list(range(0 if depth is None else last - depth, last))
    patches = slice(record.prefix, None)
    if propagation == "none" or not blocks:
        return values
    if propagation.startswith("average"):
        average = sum(mean(record.attention[block]) for block in blocks) / (len(blocks) + 1)
        if propagation == "average_elementwise":
            return average[0, patches] * values
        return average[patches, patches] @ values
    product = torch.eye(len(record.tokens[0]), dtype=torch.float64)
    order = reversed(blocks) if propagation == "rollout_elementwise" else blocks
    for block in order:  # elementwise: from the top, A_{B-1} ... A_1; matrix: from the bottom, A_1 ... A_{B-1}
        product = product @ (torch.eye(len(product), dtype=torch.float64) + mean(record.attention[block]))
    if propagation == "rollout_elementwise":
        return product[0, patches] * values
    return product[patches, patches] @ values
