"""Where a rule takes hold besides attention: normalisation, activation, gates, gated products, lengths, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitreous.tape import interception as heard
from vitreous.tape.biases import BiasNotes
from vitreous.tape.functions import Elementwise, InForce, Kind, Normalise, NoteResidue, Product
from vitreous.tape.interception import in_graph, of_first
from vitreous.tape.plan import Plan
from vitreous.tape.progress import Progress
from vitreous.tape.rulebook import RULES

# mypy: disable-error-code="no-untyped-call"


class RuleListener:
    """Puts the non-linear parts of a forward pass under the rule in force and notes biases where they are wanted."""

    def __init__(self, plan: Plan, progress: Progress, in_force: InForce, *, batch_first: bool) -> None:
        self._progress, self._in_force = progress, in_force
        self._biases = BiasNotes(plan, progress, in_force, batch_first=batch_first)
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
        self._biases.note(output, _argument(args, kwargs, 3, "bias", None))
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
        return Normalise.apply(tokens, weight, shape, eps, centred, of_first(func, args, kwargs), self._in_force)

    def on_activation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An activation function."""
        return self._weigh(func, args, kwargs, heard.ACTIVATIONS[func], "activation")

    def on_gate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a block these weigh something (hand-written GELU, gated attention); a head's tanh is an activation."""
        if self._progress.behind and func in heard.TANH:
            return self._weigh(func, args, kwargs, 1.0, "activation")
        if not self._progress.inside_block:
            return func(*args, **kwargs)
        gate = self._weigh(func, args, kwargs, 0.0, "gate")
        self._gates.append(gate)
        return gate

    def on_inverse_root(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """1/deviation of a hand-written normalisation."""
        if self._progress.layer is None:
            return func(*args, **kwargs)
        inverse = self._elementwise(func, args, kwargs, 0.0, "deviation")
        self._deviations.append(inverse)
        return inverse

    def on_root(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The deviation of tokens; of the pooled feature behind the blocks, its length."""
        if self._progress.layer is None:
            return func(*args, **kwargs)
        pooled = self._progress.behind and args[0].dim() == 2
        return self._elementwise(func, args, kwargs, 0.0, "length" if pooled else "deviation")

    def on_power(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A root may be written as a power."""
        exponent = _argument(args, kwargs, 1, "exponent", None)
        if not isinstance(exponent, float):
            return func(*args, **kwargs)
        chosen = {0.5: self.on_root, -0.5: self.on_inverse_root}.get(exponent)
        return func(*args, **kwargs) if chosen is None else chosen(func, args, kwargs)

    def on_length(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Behind the blocks a feature may be divided by its length."""
        if not self._progress.behind:
            return func(*args, **kwargs)
        return self._elementwise(func, args, kwargs, 0.0, "length")

    def on_normalize(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``F.normalize``, which is a division by the length."""
        if not self._progress.behind or not in_graph(args[0]):
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
        two_streams = len(args) > 1 and in_graph(args[0]) and in_graph(args[1]) and self._progress.inside_block
        gates = [self.is_gate(value) for value in args[:2]]
        weighs = any(gates) or any(_among(self._deviations, value) for value in args[:2])
        if self.products_matter and two_streams and not weighs:
            return Product.apply(args[0], args[1], self._in_force)
        output = func(*args, **kwargs)
        if two_streams and any(gates) and not all(gates):
            self._biases.note_gated(output)
        else:
            self._pass_on_gate(args, output)
        return output

    def on_add(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A gate plus a constant is a gate: 1 + tanh(...) of a hand-written GELU. Other constants are biases."""
        output = func(*args, **kwargs)
        if self._pass_on_gate(args, output):
            self._biases.note_shifted(output)
        else:
            constant = next((value for value in args[:2] if isinstance(value, Tensor) and not in_graph(value)), None)
            self._biases.note(output, constant)
        return output

    def _pass_on_gate(self, args: tuple[Any, ...], output: Any) -> bool:
        """Whether the output is a gate because one operand is and the other has no gradient."""
        gates = [self.is_gate(value) for value in args[:2]]
        if not any(gates) or any(in_graph(value) and not gate for gate, value in zip(gates, args[:2], strict=True)):
            return False
        self._gates.append(output)
        return True

    def on_linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer; its bias counts."""
        output = func(*args, **kwargs)
        self._biases.note(output, _argument(args, kwargs, 2, "bias", None))
        return output

    def on_opened_linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer that is part of an opened-up call, where the batch always comes first."""
        output = func(*args, **kwargs)
        self._biases.note(output, _argument(args, kwargs, 2, "bias", None), tokens_first=False)
        return output

    def _weigh(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slope_at_zero: float, kind: Kind
    ) -> Any:
        """An activation or gate; what a rule's slope leaves unexplained of it counts as a bias."""
        note = self._biases.residue_note(args[0])
        return self._elementwise(func, args, kwargs, slope_at_zero, kind, note)

    def _elementwise(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        slope_at_zero: float,
        kind: Kind,
        note: NoteResidue | None = None,
    ) -> Any:
        if note is None and not (self.rules_differ and in_graph(args[0])):
            return func(*args, **kwargs)
        return Elementwise.apply(args[0], of_first(func, args, kwargs), slope_at_zero, kind, self._in_force, note)


def _among(tensors: list[Tensor], value: Any) -> bool:
    return any(tensor is value for tensor in tensors)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
