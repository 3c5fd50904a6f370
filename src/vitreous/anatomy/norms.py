"""Norms as linear maps: what LayerNorm and RMSNorm do to a part of a token, the whole token's deviation held fixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LinearNorm:
    """N(x) = linear(x) / deviation(x) + bias.

    Attributes:
        weight: one factor per channel, or ``None``.
        bias: what is added at the end, or ``None``.
        eps: what is added to the variance.
        centred: whether the mean over channels is taken off (LayerNorm) or not (RMSNorm).
        divides: whether it divides at all; what stands in for a norm may do nothing.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool
    divides: bool = True

    def linear(self, vectors: Tensor) -> Tensor:
        """The part that is linear in (..., channels)."""
        result = vectors - vectors.mean(dim=-1, keepdim=True) if self.centred else vectors.clone()
        return result if self.weight is None else result.mul_(self.weight.to(vectors.dtype))

    def deviation(self, tokens: Tensor) -> Tensor:
        """What whole tokens (..., channels) are divided by, (...)."""
        if not self.divides:
            return tokens.new_ones(tokens.shape[:-1])
        centred = tokens - tokens.mean(dim=-1, keepdim=True) if self.centred else tokens
        return centred.square().mean(dim=-1).add_(self.eps).sqrt_()


def linear_norm(module: nn.Module | None) -> LinearNorm | None:
    """The norm as a linear map, or ``None`` for a module that is neither LayerNorm nor RMSNorm over channels."""
    if isinstance(module, nn.Identity):  # ModernBERT has none in its first block, for its embeddings have one
        return LinearNorm(weight=None, bias=None, eps=0.0, centred=False, divides=False)
    centred = isinstance(module, nn.LayerNorm)
    # By name, for torch, timm and others each have their own; some of the others multiply by 1 + weight.
    if module is None or not (centred or type(module).__name__ in {"RMSNorm", "RmsNorm"}):
        return None
    weight, bias, eps = (getattr(module, name, None) for name in ("weight", "bias", "eps"))
    if isinstance(weight, Tensor) and weight.dim() != 1:
        return None
    return LinearNorm(
        weight=weight.detach() if isinstance(weight, Tensor) else None,
        bias=bias.detach() if isinstance(bias, Tensor) else None,
        # torch's RMSNorm without eps takes the precision of what it is given.
        eps=float(eps) if eps is not None else torch.finfo(weight.dtype if weight is not None else torch.float32).eps,
        centred=centred,
    )
