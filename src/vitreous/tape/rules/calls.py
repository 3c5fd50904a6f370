"""The calls of a forward pass that rules act on, as a rule's ``backward_...`` methods get them.

``NormCall`` and ``ElementwiseCall`` are non-linear; every rule treats them. The others, linear maps, sums, scales, are
left to autograd unless a rule carries relevance.
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

from vitreous._utils.tensors import at_least_float32


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
