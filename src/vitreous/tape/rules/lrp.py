"""Rules under which the backward pass carries relevance: the LRP of Chefer et al., and AttnLRP with the gamma rule.

Re-indexing passes relevance on as it passes a gradient on, and where a stream forks both add up. Everything else that
touches a stream has a rule here. The gamma rule in linear layers and convolutions is the setting of AttnLRP's authors
for images; each setting is a rule of its own, made and named by ``gamma_rule``, so that passes are distinguished by
rule names.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from vitreous.tape.attention.record import AttentionRecord
from vitreous.tape.rules.gradient_rules import (
    AttnLrpRule,
    Call,
    DropoutCall,
    ElementwiseCall,
    EmbeddingCall,
    LinearCall,
    NormCall,
    PoolCall,
    Rule,
    ScaleCall,
    SumCall,
    vector_jacobian,
)

_SMALL = 1e-9  # as in the authors' program; relevance that explodes ("orig") depends on it

Shares = tuple[Tensor | None, ...]


def safe_divide(relevance: Tensor, output: Tensor) -> Tensor:
    """R/(Z + 1e-9), and 0 where Z is 0."""
    denominator = output + _SMALL
    denominator.masked_fill_(denominator == 0, _SMALL)
    return torch.div(relevance, denominator, out=denominator).masked_fill_(output == 0, 0)


def attention_relevance(call: AttentionRecord, rows: slice | Tensor, relevance: Tensor) -> Tensor:
    """R_A = A * ((R_O / O) Vᵀ) / 2 for some rows, with the relevance that arrives at those rows of O."""
    attention = call.rows(rows)
    return _attention_shares(attention, call.value, relevance)[0]


def _attention_shares(attention: Tensor, value: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """R_A, halved, and R_O / O."""
    ratio = safe_divide(relevance, attention @ value)
    return (ratio @ value.transpose(-2, -1)).mul_(attention).div_(2), ratio


class RelevanceRule(Rule):
    """What rules that carry relevance have in common."""

    carries_relevance = True
    gate = "constant"

    def backward_call(self, call: Call, inputs: tuple[Tensor, ...], gradient: Tensor) -> Shares:
        """The relevance of the inputs of a linear map, sum, scale, pooling, dropout or patch embedding."""
        shares: Shares = getattr(self, f"backward_{call.kind}")(call, *inputs, gradient)
        return shares

    @abstractmethod
    def backward_linear(self, call: LinearCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """Through a linear layer."""

    @abstractmethod
    def backward_sum(self, call: SumCall, left: Tensor, right: Tensor, relevance: Tensor) -> Shares:
        """Through a sum."""

    @abstractmethod
    def backward_scale(self, call: ScaleCall, stream: Tensor, factor: Tensor, relevance: Tensor) -> Shares:
        """Through a multiplication by something that only weighs."""

    @abstractmethod
    def backward_pool(self, call: PoolCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """Through the choice or mean of tokens."""

    @abstractmethod
    def backward_dropout(self, call: DropoutCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """Through dropout."""

    @abstractmethod
    def backward_embedding(self, call: EmbeddingCall, pixels: Tensor, relevance: Tensor) -> Shares:
        """Through the patch embedding."""


class LrpRule(RelevanceRule):
    """The relevance rules of Transformer Attribution (Chefer et al., CVPR 2021), its program's "ours".

    Linear layers: alpha = 1 (eq. 4), biases ignored. Products of two streams: each factor by its share, halved. Sums:
    by share, then the two branches rescaled so that their totals keep the ratio of their sizes and add up to what
    arrived (eq. 10); the program takes totals over the batch, here each image has its own. Normalisation, activation,
    softmax, dropout and scales pass relevance on unchanged. The authors' models add nothing to attention scores; what
    others add there (relative positions, ALiBi) is treated as the biases of linear layers: q and k get all of it. A
    linear layer on patches that were cut out of the picture is a patch embedding.
    """

    name = "lrp_ours"

    def backward_linear(self, call: LinearCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """R_in = x⁺ (W⁺ᵀ S) + x⁻ (W⁻ᵀ S) with S = R / (x⁺ W⁺ + x⁻ W⁻)."""
        rows, relevance = tokens.flatten(0, -2), relevance.flatten(0, -2)
        positive, negative = call.weight.clamp(min=0), call.weight.clamp(max=0)
        excited = rows.clamp(min=0) @ positive.T
        ratio = _excited_ratio(relevance, excited.addmm_(rows.clamp(max=0), negative.T))
        return (_by_sign(rows, ratio @ positive, ratio @ negative).view_as(tokens),)

    def backward_sum(self, call: SumCall, left: Tensor, right: Tensor, relevance: Tensor) -> Shares:
        """Proportional, then rescaled branch by branch (eq. 10)."""
        relevance, shares = _proportional(call, left, right, relevance)
        axes = tuple(axis for axis in range(relevance.dim()) if axis != call.image_axis)
        totals = [share.sum(axes, keepdim=True) for share in shares]
        arrived = relevance.sum(axes, keepdim=True)
        size = totals[0].abs() + totals[1].abs()
        return tuple(
            share.mul_(safe_divide(safe_divide(total.abs(), size) * arrived, total)).sum_to_size(value.shape)
            for share, total, value in zip(shares, totals, (left, right), strict=True)
        )

    def backward_scale(self, call: ScaleCall, stream: Tensor, factor: Tensor, relevance: Tensor) -> Shares:
        """Unchanged; the factor gets nothing."""
        del call, factor
        return relevance.sum_to_size(stream.shape), None

    def backward_pool(self, call: PoolCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """By share."""
        ratio = safe_divide(relevance, call.function(tokens))
        return (vector_jacobian(call.function, tokens, ratio) * tokens,)

    def backward_dropout(self, call: DropoutCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """Unchanged."""
        del call, tokens
        return (relevance,)

    def backward_embedding(self, call: EmbeddingCall, pixels: Tensor, relevance: Tensor) -> Shares:
        """The z^B rule (Montavon et al. 2017), with the smallest and largest value of each picture as bounds."""
        axes = tuple(range(1, pixels.dim()))
        low = pixels.amin(dim=axes, keepdim=True).expand_as(pixels)
        high = pixels.amax(dim=axes, keepdim=True).expand_as(pixels)
        weight = call.weight
        parts = ((pixels, weight), (-low, weight.clamp(min=0)), (-high, weight.clamp(max=0)))
        with torch.enable_grad():
            leaves = [values.detach().requires_grad_() for values, _ in parts]
            outputs = [call.convolve(leaf, part) for leaf, (_, part) in zip(leaves, parts, strict=True)]
            output = outputs[0] + outputs[1] + outputs[2]
            slopes = torch.autograd.grad(output, leaves, relevance / (output.detach() + _SMALL))
        shares = (leaf.detach() * slope for leaf, slope in zip(leaves, slopes, strict=True))
        return (next(shares) + next(shares) + next(shares),)

    def backward_product(self, left: Tensor, right: Tensor, gradient: Tensor) -> Shares:
        """Half to each factor."""
        half = gradient / 2
        return half.sum_to_size(left.shape), half.sum_to_size(right.shape)

    def backward_attention(self, call: AttentionRecord, gradient: Tensor) -> Shares:
        """Half through A V to each, of A's half through q kᵀ half to each; the softmax passes it on unchanged."""
        assert call.query is not None
        key, value = call.key, call.value
        query_parts: list[Tensor] = []
        key_total, value_total = torch.zeros_like(key), torch.zeros_like(value)
        for rows in call.pieces():
            attention, query = call.rows(rows), call.query[:, :, rows]
            relevance, ratio = _attention_shares(attention, value, gradient[:, :, rows])
            value_total += attention.transpose(-2, -1) @ ratio
            ratio = safe_divide(relevance, query @ key.transpose(-2, -1))
            query_parts.append((ratio @ key).mul_(query))
            key_total += ratio.transpose(-2, -1) @ query
        shares = (torch.cat(query_parts, dim=2), key_total.mul_(key), value_total.mul_(value))
        return tuple(share.div_(2) for share in shares)

    def backward_norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """Unchanged."""
        del call
        return gradient

    def backward_activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """Unchanged."""
        del call
        return gradient


class OriginalLrpRule(LrpRule):
    """The rules of the LRP and partial-LRP baselines in the same paper, its program's "orig".

    Linear layers divide by the positive and the negative part separately, and sums are not rescaled. Values explode.
    """

    name = "lrp_orig"

    def backward_linear(self, call: LinearCall, tokens: Tensor, relevance: Tensor) -> Shares:
        """R_in = x⁺ (W⁺ᵀ S⁺) + x⁻ (W⁻ᵀ S⁻) with S⁺ = R / (x⁺ W⁺) and S⁻ = R / (x⁻ W⁻)."""
        rows, relevance = tokens.flatten(0, -2), relevance.flatten(0, -2)
        positive, negative = call.weight.clamp(min=0), call.weight.clamp(max=0)
        above = _excited_ratio(relevance, rows.clamp(min=0) @ positive.T)
        below = _excited_ratio(relevance, rows.clamp(max=0) @ negative.T)
        return (_by_sign(rows, above @ positive, below @ negative).view_as(tokens),)

    def backward_sum(self, call: SumCall, left: Tensor, right: Tensor, relevance: Tensor) -> Shares:
        """Proportional."""
        _, shares = _proportional(call, left, right, relevance)
        return tuple(share.sum_to_size(value.shape) for share, value in zip(shares, (left, right), strict=True))


def _excited_ratio(relevance: Tensor, excited: Tensor) -> Tensor:
    """R/(Z + 1e-9), in Z's place, for a Z that is a sum of terms ≥ 0.

    Where Z is 0 each of its terms is, so that the ratio is multiplied by 0 wherever it goes and need not be 0 itself.
    """
    return torch.div(relevance, excited.add_(_SMALL), out=excited)


def _by_sign(tokens: Tensor, from_positive: Tensor, from_negative: Tensor) -> Tensor:
    """Give x⁺ * the first + x⁻ * the second."""
    return torch.where(tokens > 0, from_positive, from_negative).mul_(tokens)


def _proportional(call: SumCall, left: Tensor, right: Tensor, relevance: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The relevance that arrives at a sum and each term's share of it.

    The program divides and multiplies by the sum once more where it forks; without that, relevance that explodes would
    differ in the fourth digit.
    """
    output = left + right
    if call.forks:
        relevance = safe_divide(relevance, output).mul_(output)
    ratio = safe_divide(relevance, output)
    return relevance, [left * ratio, right * ratio]


Inside = Literal["attnlrp", "constant"]


class AttnLrpGammaRule(AttnLrpRule):
    """AttnLRP, and the generalised gamma rule (Andéol et al. 2021) in linear layers and convolutions.

    Of y = W x + b the part that agrees with the sign of y counts 1 + gamma times. For y > 0 that is the positive part,
    z = y + gamma (W⁺ x⁺ + W⁻ x⁻ + b⁺), for y < 0 the negative one, and R_i = sum_j x_i W'_ji R_j / z_j with the weights
    that z is made of. With R = y * gradient that is the gradient x-wise: W'ᵀ (gradient * y / z). |z| is |y| at least,
    so that nothing has to be kept from 0; gamma = 0 is the ordinary gradient.
    """

    treats_linear = True

    def __init__(self, linear: float, convolution: float) -> None:
        self._linear, self._convolution = linear, convolution

    def backward_call(self, call: Call, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Linear layers and convolutions by the gamma rule, everything else as a gradient."""
        if isinstance(call, LinearCall) and self._linear:
            return (self._through_linear(call, inputs[0], gradient),)
        if isinstance(call, EmbeddingCall) and self._convolution:
            return (self._through_convolution(call, inputs[0], gradient),)
        return call.gradients(inputs, gradient)

    def _through_linear(self, call: LinearCall, tokens: Tensor, gradient: Tensor) -> Tensor:
        weight = call.weight
        rows, arriving = (part.flatten(0, -2).to(weight.dtype) for part in (tokens, gradient))
        high, low = weight.clamp(min=0), weight.clamp(max=0)
        above, below = rows.clamp(min=0), rows.clamp(max=0)
        output = rows @ weight.T if call.bias is None else torch.addmm(call.bias.to(weight.dtype), rows, weight.T)
        bias = torch.zeros_like(output[0]) if call.bias is None else call.bias.to(weight.dtype)
        agreeing = (
            torch.addmm(bias.clamp(min=0), above, high.T).addmm_(below, low.T),
            torch.addmm(bias.clamp(max=0), above, low.T).addmm_(below, high.T),
        )
        positive, negative = _by_sign_of_output(output, agreeing, arriving, self._linear)
        whole = (positive + negative) @ weight
        with_high, with_low = positive @ high + negative @ low, positive @ low + negative @ high
        return torch.where(rows >= 0, with_high, with_low).mul_(self._linear).add_(whole).view_as(tokens)

    def _through_convolution(self, call: EmbeddingCall, pixels: Tensor, gradient: Tensor) -> Tensor:
        weight, gamma = call.weight, self._convolution
        high, low = weight.clamp(min=0), weight.clamp(max=0)
        above, below = pixels.clamp(min=0), pixels.clamp(max=0)
        output = call.function(pixels)
        bias = call.function(torch.zeros_like(pixels[:1]))
        agreeing = (
            call.convolve(above, high) + call.convolve(below, low) + bias.clamp(min=0),
            call.convolve(above, low) + call.convolve(below, high) + bias.clamp(max=0),
        )
        positive, negative = _by_sign_of_output(output, agreeing, gradient, gamma)

        def back(part: Tensor, kernel: Tensor) -> Tensor:
            return vector_jacobian(lambda picture: call.convolve(picture, kernel), pixels, part)

        with_high, with_low = back(positive, high) + back(negative, low), back(positive, low) + back(negative, high)
        return torch.where(pixels >= 0, with_high, with_low).mul_(gamma).add_(back(positive + negative, weight))


class CpLrpGammaRule(AttnLrpGammaRule):
    """The same with the attention matrix held constant, which the authors' program does for images."""

    softmax = "constant"


def _by_sign_of_output(
    output: Tensor, agreeing: tuple[Tensor, Tensor], gradient: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """``gradient * y / z`` where y is positive, and where it is negative."""
    positive = output > 0
    denominator = torch.where(positive, agreeing[0], agreeing[1]).mul_(gamma).add_(output)
    ratio = torch.where(denominator == 0, torch.ones_like(output), output / denominator).mul_(gradient)
    return ratio * positive, ratio * ~positive


def gamma_rule(linear: float, convolution: float, inside: Inside) -> AttnLrpGammaRule:
    """Make the rule of a setting; ``inside`` is how softmax is treated."""
    rule = (CpLrpGammaRule if inside == "constant" else AttnLrpGammaRule)(linear, convolution)
    # An instance attribute: the class attribute of a rule that has settings names none of them.
    rule.__dict__["name"] = f"{inside}_gamma_{linear:g}_{convolution:g}"
    return rule
