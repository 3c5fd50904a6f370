"""Where a rule takes hold besides attention: normalisation, activation, gates, gated products, lengths, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitreous.tape import interception as heard
from vitreous.tape.functions import Elementwise, InForce, Kind, Normalise, Product
from vitreous.tape.plan import Plan
from vitreous.tape.progress import Progress
from vitreous.tape.rulebook import RULES
from vitreous.tape.rules import ElementwiseCall

# mypy: disable-error-code="no-untyped-call"


class RuleListener:
    """Puts the non-linear parts of a forward pass under the rule in force and notes biases where they are wanted."""

    def __init__(self, plan: Plan, progress: Progress, in_force: InForce) -> None:
        self._plan, self._progress, self._in_force = plan, progress, in_force
        # With the plain rule alone autograd itself does the right thing and nothing is replaced.
        self.rules_differ = bool(plan.rules - {"plain"})
        rules = [RULES[name] for name in plan.rules]
        self.products_matter = any(rule.halves_products or rule.carries_relevance for rule in rules)
        self._gates: list[Tensor] = []

    def forget(self) -> None:
        """Another block begins: the gates of the last one are gone."""
        self._gates.clear()

    def is_gate(self, value: Any) -> bool:
        """Whether a tensor only weighs something else."""
        return any(gate is value for gate in self._gates)

    def on_layer_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Layer normalisation; its bias counts."""
        output = self._normalise(func, args, kwargs, eps=_argument(args, kwargs, 4, "eps", 1e-5), centred=True)
        self._note_bias(output, _argument(args, kwargs, 3, "bias", None))
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
        if not tokens.requires_grad or not self.rules_differ:
            return func(*args, **kwargs)
        shape = tuple(_argument(args, kwargs, 1, "normalized_shape", None))
        weight = _argument(args, kwargs, 2, "weight", None)
        return Normalise.apply(tokens, weight, shape, eps, centred, _of_first(func, args, kwargs), self._in_force)

    def on_activation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An activation function; what a rule's slope leaves unexplained counts as a bias."""
        return self._activate(func, args, kwargs, heard.ACTIVATIONS[func])

    def on_gate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a block these weigh something (hand-written GELU, gated attention, RMSNorm); a head may end in one."""
        if not self._progress.inside_block:
            return func(*args, **kwargs)
        gate = self._elementwise(func, args, kwargs, 0.0, "gate")
        self._gates.append(gate)
        return gate

    def on_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Behind the blocks a feature may be divided by its length."""
        if not self._progress.behind:
            return func(*args, **kwargs)
        return self._elementwise(func, args, kwargs, 0.0, "length")

    def on_normalize(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``F.normalize``, which is a division by the length."""
        if not self._progress.behind or not _in_graph(args[0]):
            return func(*args, **kwargs)
        power, axis, eps = (
            _argument(args, kwargs, place, name, default)
            for place, name, default in ((1, "p", 2.0), (2, "dim", 1), (3, "eps", 1e-12))
        )
        length = self._elementwise(
            torch.linalg.vector_norm, (args[0],), {"ord": power, "dim": axis, "keepdim": True}, 0.0, "length"
        )
        return args[0] / length.clamp_min(eps)

    def on_multiply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product of two streams inside a block, unless one of them is only a gate."""
        in_graph = len(args) > 1 and _in_graph(args[0]) and _in_graph(args[1])
        if not (self.products_matter and in_graph and self._progress.inside_block):
            output = func(*args, **kwargs)
            self._pass_on_gate(args, output)
            return output
        if any(self.is_gate(factor) for factor in args[:2]):
            return func(*args, **kwargs)
        return Product.apply(args[0], args[1], self._in_force)

    def on_add(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A gate plus a constant is a gate: 1 + tanh(...) of a hand-written GELU."""
        output = func(*args, **kwargs)
        self._pass_on_gate(args, output)
        return output

    def _pass_on_gate(self, args: tuple[Any, ...], output: Any) -> None:
        if self._gates and isinstance(output, Tensor) and len(args) > 1:
            gates = [self.is_gate(value) for value in args[:2]]
            if any(gates) and all(gate or not _in_graph(value) for gate, value in zip(gates, args[:2], strict=True)):
                self._gates.append(output)

    def on_linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer; its bias counts."""
        output = func(*args, **kwargs)
        self._note_bias(output, _argument(args, kwargs, 2, "bias", None))
        return output

    # Biases ----------------------------------------------------------------------------------------------------------

    def _note_bias(self, output: Tensor, bias: Tensor | None) -> None:
        """Have bias x gradient added up, per token, in every backward pass that asks for it."""
        layer, in_force = self._progress.layer, self._in_force
        if bias is None or layer not in self._plan.biases or not output.requires_grad:
            return
        constant = bias.detach()
        output.register_hook(lambda gradient: in_force.add_bias(layer, lambda: (gradient * constant).sum(-1)))

    def _activate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slope_at_zero: float
    ) -> Any:
        output = self._elementwise(func, args, kwargs, slope_at_zero, "activation")
        layer, in_force = self._progress.layer, self._in_force
        if layer in self._plan.biases and output.requires_grad:
            call = ElementwiseCall(args[0].detach(), _of_first(func, args, kwargs), slope_at_zero)

            def residue(gradient: Tensor) -> Tensor | None:
                left = in_force.rule.residue(call)
                return None if left is None else (gradient * left).sum(-1)

            output.register_hook(lambda gradient: in_force.add_bias(layer, lambda: residue(gradient)))
        return output

    def _elementwise(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slope_at_zero: float, kind: Kind
    ) -> Any:
        if not self.rules_differ or not _in_graph(args[0]):
            return func(*args, **kwargs)
        return Elementwise.apply(args[0], _of_first(func, args, kwargs), slope_at_zero, kind, self._in_force)


def _of_first(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The call as a function of its first argument, never in place."""
    options = {name: value for name, value in kwargs.items() if name != "inplace"}

    def function(value: Tensor) -> Tensor:
        result: Tensor = func(value, *args[1:], **options)
        return result

    return function


def _in_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
