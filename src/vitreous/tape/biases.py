"""Biases: which tokens their contributions belong to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitreous.errors import UnsupportedModelError
from vitreous.tape.layout import Layout


def bias_scores(contributions: Iterable[Tensor], layout: Layout, batch: int) -> Tensor:
    """The sum of bias x gradient, already summed over channels, by token: (batch, tokens).

    A bias belongs to the token that it was added to. What comes behind the pooling belongs to the tokens that the head
    reads, in equal parts: to the class token, where there is one.
    """
    read = torch.zeros(layout.tokens, dtype=torch.float64)
    read[layout.read.cpu()] = 1 / len(layout.read)
    placed = [_by_token(contribution, layout, batch, read) for contribution in contributions]
    return torch.stack(placed).sum(dim=0)


def _by_token(contribution: Tensor, layout: Layout, batch: int, read: Tensor) -> Tensor:
    """One contribution, (batch), (batch, tokens) or with the heads of an attention before or behind the tokens."""
    if contribution.dim() > 1 and contribution.shape[0] != batch:
        contribution = contribution.transpose(0, 1)
    if contribution.dim() == 3:
        contribution = contribution.sum(dim=1 if contribution.shape[2] == layout.tokens else 2)
    if contribution.dim() == 1 or contribution.shape[1] == 1:
        return contribution.reshape(batch, 1) * read.to(contribution)
    if contribution.dim() == 2 and contribution.shape[1] in (layout.tokens, layout.patches):
        left_out = layout.tokens - contribution.shape[1]  # behind the blocks prefix tokens may be cut off
        return torch.nn.functional.pad(contribution, (left_out, 0))
    raise UnsupportedModelError(
        f"a bias acts on something of shape {tuple(contribution.shape)} where there are {layout.tokens} tokens: it is "
        "not known which token it belongs to"
    )
