"""Parts of a forward pass that gradients pass through by themselves and relevance does not: linear maps, sums, scales.

A call knows how to run and what an ordinary gradient becomes; a rule that carries relevance has a method for its
``kind``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass
class Call:
    """One call as a function of the tensors that relevance may flow to; ``kind`` names the rule's method for it."""

    function: Callable[..., Tensor]
    kind: ClassVar[Literal["linear", "sum", "scale", "pool", "same", "embedding"]]

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The ordinary gradients at the inputs, by running the call once more."""
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in inputs]
            output = self.function(*leaves)
            return torch.autograd.grad(output, leaves, gradient.to(output.dtype))


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


class SameCall(Call):
    """Dropout in evaluation: what enters comes out."""

    kind = "same"

    def gradients(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        """What arrives."""
        del inputs
        return (gradient,)


class LengthCall(Call):
    """Vectors divided by their length: a norm."""

    kind = "same"


@dataclass
class EmbeddingCall(Call):
    """The convolution that makes patches of the picture; ``convolve`` is it with any weight, without bias."""

    weight: Tensor
    convolve: Callable[[Tensor, Tensor], Tensor]
    kind = "embedding"
