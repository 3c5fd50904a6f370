"""Puts normalisation, activations, gates, products and lengths under the active rule, and registers biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitreous.architecture import Architecture
from vitreous.errors import UnsupportedModelError
from vitreous.tape.recording import interception as ops
from vitreous.tape.recording.gradient_breaks import is_constant
from vitreous.tape.recording.interception import Progress, TorchCall, in_graph
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
    """Puts the non-linear parts of a forward pass under the active rule and registers biases where they are needed.

    Attributes:
        biases: what has been noted of them.
    """

    def __init__(self, plan: Plan, progress: Progress, active_rule: ActiveRule, architecture: Architecture) -> None:
        self._progress, self._active_rule = progress, active_rule
        self.biases = BiasRecorder(plan, progress, active_rule, architecture)
        # With the plain rule alone autograd itself does the right thing and nothing is replaced.
        self.rules_differ = bool(plan.rules - {"plain"})
        rules = [RULES[name] for name in plan.rules]
        self.products_matter = any(rule.treats_products for rule in rules)
        self._gates: list[Tensor] = []
        self._deviations: list[Tensor] = []

    def forget(self) -> None:
        """Another block begins: the gates of the last one are gone."""
        self._gates.clear()
        self._deviations.clear()

    def is_gate(self, value: Any) -> bool:
        """Whether a tensor only weighs something else."""
        return _among(self._gates, value)

    def on_layer_norm(self, call: TorchCall) -> Any:
        """Layer normalisation; its bias counts."""
        output = self._normalise(call, eps=call.argument(4, "eps", 1e-5), centred=True)
        self.biases.record(output, call.argument(3, "bias", None))
        return output

    def on_batch_norm(self, call: TorchCall) -> Any:
        """Batch normalisation in evaluation: a constant scale, and a shift, which is a bias."""
        mark_as_activation(call.args[0])
        output = call.proceed()
        if self.biases.active and in_graph(output):
            self.biases.record_channels(output, _batch_norm_shift(*call.args, **call.kwargs))
        return output

    def on_group_norm(self, call: TorchCall) -> Any:
        """Group normalisation: groups of channels and all places together; its bias counts."""
        grid, groups = call.args[0], call.argument(1, "num_groups", 1)
        weight, bias = (call.argument(place, name, None) for place, name in ((2, "weight"), (3, "bias")))
        mark_as_activation(grid)
        if not grid.requires_grad or not self.rules_differ:
            output = call.proceed()
        else:
            flat, eps = grid.reshape(len(grid), groups, -1), call.argument(4, "eps", 1e-5)
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

    def on_added_product(self, call: TorchCall) -> Any:
        """``torch.addcmul``: a constant that is added to a scaled stream, as affine layers are written, is a bias."""
        output = call.proceed()
        if is_constant(call.args[0]) and sum(map(in_graph, call.args[1:])) == 1:
            self.biases.record(output, call.args[0].expand(output.shape))
        return output

    def on_join(self, call: TorchCall) -> Any:
        """Constants that are put beside tokens, as class tokens of a later stage are, count as biases."""
        output = call.proceed()
        parts = call.argument(0, "tensors", ())
        if self.biases.active and in_graph(output) and any(map(is_constant, parts)):
            constants = [part.detach() if is_constant(part) else torch.zeros_like(part) for part in parts]
            self.biases.record(output, call.function(constants, *call.args[1:], **call.kwargs))
        return output

    def on_rms_norm(self, call: TorchCall) -> Any:
        """RMS normalisation."""
        eps = call.argument(3, "eps", None)
        eps = torch.finfo(call.args[0].dtype).eps if eps is None else eps
        return self._normalise(call, eps=eps, centred=False)

    def _normalise(self, call: TorchCall, *, eps: float, centred: bool) -> Any:
        tokens = call.args[0]
        mark_as_activation(tokens)
        if not tokens.requires_grad or not self.rules_differ:
            return call.proceed()
        shape = tuple(call.argument(1, "normalized_shape", None))
        weight = call.argument(2, "weight", None)
        return Normalise.apply(tokens, weight, shape, eps, centred, call.of_first(), self._active_rule)

    def on_activation(self, call: TorchCall) -> Any:
        """An activation function."""
        return self._weigh(call, ops.ACTIVATIONS[call.function], "activation")

    def on_gate(self, call: TorchCall) -> Any:
        """Inside a block these weigh something (hand-written GELU, gated attention); a head's tanh is an activation."""
        if self._progress.after_blocks and call.function in ops.TANH:
            return self._weigh(call, 1.0, "activation")
        if not self._progress.inside_block:
            return call.proceed()
        gate = self._weigh(call, ops.GATES[call.function], "gate")
        self._gates.append(gate)
        return gate

    def on_deviation(self, call: TorchCall) -> Any:
        """The deviation of a hand-written normalisation, or 1/deviation."""
        if self._progress.layer is None:
            return call.proceed()
        deviation = self._elementwise(call, 0.0, "deviation")
        self._deviations.append(deviation)
        return deviation

    def on_deviation_and_mean(self, call: TorchCall) -> Any:
        """``torch.std_mean``."""
        _, mean = call.proceed()
        return self.on_deviation(TorchCall(torch.std, call.args, call.kwargs)), mean

    def on_deviation_step(self, call: TorchCall) -> Any:
        """What is made of a deviation alone is one: 1/deviation, or one that is kept from 0."""
        output = call.proceed()
        self._pass_on_deviation(call.args, output)
        return output

    def on_length(self, call: TorchCall) -> Any:
        """A root or a norm: the deviation of tokens; of the pooled feature after the blocks, its length."""
        if self._progress.after_blocks and call.args[0].dim() == 2:
            return self._elementwise(call, 0.0, "length")
        return self.on_deviation(call)

    def on_power(self, call: TorchCall) -> Any:
        """A root may be written as a power; a power of an activation is one: squared ReLU."""
        exponent = call.argument(1, "exponent", None)
        if not isinstance(exponent, int | float):
            return call.proceed()
        if exponent > 1:
            return self.on_square(call)
        chosen = {0.5: self.on_length, -0.5: self.on_deviation}.get(exponent)
        return call.proceed() if chosen is None else chosen(call)

    def on_square(self, call: TorchCall) -> Any:
        """Of an activation, an activation; in a norm or in a written-out GELU, nothing by itself."""
        if kind_of(call.args[0]) != "activation":
            return call.proceed()
        return self._weigh(call, 0.0, "activation")

    def on_normalize(self, call: TorchCall) -> Any:
        """``F.normalize``, which is a division by the length."""
        if self._progress.layer is None or not in_graph(call.args[0]):
            return call.proceed()
        power, axis, eps = (
            call.argument(place, name, default)
            for place, name, default in ((1, "p", 2.0), (2, "dim", 1), (3, "eps", 1e-12))
        )
        options = {"ord": power, "dim": axis, "keepdim": True}
        length = self.on_length(TorchCall(torch.linalg.vector_norm, (call.args[0],), options))
        return call.args[0] / length.clamp_min(eps)

    def on_multiply(self, call: TorchCall) -> Any:
        """A product of two streams inside a block, unless one of them is only a gate."""
        if self._splits(call.args):
            return Product.apply(call.args[0], call.args[1], self._active_rule)
        return self._multiply(call)

    def on_multiply_in_place(self, call: TorchCall) -> Any:
        """A product that takes the place of its first factor, which the way back needs as it was."""
        if self._splits(call.args):
            return call.args[0].copy_(Product.apply(call.args[0].clone(), call.args[1], self._active_rule))
        return self._multiply(call)

    def _splits(self, args: tuple[Any, ...]) -> bool:
        """Whether a rule may split the gradient between two factors."""
        weighs = any(self.is_gate(value) or _among(self._deviations, value) for value in args[:2])
        return self.products_matter and self._are_streams(args) and not weighs

    def _are_streams(self, args: tuple[Any, ...]) -> bool:
        return len(args) > 1 and in_graph(args[0]) and in_graph(args[1]) and self._progress.inside_block

    def _multiply(self, call: TorchCall) -> Any:
        gates, streams = [self.is_gate(value) for value in call.args[:2]], self._are_streams(call.args)
        output = call.proceed()
        if streams and any(gates) and not all(gates):
            self.biases.record_gated(output)
        self._pass_on_gate(call.args, output)
        self._pass_on_deviation(call.args, output)
        return output

    def on_division(self, call: TorchCall) -> Any:
        """A gate divided by a constant is a gate: tanh(u) / 2 as well as tanh(u) * 0.5."""
        output = call.proceed()
        if len(call.args) > 1 and self.is_gate(call.args[0]):
            self._pass_on_gate(call.args, output)
        return output

    def on_gated(self, call: TorchCall) -> Any:
        """``F.glu``: the first half times a sigmoid of the second."""
        if not self._progress.inside_block or not in_graph(call.args[0]):
            return call.proceed()
        stream, gate = call.args[0].chunk(2, dim=call.argument(1, "dim", -1))
        weights = self.on_gate(TorchCall(torch.sigmoid, (gate,)))
        return self.on_multiply(TorchCall(torch.mul, (stream, weights)))

    def on_add(self, call: TorchCall) -> Any:
        """A gate plus a constant is a gate: 1 + tanh(...) of a hand-written GELU. Other constants are biases."""
        return self._sum(call, (1, call.kwargs.get("alpha", 1)))

    def on_subtract(self, call: TorchCall) -> Any:
        """A difference."""
        return self._sum(call, (1, -call.kwargs.get("alpha", 1)))

    def on_subtract_from(self, call: TorchCall) -> Any:
        """The second minus the first."""
        return self._sum(call, (-call.kwargs.get("alpha", 1), 1))

    def on_addmm(self, call: TorchCall) -> Any:
        """A bias plus a product."""
        self._enter_product(call.args[1:])
        return self._sum(call, (call.kwargs.get("beta", 1),))

    def on_matrix_product(self, call: TorchCall) -> Any:
        """A product with a constant matrix is a linear layer, whose input was an activation and no gate."""
        self._enter_product(call.args)
        return call.proceed()

    @staticmethod
    def _enter_product(args: tuple[Any, ...]) -> None:
        if len(args) > 1 and not in_graph(args[1]):
            mark_as_activation(args[0])

    def _sum(self, call: TorchCall, factors: tuple[float, ...]) -> Any:
        constants = (
            zip(call.args, factors, strict=False) if self.biases.active and any(map(in_graph, call.args)) else ()
        )
        # As they are before the call, which may change its first operand.
        added = [value * factor for value, factor in constants if is_constant(value)]
        biases = [value for value in added if isinstance(value, Tensor)]
        operands = [value for value in call.args[:2] if in_graph(value)]
        output = call.proceed()
        if self._pass_on_gate(call.args, output):
            self.biases.record_shifted(output, added)
        elif not self._pass_on_deviation(call.args, output):
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

    def on_linear(self, call: TorchCall) -> Any:
        """A linear layer; its bias counts."""
        mark_as_activation(call.args[0])
        output = call.proceed()
        self.biases.record(output, call.argument(2, "bias", None))
        return output

    def on_convolution(self, call: TorchCall) -> Any:
        """A convolution in a block or after them: a linear layer whose channels lie along the second axis."""
        if not self._progress.reached_blocks:
            return call.proceed()
        mark_as_activation(call.args[0])
        output = call.proceed()
        bias = call.argument(2, "bias", None)
        if bias is not None:
            self.biases.record_channels(output, bias)
        return output

    def on_opened_linear(self, call: TorchCall) -> Any:
        """A linear layer that is part of an opened-up call, where the batch always comes first."""
        mark_as_activation(call.args[0])
        output = call.proceed()
        self.biases.record(output, call.argument(2, "bias", None), tokens_first=False)
        return output

    def _weigh(self, call: TorchCall, slope_at_zero: float, kind: Kind) -> Any:
        """An activation or gate; what a rule's slope leaves unexplained of it counts as a bias."""
        note = self.biases.remainder_hook(call.args[0])
        value = float(call.of_first()(torch.zeros((), dtype=torch.float64))) if call.function in ops.NOT_0_AT_0 else 0.0
        return self._elementwise(call, slope_at_zero, kind, note, value)

    def _elementwise(
        self,
        call: TorchCall,
        slope_at_zero: float,
        kind: Kind,
        note: RemainderHook | None = None,
        value_at_zero: float = 0.0,
    ) -> Any:
        if note is None and not (self.rules_differ and in_graph(call.args[0])):
            return call.proceed()
        function = call.of_first()
        return Elementwise.apply(call.args[0], function, slope_at_zero, kind, self._active_rule, note, value_at_zero)


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
