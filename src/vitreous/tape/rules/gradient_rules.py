"""Rules: how the backward pass treats attention, normalisation and activation. The forward pass is never changed.

A rule answers, for each kind of non-linear part, what gradient goes on given the one that arrives. Everything linear
is left to autograd. Since only the backward pass differs, one recorded forward pass serves every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitreous.float64 import exact
from vitreous.tape.attention.record import AttentionRecord, plain_gradients, value_gradient
from vitreous.tape.rules.calls import Call


@dataclass
class NormCall:
    """One normalisation: the input, its statistics over ``axes`` and the affine weight."""

    input: Tensor
    inverse_deviation: Tensor
    mean: Tensor | None
    weight: Tensor | None
    shape: tuple[int, ...]
    eps: float
    centred: bool
    function: Callable[[Tensor], Tensor]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that are normalised together."""
        return tuple(range(-len(self.shape), 0))


@dataclass
class ElementwiseCall:
    """One activation or gate: its input and the function."""

    input: Tensor
    function: Callable[[Tensor], Tensor]
    slope_at_zero: float
    value_at_zero: float = 0.0

    @cached_property
    def _run(self) -> tuple[Tensor, Tensor]:
        return _run_again(self.function, self.input)

    @property
    def output(self) -> Tensor:
        """f(u)."""
        return self._run[1].detach()

    def gradient(self, gradient: Tensor) -> Tensor:
        """The ordinary gradient at u, given the one at f(u)."""
        return _pulled_back(*self._run, gradient)


class Rule:
    """The ``plain`` rule, ordinary autograd, and the base of the others.

    Attributes:
        name: how it is spelled.
        halves_products: whether each factor of a product of two streams gets half of the gradient.
        constant_gates: whether an activation is its input times a constant, f(u)/u, so that nothing of it is a bias.
        carries_relevance: whether relevance goes on instead of a gradient, so linear maps and sums need a rule too.
        scales_modules: whether the relevance of every module is scaled by itself, so that it matters what is one.
        plain_attention: whether the rule reads the ordinary gradients of attention.
        follows_scores: whether attention that a model writes out itself has to be followed from q kᵀ to A v; if not, A
            is a constant there, or an ordinary softmax.
    """

    name = "plain"
    halves_products = False
    constant_gates = False
    carries_relevance = False
    scales_modules = False
    plain_attention = True
    follows_scores = False

    def attention(self, call: AttentionRecord, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """dq, dk, dv from the gradient at O = A V; ``None`` for nothing."""
        return plain_gradients(call, gradient)

    def norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """The gradient at the input of a LayerNorm or RMSNorm."""
        if call.mean is None:
            return vector_jacobian(call.function, call.input, gradient)
        backward = torch.ops.aten.native_layer_norm_backward
        inputs = (gradient, call.input, call.shape, call.mean, call.inverse_deviation, call.weight, None)
        result: Tensor = backward(*inputs, [True, False, False])[0]
        return result

    def activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """The gradient at the input of an activation function."""
        return call.gradient(gradient)

    def softmax(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient at the scores of attention that a model writes out itself."""
        return call.gradient(gradient)

    def pooling(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient at the scores by which tokens are weighed where a head adds them up."""
        return call.gradient(gradient)

    def gate(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient through a sigmoid or tanh that only weighs something else."""
        return None if self.constant_gates else call.gradient(gradient)

    def deviation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient through the deviation of a normalisation that a model writes out itself."""
        return call.gradient(gradient)

    def length(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient through the length that a feature is divided by."""
        return call.gradient(gradient)

    def product(self, left: Tensor, right: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients at the factors of a product of two streams."""
        share = gradient / 2 if self.halves_products else gradient
        return (share * right).sum_to_size(left.shape), (share * left).sum_to_size(right.shape)

    def follow(self, call: Call, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients at the inputs of a call that only relevance treats in another way."""
        return call.gradients(inputs, gradient)


class FrozenRule(Rule):
    """Attention matrix, normalisation variance (not its mean) and activation gate f(u)/u held constant.

    Input x gradient under this rule is DecompX without bias (SkipPLUS sec. 3; methods are compared there), because a
    forward decomposition is linear once these three are constants, and a backward pass is its transpose. A product of
    two streams (SwiGLU), which DecompX does not have, counts twice here; ``libra`` conserves it.
    """

    name = "frozen"
    constant_gates = True
    plain_attention = False

    def attention(self, call: AttentionRecord, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing reaches q and k: A is a constant."""
        return None, None, value_gradient(call, gradient)

    def norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """A linear map: subtract the mean (LayerNorm only), times weight / deviation."""
        scaled = gradient * call.inverse_deviation
        if call.weight is not None:
            scaled = scaled.mul_(call.weight)
        if call.centred:
            scaled = scaled.sub_(scaled.mean(call.axes, keepdim=True))
        return scaled

    def activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """Times f(u)/u, which is f'(0) where u is 0 (real images reach it), not 0/0.

        Where f(0) is not 0, f(u)/u has no bound: then f(0) is a bias, and the rest is (f(u) - f(0))/u.
        """
        if call.value_at_zero:
            return gradient * _slope_from_zero(call)
        gate = call.function(call.input).div_(call.input)
        # A comparison with 0 and a masked fill would take longer than the function itself.
        torch.nan_to_num(gate, nan=call.slope_at_zero, posinf=math.inf, neginf=-math.inf, out=gate)
        return gate.mul_(gradient)

    def softmax(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """Nothing reaches the scores: A is a constant."""
        del call, gradient
        return None

    def pooling(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """Nothing reaches the scores: the weights are constants, as A is."""
        del call, gradient
        return None

    def deviation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """A constant passes nothing on."""
        del call, gradient
        return None


class LibraRule(FrozenRule):
    """Frozen, with half the gradient to each factor of a gated product and unit lengths held constant.

    LibraGrad (Mehri et al., CVPR 2025): pruned and scaled this way the gradient is complete; inputs and biases times
    gradient add up to the output.
    """

    name = "libra"
    halves_products = True

    def length(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """A constant passes nothing on."""
        del call, gradient
        return None


class AttnLrpRule(LibraRule):
    """AttnLRP (Achtibat et al., ICML 2024) as a gradient: input x gradient under this rule is its relevance.

    Variance, length and activation gate are constants (identity rule, eq. 9), softmax has its ordinary gradient
    (Taylor, eq. 13), and every product of two streams gives half the gradient to each (uniform rule, eq. 7): A V, q kᵀ
    and gated products.
    """

    name = "attnlrp"
    plain_attention = True
    follows_scores = True

    def attention(self, call: AttentionRecord, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Half through A V; of A's half, half through q kᵀ."""
        query, key, value = plain_gradients(call, gradient)
        return query.div_(4), key.div_(4), value.div_(2)

    def pooling(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """A softmax has its ordinary gradient; products behind the blocks are not halved."""
        return Rule.pooling(self, call, gradient)


class ConservativeRule(FrozenRule):
    """Conservative LRP (Ali et al., ICML 2022): A and the normalisation variance are constants, activations are not."""

    name = "conservative"
    constant_gates = False

    def activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """As in the plain rule."""
        return Rule.activation(self, call, gradient)


class ResidualRule(Rule):
    """Nothing passes back through attention; the gradient goes down by the residual stream and the feed-forward part.

    AGCAM's program detaches the attention's input.
    """

    name = "residual"
    plain_attention = False
    follows_scores = True

    def attention(self, call: AttentionRecord, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing reaches q, k or v."""
        del call, gradient
        return None, None, None


def _slope_from_zero(call: ElementwiseCall) -> Tensor:
    """(f(u) - f(0))/u, which is f'(0) where u is so small that the difference is mostly rounding."""
    small = call.input.abs() < torch.finfo(call.input.dtype).eps ** 0.5
    return torch.where(small, call.slope_at_zero, (call.function(call.input) - call.value_at_zero) / call.input)


def vector_jacobian(function: Callable[[Tensor], Tensor], point: Tensor, gradient: Tensor) -> Tensor:
    """The ordinary gradient of ``function`` at ``point``, by running it once more."""
    return _pulled_back(*_run_again(function, point), gradient)


def _run_again(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output of a run with a graph of its own."""
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        return leaf, function(leaf)


def _pulled_back(leaf: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """What a gradient at the output becomes at the input."""
    (result,) = torch.autograd.grad(output, leaf, gradient.to(output.dtype))
    return result


def statistics(tokens: Tensor, shape: tuple[int, ...], eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """Mean and 1/deviation over the last axes, in float32 at least."""
    tokens = exact(tokens)
    axes = tuple(range(-len(shape), 0))
    if centred:
        # By the kernel for layer normalisation, which takes a twentieth of the time of torch.var_mean.
        _, mean, inverse_deviation = torch.native_layer_norm(tokens, shape, None, None, eps)
        return mean, inverse_deviation
    variance = tokens.square().mean(axes, keepdim=True)
    return torch.zeros_like(tokens[..., :1]), torch.rsqrt(variance + eps)
