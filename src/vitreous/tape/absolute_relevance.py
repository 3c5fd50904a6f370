"""The absLRP rule: relevance by absolute magnitude (Vukadin et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitreous.tape.attention import AttentionRecord
from vitreous.tape.calls import EmbeddingCall, LinearCall, PoolCall, SameCall, ScaleCall, SumCall
from vitreous.tape.relevance import RelevanceRule, Shares
from vitreous.tape.rules import ElementwiseCall, NormCall, statistics, vector_jacobian

_SMALL = 1e-9  # as in the authors' program


class AbsoluteLrpRule(RelevanceRule):
    """absLRP: R_in = x * d/dx [(y + y_abs) R / (|y| + 1e-9)], y_abs = module(|x|; |W|, |b|), for every module.

    Every relevance is scaled to absolute sum 1 in each image, the branches of a sum and the factors of a product each
    for itself. The statistics of normalisation and the sum of a softmax are constants. Dropout is a module too, as in
    the program: y + y_abs is 0 there for a negative activation, which so loses its relevance.
    """

    name = "abslrp"

    def linear(self, call: LinearCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """x (Wᵀ S) + |x| (|W|ᵀ S), S = R / |y|."""
        ratio = _ratio(relevance, call.function(tokens))
        return (_scaled((ratio @ call.weight).mul_(tokens).add_((ratio @ call.weight.abs()).mul_(tokens.abs()))),)

    def sum(self, call: SumCall, left: Tensor, right: Tensor, relevance: Tensor) -> Shares:
        """(a + |a|) S to each term, scaled separately."""
        ratio = _ratio(relevance, call.function(left, right))
        return tuple(_scaled(_doubled(value) * ratio).sum_to_size(value.shape) for value in (left, right))

    def scale(self, call: ScaleCall, stream: Tensor, factor: Tensor, relevance: Tensor) -> Shares:
        """(y + |y|) S for a learned factor; a number is no module."""
        if factor.dim() == 0:
            return relevance, None
        output = call.function(stream, factor)
        return _scaled((_doubled(output) * _ratio(relevance, output)).sum_to_size(stream.shape)), None

    def pool(self, call: PoolCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """(x + |x|) S for the tokens that are read."""
        ratio = _ratio(relevance, call.function(tokens))
        return (_scaled(vector_jacobian(call.function, tokens, ratio).mul_(_doubled(tokens))),)

    def same(self, call: SameCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """(x + |x|) R / |x|."""
        del call
        return (_scaled(_ratio(relevance, tokens).mul_(_doubled(tokens))),)

    def embedding(self, call: EmbeddingCall, pixels: Tensor, relevance: Tensor) -> Shares:
        """As a linear layer."""
        weight = call.weight
        ratio = _ratio(relevance, call.function(pixels))
        signed = vector_jacobian(lambda picture: call.convolve(picture, weight), pixels, ratio)
        absolute = vector_jacobian(lambda picture: call.convolve(picture, weight.abs()), pixels, ratio)
        return (_scaled(signed.mul_(pixels).add_(absolute.mul_(pixels.abs()))),)

    def product(self, left: Tensor, right: Tensor, gradient: Tensor) -> Shares:
        """(y + |y|) S to each factor, scaled separately."""
        output = left * right
        relevance = _doubled(output) * _ratio(gradient, output)
        return _scaled(relevance.sum_to_size(left.shape)), _scaled(relevance.sum_to_size(right.shape))

    def attention(self, call: AttentionRecord, gradient: Tensor) -> Shares:
        """Through A V, the softmax with its sum held constant, and q kᵀ. All rows at once: they are scaled together."""
        assert call.query is not None
        query, key, value, everything = call.query * call.scale, call.key, call.value, slice(None)
        attention = call.rows(everything)
        ratio = _ratio(gradient, attention @ value)
        value_relevance = _scaled((attention.transpose(-2, -1) @ ratio).mul_(_doubled(value)))
        relevance = _scaled((ratio @ _doubled(value).transpose(-2, -1)).mul_(attention))
        scores = query @ key.transpose(-2, -1)
        slope = attention + scores.sign() * torch.softmax(scores.abs(), dim=-1)
        relevance = _scaled(slope.mul_(scores).mul_(_ratio(relevance, attention)))
        ratio = _ratio(relevance, scores)
        return (
            _scaled((ratio @ key).mul_(query).add_((ratio @ key.abs()).mul_(query.abs()))),
            _scaled((ratio.mT @ query).mul_(key).add_((ratio.mT @ query.abs()).mul_(key.abs()))),
            value_relevance,
        )

    def norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """x (w/σ(x) + sign(x) |w|/σ(|x|)) S."""
        tokens, size = call.input, call.input.abs()
        weight = torch.ones_like(tokens[..., :1]) if call.weight is None else call.weight
        _, inverse_deviation = statistics(size, call.shape, call.eps, centred=call.centred)
        slope = tokens * call.inverse_deviation * weight + size * inverse_deviation * weight.abs()
        return _scaled(_ratio(gradient, call.function(tokens)).mul_(slope))

    def activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """x (f'(x) + sign(x) f'(|x|)) S."""
        tokens = call.input
        ratio = _ratio(gradient, call.function(tokens))
        both: Callable[[Tensor], Tensor] = lambda values: call.function(values) + call.function(values.abs())  # noqa: E731
        return _scaled(vector_jacobian(both, tokens, ratio).mul_(tokens))


def _ratio(relevance: Tensor, output: Tensor) -> Tensor:
    return relevance / output.abs().add_(_SMALL)


def _doubled(values: Tensor) -> Tensor:
    """Give v + |v|."""
    return values + values.abs()


def _scaled(relevance: Tensor) -> Tensor:
    """To absolute sum 1 in each image."""
    total = relevance.flatten(1).abs().sum(dim=1)
    return relevance / total.add_(_SMALL).view(-1, *[1] * (relevance.dim() - 1))
