"""Attention that a model writes out itself: q kᵀ, perhaps scaled and masked, a softmax, A v.

``F.multi_head_attention_forward`` is opened up in the same way, so that q, k, v and O of ``nn.MultiheadAttention`` are
seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.architecture import Architecture
from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.operations import product_operands
from vitreous.architecture.trace import depends_on_input
from vitreous.tape.attention.record import HIDDEN, additive_bias, attention_rows, in_every_head
from vitreous.tape.recording.interception import Progress, in_graph

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def can_open(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call is an ordinary batched one: no extra key and value rows, no given projections."""
    given = _arguments(args, kwargs)
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    return given["query"].dim() == 3 and not given["add_zero_attn"] and all(given[name] is None for name in extras)


def open_up(
    attend: Attend, linear: Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Do what the function does, but with ``attend(q, k, v, bias)`` for the attention itself.

    ``linear`` applies the projections to (batch, token, channel).

    Tokens come first: (token, batch, channel), as in the original.
    """
    given = _arguments(args, kwargs)
    heads, (tokens, batch, width) = given["num_heads"], given["query"].shape
    query, key, value = (
        part.reshape(*part.shape[:2], heads, -1).transpose(1, 2) for part in _projections(given, linear)
    )
    bias = _bias(given, query, key.shape[2])
    output = attend(query, key, value, bias)
    output = output.transpose(1, 2).reshape(batch, tokens, width)
    output = linear(output, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if not given["need_weights"]:
        return output, None
    bias = None if bias is None else bias.detach()
    weights = attention_rows(query.detach(), key.detach(), query.shape[-1] ** -0.5, bias)
    return output, weights.mean(dim=1) if given["average_attn_weights"] else weights


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _projections(given: dict[str, Any], linear: Linear) -> Sequence[Tensor]:
    if given["query"] is given["key"] is given["value"] and not given["use_separate_proj_weight"]:
        # Self-attention has one layer for all three, and a rule that scales the relevance of a layer counts it once.
        return linear(given["query"].transpose(0, 1), given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{part}_proj_weight"] for part in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    biases = [None] * 3 if given["in_proj_bias"] is None else list(given["in_proj_bias"].chunk(3))
    inputs = (given[part].transpose(0, 1) for part in ("query", "key", "value"))
    return [linear(tokens, weight, bias) for tokens, weight, bias in zip(inputs, weights, biases, strict=True)]


def _bias(given: dict[str, Any], query: Tensor, keys: int) -> Tensor | None:
    """Attention mask and key padding mask as one score bias; here a boolean mask hides where it is true."""
    batch, heads = query.shape[:2]
    total: Tensor | None = None
    for mask, shape in (
        (given["attn_mask"], (-1, heads) if _per_head(given) else (1, 1)),
        (given["key_padding_mask"], (batch, 1, 1)),
    ):
        if mask is not None:
            bias = additive_bias(~mask if mask.dtype == torch.bool else mask, query, keys, causal=False)
            assert bias is not None
            bias = bias.reshape(*shape, *bias.shape[-2:]) if len(shape) == 2 else bias.reshape(*shape, keys)
            total = bias if total is None else total + bias
    return total


def _per_head(given: dict[str, Any]) -> bool:
    return given["attn_mask"] is not None and given["attn_mask"].dim() == 3


_ROUNDING = 1e-4  # of the largest score: float32 sums a few hundred products; a capped score is off by far more


@dataclass
class WrittenScores:
    """The scores of one attention call, as far as they could be read from its steps.

    Attributes:
        query: q as it was multiplied, (batch, head, token, channel); ``None`` where it is not known.
        key: k as it was multiplied.
        factor: the number that q kᵀ is multiplied with.
        head_factor: further factors, one for every head (head, 1, 1).
        followed: whether each step from q kᵀ to A is known, so that a rule can follow it.
        biases: what is added to the scores; ``None`` for a mask that is not known.
        mixed: whether more than q and k makes the scores.
        own_scale: what q and k were multiplied with before their product.
        own_key: k before that.
    """

    query: Tensor | None
    key: Tensor | None
    factor: float = 1.0
    head_factor: Tensor | None = None
    followed: bool = False
    biases: list[Tensor | None] = field(default_factory=list)
    mixed: bool = False
    own_scale: float = 1.0
    own_key: Tensor | None = None

    def scale(self, values: Tensor) -> float:
        """The number in front of q kᵀ: what the scores were multiplied with, or 1/sqrt(d), by which q usually is."""
        factor = self.factor * self.own_scale
        if factor != 1:
            return factor
        key = values if self.key is None else self.key
        return float(key.shape[-1] ** -0.5) if self.head_factor is None else 1.0


class ScoreReader:
    """Keeps the operands of the steps from q kᵀ to A and reads the scores from them.

    Attributes:
        own_steps: the steps from q kᵀ to A, which no other handler acts on.
        steps: the steps whose operands are kept.
        products: the steps that multiply q with kᵀ.
    """

    def __init__(self, architecture: Architecture, progress: Progress, specs: Iterable[AttentionCall]) -> None:
        self._operations, self._progress = architecture.operations, progress
        written = [spec for spec in specs if spec.spelling == "written"]
        self.own_steps = frozenset(step for spec in written for step in spec.own_steps)
        self.products = {spec.score_step for spec in written}
        self.steps = frozenset(
            {*self.products, *(spec.entering_step for spec in written)}
            | {step for spec in written for step in (*spec.query_scales, *spec.key_scales)}
            | {each.step for spec in written for each in spec.score_steps or ()}
        ) - {-1}
        self._noted: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the operands of a step."""
        if number in self.steps:
            self._noted[number] = args, kwargs, output

    def read(self, spec: AttentionCall, matrix: Tensor) -> WrittenScores:
        """The scores that ``matrix``, A, was made of."""
        query, key = self._query_and_key(spec, matrix)
        scores = self._known_scores(spec, query, key)
        query_scale, key_scale = self._factor(spec.query_scales), self._factor(spec.key_scales)
        scores.own_scale = query_scale * key_scale
        # As the model made it: what q and k were scaled by counts with the scores.
        scores.own_key = key if key is None or key_scale == 1 else key.detach() / key_scale
        return scores

    def _query_and_key(self, spec: AttentionCall, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What was multiplied to scores, (batch, head, token, channel)."""
        noted = self._noted.get(spec.score_step)
        if noted is None:
            return None, None
        args, kwargs, _ = noted
        operands = product_operands(self._operations[spec.score_step], args, kwargs)
        if operands is None:
            return None, None
        query, key = operands if spec.query_first else operands[::-1]
        batch = self._progress.batch
        arranged = spec.arrangement("query").arrange(query, batch), spec.arrangement("key").arrange(key, batch)
        if arranged[0] is None or arranged[1] is None:
            return None, None
        return in_every_head(arranged[0], matrix), in_every_head(arranged[1], matrix)

    def _factor(self, steps: tuple[int, ...]) -> float:
        """What steps multiply with, where that is a number."""
        product = 1.0
        for step in steps:
            args, kwargs, _ = self._noted.get(step, ((), {}, None))
            number = _factor_of(_other_operand(args, kwargs)) if args else 1.0
            if isinstance(number, int | float) and number != 0:
                product *= 1 / number if self._operations[step] == "div" else number
        return product

    def entering(self, spec: AttentionCall) -> Tensor | None:
        """What entered the softmax, (batch, head, to, from)."""
        noted = self._noted.get(spec.entering_step)
        if noted is None:
            return None
        scores = noted[2]
        return spec.arrange_scores(scores.detach(), self._progress.batch) if isinstance(scores, Tensor) else None

    def _known_scores(self, spec: AttentionCall, query: Tensor | None, key: Tensor | None) -> WrittenScores:
        """What q kᵀ was multiplied with, as a number or head by head, and whether rules can follow it."""
        factors = None if spec.score_steps is None else self._factors(spec)
        if factors is None:
            measured = self._measured_factor(spec, query, key)
            if measured is None:
                return WrittenScores(query, key, mixed=True)
            return WrittenScores(query, key, *measured)
        return WrittenScores(query, key, *factors, followed=spec.plain_weights, biases=self._biases(spec))

    def _factors(self, spec: AttentionCall) -> tuple[float, Tensor | None] | None:
        """The constants that scores are multiplied with; ``None`` where one is more than a number for each head."""
        factor, head_factor = self.product_factor(spec), None
        for each in spec.score_steps or ():
            if each.kind != "scale":
                continue
            args, kwargs, _ = self._noted[each.step]
            number = _factor_of(_other_operand(args, kwargs))
            if number is None:
                return None
            number = 1 / number if self._operations[each.step] == "div" else number
            if isinstance(number, Tensor):
                head_factor = number if head_factor is None else head_factor * number
            else:
                factor *= number
        return factor, head_factor

    def _biases(self, spec: AttentionCall) -> list[Tensor | None]:
        """What is added to scores, and what hides some of them."""
        added: list[Tensor | None] = []
        for each in spec.score_steps or ():
            args, kwargs, output = self._noted[each.step]
            if each.kind == "bias":
                added.append(torch.as_tensor(_other_operand(args, kwargs)).detach())
            elif each.kind == "mask":
                added.append(_hidden(self._operations[each.step], args, kwargs, output))
        return added

    def product(self, spec: AttentionCall) -> Tensor:
        """Q kᵀ as the model made it."""
        product: Tensor = self._noted[spec.score_step][2]
        return product

    def product_factor(self, spec: AttentionCall) -> float:
        """What the product itself multiplies with, as ``baddbmm`` may."""
        _, kwargs, _ = self._noted[spec.score_step]
        return float(kwargs.get("alpha", 1)) if self._operations[spec.score_step] == "baddbmm" else 1.0

    def _measured_factor(
        self, spec: AttentionCall, query: Tensor | None, key: Tensor | None
    ) -> tuple[float, Tensor | None] | None:
        """Find out what q kᵀ was multiplied with on a way that was not followed; ``None`` if it is no number per head.

        To a softmax it is the same what is added to a whole row (written-out ones take off the largest score), so rows
        are compared without their means.
        """
        entering = self.entering(spec)
        if entering is None or query is None or key is None:
            return None
        product = at_least_float32(query.detach() @ key.detach().transpose(-2, -1))
        if product.shape != entering.shape:  # something was joined to the scores
            return None
        products, scores = (rows - rows.mean(dim=-1, keepdim=True) for rows in (product, at_least_float32(entering)))
        factor = (products * scores).sum(dim=(0, 2, 3)) / products.square().sum(dim=(0, 2, 3))
        factor = factor.view(-1, 1, 1)
        if not bool((scores - factor * products).abs().amax() < _ROUNDING * scores.abs().amax()):
            return None
        one = float(factor.mean())
        alike = bool((factor - one).abs().amax() < _ROUNDING * abs(one))
        return (1.0 if abs(one - 1) < _ROUNDING else one, None) if alike else (1.0, factor)


def _other_operand(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What scores are multiplied with, divided by, or what is added to them."""
    operands = [*args[:2], *(kwargs[name] for name in ("other",) if name in kwargs)]
    tensors = [value for value in operands if in_graph(value)]
    if len(tensors) == 1:
        return next(value for value in operands if value is not tensors[0])
    widest = max((value for value in operands if isinstance(value, Tensor)), key=lambda value: value.numel())
    return next((value for value in operands if value is not widest), widest)


def _factor_of(other: Any) -> float | Tensor | None:
    """A constant that scores are multiplied with: a number, or one for every head (head, 1, 1); ``None`` for others."""
    if isinstance(other, int | float):
        return other
    if not isinstance(other, Tensor) or in_graph(other) or other.dtype == torch.bool:
        return None
    if other.numel() == 1:
        return float(other)
    by_head = other.dim() in (3, 4) and other.numel() == other.shape[-3]
    return at_least_float32(other.detach()).reshape(-1, 1, 1) if by_head else None


def _hidden(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """The bias that ``masked_fill(scores, mask, value)`` or ``where(mask, scores, value)`` stands for, if it hides."""
    value = args[2] if len(args) > 2 else kwargs.get("value")
    if operation == "where":
        value = next(each for each in (*args, *kwargs.values()) if not _is_mask(each) and not depends_on_input(each))
    if isinstance(value, Tensor):
        hides = value.is_floating_point() and bool((value < HIDDEN).all())
    else:
        hides = isinstance(value, int | float) and value < HIDDEN
    return torch.zeros((), dtype=output.dtype, device=output.device) if hides else None


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool
