"""AttnLRP with the gamma rule in linear layers and convolutions, as a gradient: its authors' setting for images.

Each setting is a rule of its own, made and named by ``gamma_rule``, so that passes are distinguished by rule names.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vitreous.tape.rules.calls import Call, EmbeddingCall, LinearCall, vector_jacobian
from vitreous.tape.rules.gradient_rules import AttnLrpRule

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
