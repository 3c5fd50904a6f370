"""Autograd functions whose backward pass follows the active rule: attention, normalisation, activation, product.

Each gets the recorder's ``ActiveRule`` when it is recorded; the tape sets the rule before every backward pass. There is
no global state, so threads do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vitreous.tape.attention.record import AttentionRecord
from vitreous.tape.rules.abslrp import ConstantStatisticsRule
from vitreous.tape.rules.gradient_rules import Call, ElementwiseCall, NormCall, Rule, statistics

# mypy: disable-error-code="no-untyped-call,override"


_OTHER_SHAPE = {"ViewBackward0", "UnsafeViewBackward0"}
_SAME_NUMBERS = {*_OTHER_SHAPE, "TransposeBackward0", "PermuteBackward0", "CloneBackward0"}
_CONSTANT_STEPS = {
    *("MulBackward0", "DivBackward0", "AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0"),
}
Kind = Literal["activation", "softmax", "pooling", "gate", "deviation", "length"]
RemainderHook = Callable[[ElementwiseCall, Tensor, Tensor], None]  # called with the gradients at output and input


@dataclass
class ActiveRule:
    """The rule that a backward pass through one tape follows, and what it adds up on its way.

    Attributes:
        rule: the rule.
        biases: bias x gradient by layer, (batch, tokens) or, after the pooling, (batch,); ``None`` where not wanted.
    """

    rule: Rule
    biases: dict[int, list[Tensor]] | None = None

    def wants_biases_of(self, layer: int) -> bool:
        """Whether the running pass needs the biases of a block."""
        return self.biases is not None and layer in self.biases

    def add_bias(self, layer: int, contribution: Tensor) -> None:
        """Note what a bias contributes to the running pass."""
        assert self.biases is not None
        self.biases[layer].append(contribution)


def gradient_between(active_rule: ActiveRule, output: Tensor, source: Tensor, gradient: Tensor) -> Tensor | None:
    """What ``gradient`` at ``output`` becomes at ``source``, called from inside a backward pass under another rule."""
    if not (output.requires_grad and source.requires_grad):
        return None
    rule, active_rule.rule = active_rule.rule, ConstantStatisticsRule()
    try:
        return torch.autograd.grad(output, source, gradient, retain_graph=True, allow_unused=True)[0]
    finally:
        active_rule.rule = rule


def share(product: Tensor, active_rule: ActiveRule) -> None:
    """Leave both factors of a product inside attention what the active rule says, where it is treated step by step."""

    def left_to_factors(gradient: Tensor) -> Tensor:
        return active_rule.rule.backward_shared(gradient)

    product.register_hook(left_to_factors)


class Attend(torch.autograd.Function):
    """O = A V with A = softmax(scale q kᵀ + bias); ``forward_call`` returns O for plain tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        forward_call: Callable[[], Tensor],
        record: AttentionRecord,
        active_rule: ActiveRule,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        # A stays out of save_for_backward: it is not an input or output, and the record may own it already.
        ctx.scale, ctx.bias, ctx.matrix, ctx.active_rule = record.scale, record.bias, record.matrix, active_rule
        ctx.fused, ctx.head_scale = record.fused, record.head_scale
        return forward_call()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        record = AttentionRecord(
            query, key, value, ctx.scale, ctx.bias, ctx.matrix, fused=ctx.fused, head_scale=ctx.head_scale
        )
        return (*ctx.active_rule.rule.backward_attention(record, gradient.to(value.dtype)), None, None, None)


class Normalise(torch.autograd.Function):
    """LayerNorm or RMSNorm. ``function`` is the model's own call as a function of its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        centred: bool,  # noqa: FBT001
        function: Callable[[Tensor], Tensor],
        active_rule: ActiveRule,
    ) -> Tensor:
        mean, inverse_deviation = statistics(tokens, shape, eps, centred=centred)
        ctx.save_for_backward(tokens, mean, inverse_deviation, weight)
        ctx.shape, ctx.eps, ctx.centred, ctx.function, ctx.active_rule = shape, eps, centred, function, active_rule
        return function(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, mean, inverse_deviation, weight = ctx.saved_tensors
        # The fused backward kernel wants one dtype throughout; mixed precision takes the general way.
        fused = ctx.centred and weight is not None and weight.dtype == tokens.dtype == gradient.dtype == mean.dtype
        call = NormCall(
            tokens, inverse_deviation, mean if fused else None, weight, ctx.shape, ctx.eps, ctx.centred, ctx.function
        )
        return (ctx.active_rule.rule.backward_norm(call, gradient).to(tokens.dtype), *[None] * 6)


class Elementwise(torch.autograd.Function):
    """An activation, a softmax or gate that weighs something, or a deviation or length that something is divided by."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        function: Callable[[Tensor], Tensor],
        slope_at_zero: float,
        kind: Kind,
        active_rule: ActiveRule,
        remainder_hook: RemainderHook | None = None,
        value_at_zero: float = 0.0,
    ) -> Tensor:
        # Only the input is kept; a rule that wants the output runs the function again, which is cheaper than memory.
        ctx.save_for_backward(tokens)
        ctx.function, ctx.slope_at_zero, ctx.kind, ctx.active_rule = function, slope_at_zero, kind, active_rule
        ctx.remainder_hook, ctx.value_at_zero = remainder_hook, value_at_zero
        return function(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        call = ElementwiseCall(tokens, ctx.function, ctx.slope_at_zero, ctx.value_at_zero)
        result: Tensor | None = getattr(ctx.active_rule.rule, f"backward_{ctx.kind}")(call, gradient)
        if ctx.remainder_hook is not None and result is not None:
            ctx.remainder_hook(call, gradient, result)
        return (result, *[None] * 6)


def kind_of(tensor: Any) -> Kind | None:
    """What kind of function a tensor came out of, if it was put under a rule; views of it count as itself."""
    kind: Kind | None = getattr(_made_by(tensor), "kind", None)
    return kind


def followed_call(tensor: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    """The call that gave a tensor, perhaps in another shape, if relevance is followed through it, and its inputs."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _OTHER_SHAPE:
        node = node.next_functions[0][0]
    call = getattr(node, "call", None)
    return call, () if call is None else node.saved_tensors


def mark_as_activation(tensor: Any, *, as_made: bool = False) -> None:
    """A sigmoid or tanh whose output is used as it is, and not to weigh something, was an activation.

    So was one that constants were multiplied with or added to before, c tanh(u) + b, unless it counts ``as_made`` only.
    """
    origin = _made_by(tensor) if as_made else origin_of(tensor)
    if getattr(origin, "kind", None) == "gate":
        origin.kind = "activation"


def origin_of(tensor: Any) -> Any:
    """The step of the way back that leads to a tensor, or to what it was made of by constants alone."""
    node = _made_by(tensor)
    while node is not None and node.name() in _CONSTANT_STEPS:
        operands = [step for step, _ in node.next_functions if step is not None]
        if len(operands) != 1:
            break
        node = _past_views(operands[0])
    return node


def _made_by(tensor: Any) -> Any:
    """The step of the way back that leads to a tensor, or to what it is a view of."""
    return _past_views(tensor.grad_fn) if isinstance(tensor, Tensor) else None


def _past_views(node: Any) -> Any:
    while node is not None and node.name() in _SAME_NUMBERS:
        node = node.next_functions[0][0]
    return node


class Product(torch.autograd.Function):
    """A product of two streams, such as SwiGLU's; some rules give each factor half of the gradient."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, active_rule: ActiveRule) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.active_rule = active_rule
        return left * right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        return (*ctx.active_rule.rule.backward_product(left, right, gradient), None)


class Follow(torch.autograd.Function):
    """A linear map, sum, scale, pooling, dropout or patch embedding, for rules that carry relevance through it."""

    @staticmethod
    def forward(ctx: Any, call: Call, active_rule: ActiveRule, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.call, ctx.active_rule = call, active_rule
        return call.function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.active_rule.rule.backward_call(ctx.call, ctx.saved_tensors, gradient))
