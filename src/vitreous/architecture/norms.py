"""Norms as linear maps: what LayerNorm and RMSNorm do to a part of a token, the whole token's deviation held fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

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
    """The norm as a linear map, or ``None`` for a module that is neither LayerNorm nor RMSNorm over channels.

    What is not torch's own LayerNorm is tried on two tokens: every library has an RMSNorm of its own, by many names,
    and some multiply by 1 + weight.
    """
    if isinstance(module, nn.Identity):  # ModernBERT has none in its first block, for its embeddings have one
        return LinearNorm(weight=None, bias=None, eps=0.0, centred=False, divides=False)
    if module is None:
        return None
    weight, bias = (
        value.detach() if isinstance(value, Tensor) else None
        for value in (getattr(module, name, None) for name in ("weight", "bias"))
    )
    if weight is not None and weight.dim() != 1:
        return None
    if type(module) is nn.LayerNorm:
        return LinearNorm(weight, bias, module.eps, centred=True)
    return _norm_by_answer(module, weight, bias)


def _norm_by_answer(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> LinearNorm | None:
    """The form of norm that gives what the module gives, if one does."""
    tokens = _probe(module, weight)
    given = _answer(module, tokens)
    if given is None:
        return None
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))  # to compare with what half precision rounded
    named = _named_eps(module)
    factors = [weight] if weight is None else [weight, 1 + weight]
    norms = [LinearNorm(factor, bias, 0.0, centred) for centred, factor in product((False, True), factors)]
    # Parameters may have any names: what they are shows in what becomes of a long token and of its negative.
    norms += [_measured_norm(tokens, given.to(tokens.dtype), centred=centred) for centred in (False, True)]
    for norm in norms:
        norm = replace(norm, eps=named or _measured_eps(norm, tokens[0, 1], given[0, 1]))  # noqa: PLW2901
        if _gives(norm, tokens, given):
            return norm
    return None


def _measured_norm(tokens: Tensor, given: Tensor, *, centred: bool) -> LinearNorm:
    """The norm with the weight and bias that a module seems to have: N(x) and N(-x) differ by their linear part."""
    norm = LinearNorm(None, None, 0.0, centred)
    plain = norm.linear(tokens[0, 2]) / norm.deviation(tokens[0, 2])
    weight, bias = (given[0, 2] - given[0, 3]) / 2 / plain, (given[0, 2] + given[0, 3]) / 2
    return LinearNorm(weight, bias if bool(bias.any()) else None, 0.0, centred)


def _probe(module: nn.Module, weight: Tensor | None) -> Tensor:
    """Four tokens, (1, 4, channels): one with a mean, one so short that eps counts, a long one, and its negative."""
    parameters = [*module.parameters()] if weight is None else [weight]
    like = max(parameters, key=Tensor.numel, default=torch.zeros(()))
    channels = math.prod(getattr(module, "normalized_shape", (16,))) if like.dim() == 0 else like.numel()
    wave = torch.linspace(0, 6, channels, dtype=torch.float64).sin()
    # Half precision has no room for the squares of small and large numbers.
    short, long = (1e-3, 1e4) if torch.finfo(like.dtype).bits > 16 else (0.1, 1.0)
    far = long * (1.5 + torch.linspace(0.3, 9, channels, dtype=torch.float64).cos())
    return torch.stack([1 + wave, short * (wave - 0.5), far, -far])[None].to(like.dtype).to(like.device)


def _answer(module: nn.Module, tokens: Tensor) -> Tensor | None:
    """What a module makes of tokens; ``None`` where it does not take them, or gives something else back."""
    try:
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            given = module.forward(tokens)  # not the module itself: its owner's hooks are for real pictures
    except Exception:  # noqa: BLE001  what is no norm fails in its own ways
        return None
    return given if isinstance(given, Tensor) and given.shape == tokens.shape else None


def _named_eps(module: nn.Module) -> float | None:
    """What a norm says that it adds to the variance; torch's RMSNorm may not say."""
    named = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((float(eps) for eps in named if isinstance(eps, int | float)), None)


def _measured_eps(norm: LinearNorm, short: Tensor, given: Tensor) -> float:
    """What a norm adds to the variance, from what it divided the short token by."""
    linear = norm.linear(short)
    divided = given if norm.bias is None else given - norm.bias
    deviation = linear.square().sum() / (linear * divided).sum()
    return max(0.0, float(deviation.square() - norm.deviation(short).square()))


def _gives(norm: LinearNorm, tokens: Tensor, given: Tensor) -> bool:
    """Whether it gives what was given, to rounding."""
    expected = norm.linear(tokens) / norm.deviation(tokens)[..., None]
    if norm.bias is not None:
        expected = expected + norm.bias
    # A few roundings of the module's precision, or of float32, in which many norms work; other forms are far off.
    precision = max(torch.finfo(given.dtype).eps, torch.finfo(torch.float32).eps)
    return bool(((given - expected).abs() <= 8 * precision * expected.abs().amax(dim=-1, keepdim=True)).all())
