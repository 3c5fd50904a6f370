"""Rules: how the backward pass treats attention, normalisation, activations and products.

The forward pass is never changed, so one recorded forward pass serves every rule. A rule is a class that states its
treatment of each kind of call as class attributes. What no attribute can state, it computes in a ``backward_...``
method, which gets the recorded call and the gradient at its output and returns the gradient at its input. ``NormCall``
and ``ElementwiseCall`` are non-linear; every rule treats them. Everything linear is left to autograd, unless a rule
carries relevance (see ``lrp``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.tape.attention.record import AttentionRecord, plain_gradients, value_gradient


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

    def ratio(self) -> Tensor:
        """f(u)/u, a new tensor: f'(0) where u is 0 (real images reach it), not 0/0.

        Where f(0) is not 0, f(u)/u has no bound: then f(0) is a bias, and the rest is (f(u) - f(0))/u.
        """
        if self.value_at_zero:
            # Near 0 the difference is mostly rounding.
            small = self.input.abs() < torch.finfo(self.input.dtype).eps ** 0.5
            secant = (self.function(self.input) - self.value_at_zero) / self.input
            return torch.where(small, self.slope_at_zero, secant)
        ratio = self.function(self.input).div_(self.input)
        # A comparison with 0 and a masked fill would take longer than the function itself.
        return torch.nan_to_num(ratio, nan=self.slope_at_zero, posinf=math.inf, neginf=-math.inf, out=ratio)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The ordinary gradient at u, given the one at f(u)."""
        return _vector_jacobian_of(*self._run, gradient)


@dataclass
class Call:
    """One call as a function of the tensors that relevance may reach; ``kind`` names the rule's method for it."""

    function: Callable[..., Tensor]
    kind: ClassVar[Literal["linear", "sum", "scale", "pool", "dropout", "embedding"]]

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The ordinary gradients at the inputs, by running the call once more."""
        with torch.enable_grad():
            # A mask of tokens by which a stream is multiplied may be of integers.
            leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in inputs]
            output = self.function(*leaves)
            found = iter(
                torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], gradient.to(output.dtype))
            )
        return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


class LinearCall(Call):
    """A linear layer."""

    kind = "linear"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(lambda tokens: F.linear(tokens, weight, bias))
        self.weight, self.bias = weight, bias

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Times the weight, which a model's own autocast leaves in another dtype than the output."""
        del inputs
        return (gradient.to(self.weight.dtype) @ self.weight,)


@dataclass
class SumCall(Call):
    """A sum of two streams, or of a stream and a constant.

    Attributes:
        image_axis: the axis along which the images of a batch lie.
        forks: whether the sum goes on into a branch and past it.
        gradient_between: what a gradient at one tensor becomes at another, ``None`` where the first does not depend on
            the second; the statistics of normalisation and softmax are constants.
    """

    image_axis: int
    forks: bool
    gradient_between: Callable[[Tensor, Tensor, Tensor], Tensor | None]
    kind = "sum"

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """To each what arrives."""
        return tuple(gradient.sum_to_size(value.shape) for value in inputs)


class ScaleCall(Call):
    """A stream times or divided by something that only weighs it: the factor of LayerScale, a number, a gate."""

    kind = "scale"


class PoolCall(Call):
    """The tokens that the head reads: one of them, or their mean."""

    kind = "pool"


class DropoutCall(Call):
    """Dropout in evaluation: what enters comes out."""

    kind = "dropout"

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """What arrives."""
        del inputs
        return (gradient,)


class LengthCall(Call):
    """Vectors divided by their length: a norm, which passes relevance on unchanged, as dropout does."""

    kind = "dropout"


class WrittenNormCall(Call):
    """A norm that a module writes out in several steps, as one call.

    Args:
        output: what its steps gave.
        source: what they were given.
    """

    kind = "dropout"

    def __init__(self, output: Tensor, source: Tensor) -> None:
        super().__init__(lambda _: output.detach())
        self._output, self._source = output, source

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """By its own steps."""
        del inputs
        return torch.autograd.grad(self._output, self._source, gradient, retain_graph=True)


@dataclass
class EmbeddingCall(Call):
    """The convolution that makes patches of the picture; ``convolve`` is it with any weight, without bias."""

    weight: Tensor
    convolve: Callable[[Tensor, Tensor], Tensor]
    kind = "embedding"


def vector_jacobian(function: Callable[[Tensor], Tensor], point: Tensor, gradient: Tensor) -> Tensor:
    """The ordinary gradient of ``function`` at ``point``, by running it once more."""
    return _vector_jacobian_of(*_run_again(function, point), gradient)


def _run_again(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output of a run with a graph of its own."""
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        return leaf, function(leaf)


def _vector_jacobian_of(leaf: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
    """What a gradient at the output becomes at the input."""
    (result,) = torch.autograd.grad(output, leaf, gradient.to(output.dtype))
    return result


def statistics(tokens: Tensor, shape: tuple[int, ...], eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """Mean and 1/deviation over the last axes, in float32 at least."""
    tokens = at_least_float32(tokens)
    axes = tuple(range(-len(shape), 0))
    if centred:
        # By the kernel for layer normalisation, which takes a twentieth of the time of torch.var_mean.
        _, mean, inverse_deviation = torch.native_layer_norm(tokens, shape, None, None, eps)
        return mean, inverse_deviation
    variance = tokens.square().mean(axes, keepdim=True)
    return torch.zeros_like(tokens[..., :1]), torch.rsqrt(variance + eps)


class Rule:
    """The ``plain`` rule, ordinary autograd, and the base of all others.

    Attributes:
        name: how it is spelled, as in ``ixg:rule=libra``.
        softmax: of attention. ``constant``: A is a constant and no gradient reaches q and k.
        attention_product: of A and V. ``half``: each factor of A V, and of q kᵀ, gets half the gradient, unless A is a
            constant; ``none``: no gradient passes through attention, only past it along the residual stream.
        normalisation: ``constant``: the deviation is a constant, so the norm is a linear map.
        activation: ``ratio``: f(u) is u times the constant f(u)/u.
        gate: a sigmoid or tanh that multiplies something. ``constant``: no gradient reaches its input.
        product: of two streams, such as SwiGLU's. ``half``: each factor gets half the gradient.
        length: that a feature is divided by after the blocks. ``constant``: no gradient passes through it.
        carries_relevance: whether relevance is passed on instead of a gradient. Such a rule treats linear layers, sums,
            scales, pooling, dropout and the patch embedding, too: ``backward_linear``, ``backward_sum`` and so on.
        treats_linear: whether a rule with gradients treats linear layers and convolutions as well, in
            ``backward_call``, which gets what autograd would otherwise pass on.
        scales_modules: whether the relevance of every module is scaled by itself, so that dropout counts as one.
    """

    name: ClassVar[str] = "plain"
    softmax: ClassVar[Literal["gradient", "constant"]] = "gradient"
    attention_product: ClassVar[Literal["full", "half", "none"]] = "full"
    normalisation: ClassVar[Literal["gradient", "constant"]] = "gradient"
    activation: ClassVar[Literal["gradient", "ratio"]] = "gradient"
    gate: ClassVar[Literal["gradient", "constant"]] = "gradient"
    product: ClassVar[Literal["full", "half"]] = "full"
    length: ClassVar[Literal["gradient", "constant"]] = "gradient"
    carries_relevance: ClassVar[bool] = False
    treats_linear: ClassVar[bool] = False
    scales_modules: ClassVar[bool] = False

    @property
    def reads_plain_attention(self) -> bool:
        """Whether it uses the ordinary gradients of attention, which a fused kernel gives."""
        return self.softmax == "gradient" and self.attention_product != "none" and not self.carries_relevance

    @property
    def follows_scores(self) -> bool:
        """Whether it treats attention as a whole, from q kᵀ to A v, also where a model writes it out."""
        own = type(self).backward_attention is not Rule.backward_attention
        return own or self.attention_product != "full" or self.carries_relevance

    @property
    def treats_steps(self) -> bool:
        """Whether what it does to attention can be done step by step: a share at each product, softmax, all between."""
        return type(self).backward_attention is Rule.backward_attention and not self.carries_relevance

    @property
    def treats_products(self) -> bool:
        """Whether a product of two streams has another gradient than the ordinary one."""
        own = type(self).backward_product is not Rule.backward_product
        return own or self.product == "half" or self.carries_relevance

    def backward_attention(self, call: AttentionRecord, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """dq, dk, dv from the gradient at O = A V; ``None`` for nothing."""
        if self.attention_product == "none":
            return None, None, None
        if self.softmax == "constant":
            return None, None, value_gradient(call, gradient)
        query, key, value = plain_gradients(call, gradient)
        if self.attention_product == "half":
            # Half through A V; of A's half, half through q kᵀ.
            return query.div_(4), key.div_(4), value.div_(2)
        return query, key, value

    def backward_softmax(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient at scores, where attention is written out and not treated as a whole."""
        return None if self.softmax == "constant" else call.gradient(gradient)

    def backward_shared(self, gradient: Tensor) -> Tensor:
        """The gradient that a product inside attention, q kᵀ or A v, hands on to both factors."""
        if self.attention_product == "none":
            return torch.zeros_like(gradient)
        return gradient / 2 if self.attention_product == "half" and self.softmax != "constant" else gradient

    def backward_pooling(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient at the scores by which a head weighs tokens; products there are not halved."""
        return None if self.softmax == "constant" else call.gradient(gradient)

    def backward_norm(self, call: NormCall, gradient: Tensor) -> Tensor:
        """The gradient at the input of a LayerNorm or RMSNorm."""
        if self.normalisation == "constant":
            return linear_norm_gradient(call, gradient)
        if call.mean is None:
            return vector_jacobian(call.function, call.input, gradient)
        backward = torch.ops.aten.native_layer_norm_backward
        inputs = (gradient, call.input, call.shape, call.mean, call.inverse_deviation, call.weight, None)
        result: Tensor = backward(*inputs, [True, False, False])[0]
        return result

    def backward_deviation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient through the deviation of a normalisation that a model writes out itself."""
        return None if self.normalisation == "constant" else call.gradient(gradient)

    def backward_activation(self, call: ElementwiseCall, gradient: Tensor) -> Tensor:
        """The gradient at the input of an activation function."""
        return call.ratio().mul_(gradient) if self.activation == "ratio" else call.gradient(gradient)

    def backward_gate(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient at the input of a sigmoid or tanh that multiplies something."""
        return None if self.gate == "constant" else call.gradient(gradient)

    def backward_length(self, call: ElementwiseCall, gradient: Tensor) -> Tensor | None:
        """The gradient through the length that a feature is divided by."""
        return None if self.length == "constant" else call.gradient(gradient)

    def backward_product(self, left: Tensor, right: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients at the factors of a product of two streams."""
        share = gradient / 2 if self.product == "half" else gradient
        return (share * right).sum_to_size(left.shape), (share * left).sum_to_size(right.shape)

    def backward_call(self, call: Call, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients at the inputs of a linear layer, sum or scale, which only relevance treats in another way."""
        return call.gradients(inputs, gradient)


class FrozenRule(Rule):
    """Attention matrix, normalisation variance (not its mean) and activation gate f(u)/u held constant.

    Input x gradient under this rule is DecompX without bias (SkipPLUS sec. 3; methods are compared there), because a
    forward decomposition is linear once these three are constants, and a backward pass is its transpose. A product of
    two streams (SwiGLU), which DecompX does not have, counts twice here; ``libra`` conserves it.
    """

    name = "frozen"
    softmax = "constant"
    normalisation = "constant"
    activation = "ratio"
    gate = "constant"


class LibraRule(FrozenRule):
    """Frozen, with half the gradient to each factor of a gated product and unit lengths held constant.

    LibraGrad (Mehri et al., CVPR 2025): pruned and scaled this way the gradient is complete; inputs and biases times
    gradient add up to the output.
    """

    name = "libra"
    product = "half"
    length = "constant"


class AttnLrpRule(Rule):
    """AttnLRP (Achtibat et al., ICML 2024) as a gradient: input x gradient under this rule is its relevance.

    Variance, length and activation gate are constants (identity rule, eq. 9), softmax has its ordinary gradient
    (Taylor, eq. 13), and every product of two streams gives half the gradient to each (uniform rule, eq. 7): A V, q kᵀ
    and gated products.
    """

    name = "attnlrp"
    attention_product = "half"
    normalisation = "constant"
    activation = "ratio"
    gate = "constant"
    product = "half"
    length = "constant"


class ConservativeRule(Rule):
    """Conservative LRP (Ali et al., ICML 2022): A and the normalisation variance are constants, activations are not."""

    name = "conservative"
    softmax = "constant"
    normalisation = "constant"


class ResidualRule(Rule):
    """Nothing passes back through attention; the gradient goes down by the residual stream and the feed-forward part.

    AGCAM's program detaches the attention's input.
    """

    name = "residual"
    attention_product = "none"


def linear_norm_gradient(call: NormCall, gradient: Tensor) -> Tensor:
    """Through a norm with constant deviation: subtract the mean (LayerNorm only), times weight / deviation."""
    scaled = gradient * call.inverse_deviation
    if call.weight is not None:
        scaled = scaled.mul_(call.weight)
    if call.centred:
        scaled = scaled.sub_(scaled.mean(call.axes, keepdim=True))
    return scaled
