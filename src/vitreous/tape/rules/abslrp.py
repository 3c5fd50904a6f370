"""The absLRP rules: relevance by absolute magnitude (Vukadin et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.tape.attention.record import AttentionRecord
from vitreous.tape.rules.gradient_rules import (
    DropoutCall,
    ElementwiseCall,
    EmbeddingCall,
    LinearCall,
    NormCall,
    PoolCall,
    Rule,
    ScaleCall,
    SumCall,
    statistics,
    vector_jacobian,
)
from vitreous.tape.rules.lrp import RelevanceRule, Shares

_SMALL = 1e-9  # as in the authors' program


class AbsoluteLrpRule(RelevanceRule):
    """absLRP: R_in = x * d/dx [(y + y_abs) R / (|y| + 1e-9)], y_abs = module(|x|; |W|, |b|), for every module.

    Every relevance is scaled to absolute sum 1 in each image, the branches of a sum and the factors of a product each
    for itself. The statistics of normalisation and the sum of a softmax are constants. Dropout is a module too, as in
    the program: y + y_abs is 0 there for a negative activation, which so loses its relevance.
    """

    name = "abslrp_share"
    scales_modules = True

    def backward_linear(self, call: LinearCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """R_in = x (Wᵀ S) + |x| (|W|ᵀ S), S = R / |y|."""
        ratio = _ratio(relevance, call.function(tokens))
        return (_scale((ratio @ call.weight).mul_(tokens).add_((ratio @ call.weight.abs()).mul_(tokens.abs()))),)

    def backward_sum(self, call: SumCall, left: Tensor, right: Tensor, relevance: Tensor) -> Shares:
        """(a + |a|) S to each term, scaled separately."""
        ratio = _ratio(relevance, call.function(left, right))
        slopes = [ratio * (1 + value.sign()) for value in (left, right)]
        slopes = self.sum_slopes(call, left, right, slopes)
        return tuple(
            _scale(value * slope).sum_to_size(value.shape) for value, slope in zip((left, right), slopes, strict=True)
        )

    def sum_slopes(self, call: SumCall, left: Tensor, right: Tensor, slopes: list[Tensor]) -> list[Tensor]:
        """What each term of a sum is multiplied by to give its relevance: (1 + sign(a)) S."""
        del call, left, right
        return slopes

    def backward_scale(self, call: ScaleCall, stream: Tensor, factor: Tensor, relevance: Tensor) -> Shares:
        """(y + |y|) S for a learned factor; a number is no module."""
        if factor.dim() == 0:
            return relevance, None
        output = call.function(stream, factor)
        return _scale((_doubled(output) * _ratio(relevance, output)).sum_to_size(stream.shape)), None

    def backward_pool(self, call: PoolCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """(x + |x|) S for the tokens that are read."""
        ratio = _ratio(relevance, call.function(tokens))
        return (_scale(vector_jacobian(call.function, tokens, ratio) * _doubled(tokens)),)

    def backward_dropout(self, call: DropoutCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """(x + |x|) R / |x|."""
        del call
        return (_scale(_ratio(relevance, tokens).mul_(_doubled(tokens))),)

    def backward_embedding(self, call: EmbeddingCall, pixels: Tensor, relevance: Tensor) -> Shares:
        """As a linear layer."""
        weight = call.weight
        ratio = _ratio(relevance, call.function(pixels))
        signed = vector_jacobian(lambda picture: call.convolve(picture, weight), pixels, ratio)
        absolute = vector_jacobian(lambda picture: call.convolve(picture, weight.abs()), pixels, ratio)
        return (_scale(signed.mul_(pixels).add_(absolute.mul_(pixels.abs()))),)

    def backward_product(self, left: Tensor, right: Tensor, gradient: Tensor) -> Shares:
        """(y + |y|) S to each factor, scaled separately."""
        output = left * right
        relevance = _doubled(output) * _ratio(gradient, output)
        # Of equal shapes both are the same tensor until one is copied.
        return _scale(relevance.sum_to_size(left.shape).clone()), _scale(relevance.sum_to_size(right.shape))

    def backward_attention(self, call: AttentionRecord, gradient: Tensor) -> Shares:
        """Through A V, dropout, the softmax with its sum held constant, and q kᵀ.

        Head by head, for everything in between is as large as A. All heads of an image are scaled together, but each
        step is linear in the relevance, so that the sums of unscaled relevance say by how much.
        """
        heads = zip(call.heads_apart(), gradient.chunk(call.heads, dim=1), strict=True)
        sums, *shares = zip(*(_through_head(head, relevance) for head, relevance in heads), strict=True)
        query, key, value = (torch.cat(parts, dim=1) for parts in shares)
        factor = gradient.new_ones(len(gradient))
        for total in torch.stack(sums).sum(dim=0):
            factor = factor / (total * factor + _SMALL)
        factor = factor.view(-1, 1, 1, 1)
        return _scale(query.mul_(factor)), _scale(key.mul_(factor)), _scale(value)

    def backward_norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """R_in = x (w/σ(x) + sign(x) |w|/σ(|x|)) S."""
        tokens, size = call.input, call.input.abs()
        weight = torch.ones_like(tokens[..., :1]) if call.weight is None else call.weight
        _, inverse_deviation = statistics(size, call.shape, call.eps, centred=call.centred)
        slope = tokens * call.inverse_deviation * weight + size * inverse_deviation * weight.abs()
        return _scale(_ratio(gradient, call.function(tokens)).mul_(slope))

    def backward_activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """R_in = x (f'(x) + sign(x) f'(|x|)) S."""
        tokens = call.input
        ratio = _ratio(gradient, call.function(tokens))

        def both(values: Tensor) -> Tensor:
            return call.function(values) + call.function(values.abs())

        return _scale(vector_jacobian(both, tokens, ratio).mul_(tokens))


class ProgramAbsoluteLrpRule(AbsoluteLrpRule):
    """absLRP as its authors' program computes it.

    The program differentiates a residual sum with respect to the shortcut while the branch still depends on it, so the
    shortcut's relevance also holds the ordinary gradient through the branch.
    """

    name = "abslrp"

    def sum_slopes(self, call: SumCall, left: Tensor, right: Tensor, slopes: list[Tensor]) -> list[Tensor]:
        """(1 + sign(a)) S, and what that at the other term becomes at this one."""
        through = (call.gradient_between(right, left, slopes[1]), call.gradient_between(left, right, slopes[0]))
        return [slope if more is None else slope + more for slope, more in zip(slopes, through, strict=True)]


class ConstantStatisticsRule(Rule):
    """The ordinary gradient with mean and deviation of normalisation and the sum of a softmax held constant."""

    name = "constant_statistics"

    def backward_norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """Times weight / deviation."""
        scaled = gradient * call.inverse_deviation
        return scaled if call.weight is None else scaled.mul_(call.weight)

    def backward_attention(self, call: AttentionRecord, gradient: Tensor) -> Shares:
        """The softmax passes A * dA on."""
        shares = []
        for head, slope in zip(call.heads_apart(), gradient.chunk(call.heads, dim=1), strict=True):
            assert head.query is not None
            attention = head.rows(slice(None))
            scores = (slope @ head.value.mT).mul_(attention).mul_(head.full_scale)
            shares.append((scores @ head.key, scores.mT @ head.query, attention.mT @ slope))
        return tuple(torch.cat(parts, dim=1) for parts in zip(*shares, strict=True))


def _through_head(call: AttentionRecord, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One head: three sums (3, batch) that scale relevance on its way, and unscaled shares of q, k and v.

    The sums are those of relevance at A after and before dropout, and at the scores.
    """
    assert call.query is not None
    query, key, value, attention = call.query * call.full_scale, call.key, call.value, call.rows(slice(None))
    ratio = _ratio(gradient, attention @ value)
    value_share = (attention.mT @ ratio).mul_(_doubled(value))
    # In place from here on; A itself may belong to somebody else.
    relevance = (ratio @ _doubled(value).mT).mul_(attention)
    sums = [_size(relevance)]
    _divide(relevance, attention).mul_(attention).mul_(2)  # dropout: no entry of A is negative
    sums.append(_size(relevance))
    _divide(relevance, attention)
    scores = query @ key.mT
    hidden = scores.abs() if call.bias is None else scores.abs().add_(call.bias)  # a mask; others are refused
    slope = torch.softmax(hidden, dim=-1, out=hidden).mul_(scores.sign()).add_(attention)
    relevance.mul_(slope).mul_(scores)
    sums.append(_size(relevance))
    ratio = _divide(relevance, scores)
    return (
        torch.stack(sums),
        (ratio @ key).mul_(query).add_((ratio @ key.abs()).mul_(query.abs())),
        (ratio.mT @ query).mul_(key).add_((ratio.mT @ query.abs()).mul_(key.abs())),
        value_share,
    )


def _ratio(relevance: Tensor, output: Tensor) -> Tensor:
    return relevance / output.abs().add_(_SMALL)


def _divide(relevance: Tensor, output: Tensor) -> Tensor:
    """The same in place."""
    return relevance.div_(output.abs().add_(_SMALL))


def _doubled(values: Tensor) -> Tensor:
    """Give v + |v|."""
    return values + values.abs()


def _scale(relevance: Tensor) -> Tensor:
    """To absolute sum 1 in each image, in place."""
    return relevance.div_(_size(relevance).add_(_SMALL).view(-1, *[1] * (relevance.dim() - 1)))


def _size(relevance: Tensor) -> Tensor:
    """The absolute sum in each image, (batch,)."""
    return relevance.flatten(1).abs().sum(dim=1)
