"""Methods that read attention: rollout, AttCAM, GAE, GradSAM; and AttCAT, which weighs tokens by it."""

from __future__ import annotations

import torch
from torch import Tensor

from literal.forward import Run, attention_gradients, gradients, mean, positive


def rollout(record: Run, start: int = 0) -> Tensor:
    """Rows of mean_h A + I normalised to sum 1; their product from block ``start`` up."""
    tokens = len(record.tokens[0])
    product = torch.eye(tokens, dtype=torch.float64)
    for block in range(start, record.depth):
        matrix = mean(record.attention[block]) + torch.eye(tokens, dtype=torch.float64)
        product = matrix / matrix.sum(dim=1, keepdim=True) @ product
    return product[0, record.prefix :]


def raw_attention(record: Run) -> Tensor:
    return mean(record.attention[-1])[0, record.prefix :]


def attcam(record: Run, target: int) -> Tensor:
    """Last block, class token's row: heads weighed by their mean gradient over the patches, then clamped at 0."""
    grads = attention_gradients(record, record.logits[target])[-1]
    weighed = []
    for matrix, gradient in zip(record.attention[-1], grads, strict=True):
        weighed.append(gradient[0, record.prefix :].mean() * matrix[0, record.prefix :])
    return positive(mean(weighed))


def gradient_attention(record: Run, target: int) -> list[Tensor]:
    """mean_h (dy/dA * A)^+ of every block, (n, n) each."""
    grads = attention_gradients(record, record.logits[target])
    return [
        mean([positive(gradient * matrix) for gradient, matrix in zip(*pair, strict=True)])
        for pair in zip(grads, record.attention, strict=True)
    ]


def gae(record: Run, target: int) -> Tensor:
    """R = I; R += mean_h[(dy/dA * A)^+] R for every block."""
    relevance = torch.eye(len(record.tokens[0]), dtype=torch.float64)
    for matrix in gradient_attention(record, target):
        relevance = relevance + matrix @ relevance
    return relevance[0, record.prefix :]


def gradsam(record: Run, target: int) -> Tensor:
    return sum(gradient_attention(record, target))[0, record.prefix :]


def attcat(record: Run, target: int) -> Tensor:
    """Sum over blocks of (Σ_channels x_l * dy/dx_l) * (mean over heads and rows of A_l)."""
    grads = gradients(record.logits[target], record.tokens)
    total = torch.zeros(len(record.tokens[0]), dtype=torch.float64)
    for tokens, gradient, matrices in zip(record.tokens, grads, record.attention, strict=True):
        total = total + (tokens * gradient).sum(dim=1) * mean(matrices).mean(dim=0)
    return total[record.prefix :]
