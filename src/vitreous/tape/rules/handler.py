"""Where a rule takes hold besides attention: normalisation, activation, gates, gated products, lengths, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitreous.architecture import Architecture
from vitreous.errors import UnsupportedModelError
from vitreous.tape.recording import torch_functions as ops
from vitreous.tape.recording.gradient_breaks import is_constant
from vitreous.tape.recording.interception import Handler, Progress, in_graph, of_first
from vitreous.tape.recording.plan import Plan
from vitreous.tape.rules import RULES
from vitreous.tape.rules.autograd import (
    ActiveRule,
    Elementwise,
    Kind,
    Normalise,
    Product,
    RemainderHook,
    kind_of,
    mark_as_activation,
)
from vitreous.tape.rules.biases import BiasRecorder

# mypy: disable-error-code="no-untyped-call"


class RuleHandler:
    """Puts the non-linear parts of a forward pass under the rule in force and notes biases where they are wanted.

    Attributes:
        biases: what has been noted of them.
    """

    def __init__(self, plan: Plan, progress: Progress, active_rule: ActiveRule, architecture: Architecture) -> None:
        self._progress, self._active_rule = progress, active_rule
        self.biases = BiasRecorder(plan, progress, active_rule, architecture)
        # With the plain rule alone autograd itself does the right thing and nothing is replaced.
        self.rules_differ = bool(plan.rules - {"plain"})
        rules = [RULES[name] for name in plan.rules]
        self.products_matter = any(rule.halves_products or rule.carries_relevance for rule in rules)
        self._gates: list[Tensor] = []
        self._deviations: list[Tensor] = []

    def forget(self) -> None:
        """Another block begins: the gates of the last one are gone."""
        self._gates.clear()
        self._deviations.clear()

    def is_gate(self, value: Any) -> bool:
        """Whether a tensor only weighs something else."""
        return _among(self._gates, value)

    def on_layer_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Layer normalisation; its bias counts."""
        output = self._normalise(func, args, kwargs, eps=_argument(args, kwargs, 4, "eps", 1e-5), centred=True)
        self.biases.record(output, _argument(args, kwargs, 3, "bias", None))
        return output

    def on_batch_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Batch normalisation in evaluation: a constant scale, and a shift, which is a bias."""
        mark_as_activation(args[0])
        output = func(*args, **kwargs)
        if self.biases.active and in_graph(output):
            self.biases.record_channels(output, _batch_norm_shift(*args, **kwargs))
        return output

    def on_group_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Group normalisation: groups of channels and all places together; its bias counts."""
        grid, groups = args[0], _argument(args, kwargs, 1, "num_groups", 1)
        weight, bias = (_argument(args, kwargs, place, name, None) for place, name in ((2, "weight"), (3, "bias")))
        mark_as_activation(grid)
        if not grid.requires_grad or not self.rules_differ:
            output = func(*args, **kwargs)
        else:
            flat, eps = grid.reshape(len(grid), groups, -1), _argument(args, kwargs, 4, "eps", 1e-5)
            shape = (flat.shape[-1],)

            def normalise(values: Tensor) -> Tensor:
                return torch.nn.functional.layer_norm(values, shape, eps=eps)

            output = Normalise.apply(flat, None, shape, eps, True, normalise, self._active_rule).reshape(grid.shape)  # noqa: FBT003
            channels = (-1, *[1] * (grid.dim() - 2))
            output = output if weight is None else output * weight.view(channels)
            output = output if bias is None else output + bias.view(channels)
        if bias is not None:
            self.biases.record_channels(output, bias)
        return output

    def on_added_product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.addcmul``: a constant that is added to a scaled stream, as affine layers are written, is a bias."""
        output = func(*args, **kwargs)
        if is_constant(args[0]) and sum(map(in_graph, args[1:])) == 1:
            self.biases.record(output, args[0].expand(output.shape))
        return output

    def on_join(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Constants that are put beside tokens, as class tokens of a later stage are, count as biases."""
        output = func(*args, **kwargs)
        parts = _argument(args, kwargs, 0, "tensors", ())
        if self.biases.active and in_graph(output) and any(map(is_constant, parts)):
            constants = [part.detach() if is_constant(part) else torch.zeros_like(part) for part in parts]
            self.biases.record(output, func(constants, *args[1:], **kwargs))
        return output

    def on_rms_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """RMS normalisation."""
        eps = _argument(args, kwargs, 3, "eps", None)
        eps = torch.finfo(args[0].dtype).eps if eps is None else eps
        return self._normalise(func, args, kwargs, eps=eps, centred=False)

    def _normalise(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, eps: float, centred: bool
    ) -> Any:
        tokens = args[0]
        mark_as_activation(tokens)
        if not tokens.requires_grad or not self.rules_differ:
            return func(*args, **kwargs)
        shape = tuple(_argument(args, kwargs, 1, "normalized_shape", None))
        weight = _argument(args, kwargs, 2, "weight", None)
        return Normalise.apply(tokens, weight, shape, eps, centred, of_first(func, args, kwargs), self._active_rule)

    def on_activation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An activation function."""
        return self._weigh(func, args, kwargs, ops.ACTIVATIONS[func], "activation")

    def on_gate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a block these weigh something (hand-written GELU, gated attention); a head's tanh is an activation."""
        if self._progress.after_blocks and func in ops.TANH:
            return self._weigh(func, args, kwargs, 1.0, "activation")
        if not self._progress.inside_block:
            return func(*args, **kwargs)
        gate = self._weigh(func, args, kwargs, ops.GATES[func], "gate")
        self._gates.append(gate)
        return gate

    def on_deviation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The deviation of a hand-written normalisation, or 1/deviation."""
        if self._progress.layer is None:
            return func(*args, **kwargs)
        deviation = self._elementwise(func, args, kwargs, 0.0, "deviation")
        self._deviations.append(deviation)
        return deviation

    def on_deviation_and_mean(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.std_mean``."""
        _, mean = func(*args, **kwargs)
        return self.on_deviation(torch.std, args, kwargs), mean

    def on_deviation_step(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is made of a deviation alone is one: 1/deviation, or one that is kept from 0."""
        output = func(*args, **kwargs)
        self._pass_on_deviation(args, output)
        return output

    def on_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A root or a norm: the deviation of tokens; of the pooled feature behind the blocks, its length."""
        if self._progress.after_blocks and args[0].dim() == 2:
            return self._elementwise(func, args, kwargs, 0.0, "length")
        return self.on_deviation(func, args, kwargs)

    def on_power(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A root may be written as a power; a power of an activation is one: squared ReLU."""
        exponent = _argument(args, kwargs, 1, "exponent", None)
        if not isinstance(exponent, int | float):
            return func(*args, **kwargs)
        if exponent > 1:
            return self.on_square(func, args, kwargs)
        chosen = {0.5: self.on_length, -0.5: self.on_deviation}.get(exponent)
        return func(*args, **kwargs) if chosen is None else chosen(func, args, kwargs)

    def on_square(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of an activation, an activation; in a norm or in a written-out GELU, nothing by itself."""
        if kind_of(args[0]) != "activation":
            return func(*args, **kwargs)
        return self._weigh(func, args, kwargs, 0.0, "activation")

    def on_normalize(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``F.normalize``, which is a division by the length."""
        if self._progress.layer is None or not in_graph(args[0]):
            return func(*args, **kwargs)
        power, axis, eps = (
            _argument(args, kwargs, place, name, default)
            for place, name, default in ((1, "p", 2.0), (2, "dim", 1), (3, "eps", 1e-12))
        )
        options = {"ord": power, "dim": axis, "keepdim": True}
        length = self.on_length(torch.linalg.vector_norm, (args[0],), options)
        return args[0] / length.clamp_min(eps)

    def on_multiply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product of two streams inside a block, unless one of them is only a gate."""
        if self._halves(args):
            return Product.apply(args[0], args[1], self._active_rule)
        return self._multiply(func, args, kwargs)

    def on_multiply_in_place(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product that takes the place of its first factor, which the way back needs as it was."""
        if self._halves(args):
            return args[0].copy_(Product.apply(args[0].clone(), args[1], self._active_rule))
        return self._multiply(func, args, kwargs)

    def _halves(self, args: tuple[Any, ...]) -> bool:
        """Whether a rule may give half to each factor."""
        weighs = any(self.is_gate(value) or _among(self._deviations, value) for value in args[:2])
        return self.products_matter and self._are_streams(args) and not weighs

    def _are_streams(self, args: tuple[Any, ...]) -> bool:
        return len(args) > 1 and in_graph(args[0]) and in_graph(args[1]) and self._progress.inside_block

    def _multiply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gates, streams = [self.is_gate(value) for value in args[:2]], self._are_streams(args)
        output = func(*args, **kwargs)
        if streams and any(gates) and not all(gates):
            self.biases.record_gated(output)
        self._pass_on_gate(args, output)
        self._pass_on_deviation(args, output)
        return output

    def over_division(self, inner: Handler) -> Handler:
        """``inner``, which divides: a gate divided by a constant is a gate, tanh(u) / 2 as well as tanh(u) * 0.5."""

        def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = inner(func, args, kwargs)
            if len(args) > 1 and self.is_gate(args[0]):
                self._pass_on_gate(args, output)
            return output

        return handler

    def on_gated(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``F.glu``: the first half times a sigmoid of the second."""
        if not self._progress.inside_block or not in_graph(args[0]):
            return func(*args, **kwargs)
        stream, gate = args[0].chunk(2, dim=_argument(args, kwargs, 1, "dim", -1))
        return self.on_multiply(torch.mul, (stream, self.on_gate(torch.sigmoid, (gate,), {})), {})

    def on_add(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A gate plus a constant is a gate: 1 + tanh(...) of a hand-written GELU. Other constants are biases."""
        return self._sum(func, args, kwargs, (1, kwargs.get("alpha", 1)))

    def on_subtract(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A difference."""
        return self._sum(func, args, kwargs, (1, -kwargs.get("alpha", 1)))

    def on_subtract_from(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The second minus the first."""
        return self._sum(func, args, kwargs, (-kwargs.get("alpha", 1), 1))

    def on_addmm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A bias plus a product."""
        self._enter_product(args[1:])
        return self._sum(func, args, kwargs, (kwargs.get("beta", 1),))

    def before_product(self, inner: Handler) -> Handler:
        """``inner``, which multiplies matrices: with a constant one it is a linear layer."""

        def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._enter_product(args)
            return inner(func, args, kwargs)

        return handler

    @staticmethod
    def _enter_product(args: tuple[Any, ...]) -> None:
        if len(args) > 1 and not in_graph(args[1]):
            mark_as_activation(args[0])

    def _sum(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], factors: tuple[float, ...]
    ) -> Any:
        constants = zip(args, factors, strict=False) if self.biases.active and any(map(in_graph, args)) else ()
        # As they are before the call, which may change its first operand.
        added = [value * factor for value, factor in constants if is_constant(value)]
        biases = [value for value in added if isinstance(value, Tensor)]
        operands = [value for value in args[:2] if in_graph(value)]
        output = func(*args, **kwargs)
        if self._pass_on_gate(args, output):
            self.biases.record_shifted(output, added)
        elif not self._pass_on_deviation(args, output):
            for bias in biases:
                self.biases.record(output, bias)
            for value in operands:
                # With a constant alone, it may still be on its way to weigh something: tanh(u) / 2 + 1 / 2.
                mark_as_activation(value, as_made=len(operands) == 1)
        return output

    def _pass_on_gate(self, args: tuple[Any, ...], output: Any) -> bool:
        """Whether the output is a gate because one operand is and the other has no gradient."""
        return _pass_on(self._gates, args, output)

    def _pass_on_deviation(self, args: tuple[Any, ...], output: Any) -> bool:
        """Whether the output is a deviation, or one plus what keeps it from 0, in the same way."""
        return _pass_on(self._deviations, args, output)

    def on_linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer; its bias counts."""
        mark_as_activation(args[0])
        output = func(*args, **kwargs)
        self.biases.record(output, _argument(args, kwargs, 2, "bias", None))
        return output

    def on_convolution(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A convolution in a block or behind: a linear layer whose channels lie along the second axis."""
        mark_as_activation(args[0])
        output = func(*args, **kwargs)
        bias = _argument(args, kwargs, 2, "bias", None)
        if bias is not None:
            self.biases.record_channels(output, bias)
        return output

    def on_opened_linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer that is part of an opened-up call, where the batch always comes first."""
        mark_as_activation(args[0])
        output = func(*args, **kwargs)
        self.biases.record(output, _argument(args, kwargs, 2, "bias", None), tokens_first=False)
        return output

    def _weigh(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slope_at_zero: float, kind: Kind
    ) -> Any:
        """An activation or gate; what a rule's slope leaves unexplained of it counts as a bias."""
        note = self.biases.remainder_hook(args[0])
        value = (
            float(of_first(func, args, kwargs)(torch.zeros((), dtype=torch.float64))) if func in ops.NOT_0_AT_0 else 0.0
        )
        return self._elementwise(func, args, kwargs, slope_at_zero, kind, note, value)

    def _elementwise(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        slope_at_zero: float,
        kind: Kind,
        note: RemainderHook | None = None,
        value_at_zero: float = 0.0,
    ) -> Any:
        if note is None and not (self.rules_differ and in_graph(args[0])):
            return func(*args, **kwargs)
        function = of_first(func, args, kwargs)
        return Elementwise.apply(args[0], function, slope_at_zero, kind, self._active_rule, note, value_at_zero)


def _batch_norm_shift(  # the signature of batch_norm
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """What is added to every channel: bias - mean weight / deviation, (channels,)."""
    del momentum
    if training or running_mean is None or running_var is None:
        raise UnsupportedModelError(
            "the model normalises over the images of a batch, also in evaluation (BatchNorm without running "
            "statistics), so that what of it counts as a bias is not known"
        )
    shift = -running_mean / (running_var + eps).sqrt()
    shift = shift if weight is None else shift * weight
    return (shift if bias is None else shift + bias).to(input.dtype)


def _pass_on(tensors: list[Tensor], args: tuple[Any, ...], output: Any) -> bool:
    """Put the output among some tensors if one operand is and the other has no gradient."""
    known = [_among(tensors, value) for value in args[:2]]
    tensors[:] = [tensor for tensor in tensors if tensor is not output]  # one that was changed in place
    if not any(known) or any(in_graph(value) and not one for one, value in zip(known, args[:2], strict=True)):
        return False
    tensors.append(output)
    return True


def _among(tensors: list[Tensor], value: Any) -> bool:
    return any(tensor is value for tensor in tensors)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
