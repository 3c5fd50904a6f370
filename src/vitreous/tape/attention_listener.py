"""Hearing attention, in whatever way a model spells it: fused, nn.MultiheadAttention, or written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import UnsupportedModelError
from vitreous.tape import interception as heard
from vitreous.tape import multihead
from vitreous.tape.attention import (
    AttentionRecord,
    additive_bias,
    attend_fused,
    bias_of_heads,
    heads_of,
    in_every_head,
    score_rows,
)
from vitreous.tape.functions import Attend, Elementwise, InForce, Kind
from vitreous.tape.half import EXACT, exact
from vitreous.tape.interception import in_graph, of_first
from vitreous.tape.plan import Plan
from vitreous.tape.progress import Progress
from vitreous.tape.rulebook import RULES

# mypy: disable-error-code="no-untyped-call"

# Rules to which a hand-written A is a constant or an ordinary softmax, so that its steps need not be followed.
NEED_NO_SCORES = {"plain", "frozen", "libra", "conservative"}
_MULTIPLICATION = (*heard.MULTIPLICATION, *heard.MULTIPLICATION_IN_PLACE)
_DIVISION = (*heard.DIVISION, *heard.DIVISION_IN_PLACE)
_ADDITION = (*heard.ADDITION, *heard.ADDITION_IN_PLACE)
_ROUNDING = 1e-4  # of the largest score: float32 sums a few hundred products; a capped score is off by far more
_HIDDEN = -9e3  # masks are written as -1e4 or less: a score lower by this much has no share of the softmax
_EMPTY = AttentionRecord(None, torch.empty(0), torch.empty(0), 1.0)
# Why attention that is not between all tokens of each picture is refused.
_OTHER_TOKENS = (
    "it is windowed, pooled or between channels, so there is no attention between all patches and no method here "
    "serves it"
)
_OTHER_BATCH = (
    "pictures are joined, repeated or cut up on the way to the blocks, or heads stand in front of the batch, so it is "
    "not known which tokens are whose; where they are joined, give one picture at a time, where they are repeated (by "
    "test-time augmentation), the model inside"
)


class AttentionListener:
    """Keeps the attention calls that a plan asks for and puts them under the rule in force.

    Attributes:
        records: the attention calls of the blocks.
        outputs: O of each call, as it stands in the graph.
        biases: what is added to the scores of a block: relative positions, a mask; ``None`` where it is not known.
        mixed: the blocks whose scores are not q kᵀ alone or not followed to the softmax, so that k is not known.
        repeated: the blocks that attend more than once, so that none of the matrices is the block's.
        unknown: the blocks in which tokens are multiplied with each other, or weighed, in a way that is no attention.
        behind: the attention calls behind the last block, in order; one of them may be what pools the tokens.
        in_one_row: whether all heads of a batch lay along one axis, (batch x head, token, channel).
    """

    def __init__(
        self, anatomy: Anatomy, plan: Plan, progress: Progress, in_force: InForce, linear: multihead.Linear
    ) -> None:
        self._anatomy, self._plan, self._progress, self._in_force = anatomy, plan, progress, in_force
        self._linear = linear
        self.records: dict[int, AttentionRecord] = {}
        self.outputs: dict[int, Tensor] = {}
        self.biases: dict[int, Tensor | None] = {}
        self.mixed: set[int] = set()
        self.repeated: set[int] = set()
        self.unknown: set[int] = set()
        self._open = False  # whether something like a part of an attention was heard and none came of it so far
        self.behind: list[tuple[AttentionRecord, Tensor]] = []
        self.in_one_row = False
        self._rules_differ = bool(plan.rules - {"plain"})
        self._plain_gradients = self._rules_differ and any(RULES[name].plain_attention for name in plan.rules)
        self.forget()

    def forget(self) -> None:
        """Start anew with hand-written attention: another attention module or block begins."""
        self._operands: tuple[Tensor, Tensor] | None = None
        self._products = 0
        self._scores: Tensor | None = None
        self._factor = 1.0
        self._head_factor: Tensor | None = None
        self._known = False  # whether all steps from q kᵀ to the softmax were followed
        self._followed = False  # whether rules can follow them, too
        self._entering: Tensor | None = None
        self._weights: Tensor | None = None

    def leave_block(self, layer: int) -> None:
        """A block has run: what was not recognised in it will not be."""
        if self._open:
            self.unknown.add(layer)
        self._open = False
        self.forget()

    def on_fused(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``scaled_dot_product_attention``."""
        layer = self._progress.layer
        if layer is None:
            return func(*args, **kwargs)
        query, key, value, bias, scale = attention_arguments(*args, **kwargs)
        batch = self._progress.batch
        if query.dim() != 3:
            return self._attend(layer, query, key, value, bias, scale)
        if len(query) % batch:
            self._check(layer, len(query), query.shape[1], key.shape[1])
            return func(*args, **kwargs)
        self.in_one_row = True
        query, key, value = (heads_of(part, batch) for part in (query, key, value))
        return self._attend(layer, query, key, value, bias_of_heads(bias, batch), scale).flatten(0, 1)

    def on_multi_head(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``multi_head_attention_forward``."""
        layer = self._progress.layer
        if layer is None or not multihead.can_open(args, kwargs):
            return func(*args, **kwargs)
        return multihead.open_up(
            lambda query, key, value, bias: self._attend(layer, query, key, value, bias, query.shape[-1] ** -0.5),
            self._linear,
            args,
            kwargs,
        )

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        self._check(layer, query.shape[0], query.shape[2], key.shape[2])
        constant_bias = None if bias is None else bias.detach()
        record = AttentionRecord(query.detach(), key.detach(), value.detach(), scale, constant_bias)
        if bias is not None:
            self.biases[layer] = constant_bias
        if layer in self._plan.intervention.attention_scale:
            return self._attend_scaled(layer, record, value)
        if in_graph(bias):
            return self._attend_by_scores(layer, record, value, score_rows(query, key, scale, bias))
        followed = query.requires_grad or key.requires_grad or value.requires_grad
        if self._worth_keeping(layer, record):
            record.matrix = record.rows(slice(None))
        elif followed and self._plain_gradients and record.value.dtype in EXACT:
            record.fused = attend_fused(record)

        def forward_call() -> Tensor:
            if record.matrix is not None:
                return record.matrix @ value
            if record.fused is not None:
                return record.fused.output.detach()
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

        if followed and (self._rules_differ or record.matrix is not None):
            output: Tensor = Attend.apply(query, key, value, forward_call, record, self._in_force)
        else:
            output = forward_call()
        self._keep(layer, record, output)
        return output

    def _attend_by_scores(self, layer: int, record: AttentionRecord, value: Tensor, scores: Tensor) -> Tensor:
        """With a mask that depends on the tokens, which has a gradient of its own where A has one."""
        self.mixed.add(layer)
        weights = self._softmax(partial(torch.softmax, dim=-1), scores)
        record.matrix = weights.detach()
        output = weights.to(value.dtype) @ value
        self._keep(layer, record, output)
        return output

    def _softmax(self, function: Callable[[Tensor], Tensor], scores: Tensor, kind: Kind = "softmax") -> Tensor:
        """A, under the rule in force."""
        if not (self._rules_differ and scores.requires_grad):
            return function(scores)
        weights: Tensor = Elementwise.apply(scores, function, 0.0, kind, self._in_force)
        return weights

    def _attend_scaled(self, layer: int, record: AttentionRecord, value: Tensor) -> Tensor:
        """With another attention matrix than the model's: a multiple of it, and a constant."""
        factors = self._plan.intervention.attention_scale[layer].to(record.value)
        record.matrix = record.rows(slice(None)).to(value.dtype) * factors[:, None, None, None]
        output = record.matrix @ value
        self._keep(layer, record, output)
        return output

    def _worth_keeping(self, layer: int, record: AttentionRecord) -> bool:
        """Keep A where all of it is needed and it is not larger than half of what a block's backward pass keeps anyway.

        That is about 14 numbers per channel of a token. In half precision the fused kernel's own rounding is wanted.
        """
        if layer not in self._plan.needs.attention or record.value.dtype not in EXACT:
            return False
        width = record.heads * record.value.shape[-1]
        return record.heads * record.key.shape[2] <= 7 * width

    def _keep(self, layer: int, record: AttentionRecord, output: Tensor) -> None:
        if layer == self._anatomy.depth:
            self.behind.append((record, output))
            return
        self._open = False
        if layer in self.records:
            self.repeated.add(layer)
        self.outputs[layer] = output
        self.records[layer] = record if layer in self._plan.attention else _EMPTY

    def _check(self, layer: int, batch: int, queries: int, keys: int) -> None:
        """Between all tokens, or it is no attention between patches; which call behind the blocks pools shows later."""
        tokens = self._progress.tokens
        if layer < self._anatomy.depth and (batch, queries, keys) != (self._progress.batch, tokens, tokens):
            reason = _OTHER_BATCH if (queries, keys) == (tokens, tokens) else _OTHER_TOKENS
            raise UnsupportedModelError(
                f"{self._anatomy.name}: attention in block {layer} runs over {batch} x {queries} x {keys} tokens where "
                f"{self._progress.batch} x {tokens} x {tokens} were expected, for the pictures given and the tokens of "
                f"the block: {reason}"
            )

    # Written out by hand: q kᵀ, perhaps scaled and masked, softmax, A v ----------------------------------------------

    def on_matrix_product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first product before a softmax is q kᵀ, the one that the softmax's output enters is A v."""
        output = func(*args, **kwargs)
        layer = self._progress.layer
        if layer is None or len(args) < 2 or not isinstance(args[1], Tensor):
            return output
        if self._weights is not None and args[0] is self._weights and self._operands is not None:
            return self._attend_by_hand(layer, args[1], output)
        if self._weights is None:
            # A product with a weight matrix is a projection, not a part of the scores.
            projects = min(args[0].dim(), args[1].dim()) <= 2
            self._open |= in_graph(args[0]) and in_graph(args[1])
            if not projects:
                self._products, self._scores = self._products + 1, output
                self._factor, self._head_factor, self._followed = 1.0, None, True
            if not projects or not self._products:
                self._operands = args[0], args[1]
        return output

    def follows(self, args: tuple[Any, ...]) -> bool:
        """Whether a call works on q kᵀ on its way to the softmax, perhaps with a constant in front of it."""
        if self._scores is None or not args:
            return False
        return args[0] is self._scores or (len(args) > 1 and args[1] is self._scores and not in_graph(args[0]))

    def on_score_step(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Scores are scaled by a number or head by head, or something constant is added to them; perhaps in place."""
        first = args[0] is self._scores
        output = func(*args, **kwargs)
        other = (args[1] if len(args) > 1 else None) if first else args[0]
        factor = _factor_of(other)
        if func in _MULTIPLICATION and factor is not None:
            self._multiply(factor)
        elif func in _DIVISION and factor is not None and first:
            self._multiply(1 / factor)
        elif func not in (*_ADDITION, *heard.MASKED_FILL) or in_graph(other):
            self._scores = None if output is self._scores else self._scores  # changed in place into something else
            return output
        elif self._progress.layer is not None:
            self.biases[self._progress.layer] = other if func in _ADDITION else _hidden(args, output)
        self._scores = output
        return output

    def _multiply(self, factor: float | Tensor) -> None:
        if not isinstance(factor, Tensor):
            self._factor *= factor
            return
        self._head_factor = factor if self._head_factor is None else self._head_factor * factor
        self._followed = False

    def on_softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What enters is the scores, what comes out is A."""
        scores = args[0]
        if self._progress.layer is None or not isinstance(scores, Tensor):
            return func(*args, **kwargs)
        if self._weighs_tokens(scores, args[1] if len(args) > 1 else kwargs.get("dim")):
            return self._softmax(of_first(func, args, kwargs), scores, "pooling")
        self._open |= in_graph(scores)
        if scores.dim() != 4 and not self._are_of_all_heads(scores, self._progress.layer):
            return func(*args, **kwargs)
        self._known, self._entering = scores is self._scores, scores
        self._followed = self._followed and self._known
        self._weights = self._softmax(of_first(func, args, kwargs), scores)
        return self._weights

    def _weighs_tokens(self, scores: Tensor, axis: Any) -> bool:
        """Whether a head is about to add up its tokens, by scores of shape (batch, tokens, any), some prefix left out.

        Slots that compete for tokens, (batch, slots, tokens), have a softmax over the same axis, but are fewer.
        """
        if not self._progress.behind or not self._anatomy.batch_first or scores.dim() != 3 or axis not in (1, -2):
            return False
        tokens = self._progress.tokens
        return len(scores) == self._progress.batch and tokens < 2 * scores.shape[1] <= 2 * tokens

    def _are_of_all_heads(self, scores: Tensor, layer: int) -> bool:
        """Whether these are q kᵀ of a block with all heads of a batch in one row: (batch x head, to, from)."""
        if self._scores is None or self._operands is None or layer == self._anatomy.depth:
            return False
        tokens, rows = self._progress.tokens, len(self._operands[0])
        of_rows = all(part.dim() == 3 for part in self._operands) and rows % self._progress.batch == 0
        return of_rows and scores.shape == (rows, tokens, tokens)

    def on_same_values(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dropout that does nothing, or another dtype, between softmax and A v or between q kᵀ and softmax."""
        output = func(*args, **kwargs)
        if self._weights is None and self._scores is not None and args and args[0] is self._scores:
            self._followed = self._followed and output is self._scores
            self._scores = output
        if self._weights is not None and args and args[0] is self._weights:
            self._weights = output
        return output

    def on_reshape(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A may be multiplied with v for all heads of a batch in one row: (batch x head, to, from)."""
        output = func(*args, **kwargs)
        if self._weights is not None and args[0] is self._weights:
            self._weights = output
        return output

    def _attend_by_hand(self, layer: int, value: Tensor, output: Tensor) -> Tensor:
        assert self._weights is not None
        assert self._operands is not None
        if self._weights.dim() == 3:
            self._weights, value, output, *operands = (
                heads_of(part, self._progress.batch) if part.dim() == 3 else part
                for part in (self._weights, value, output, *self._operands)
            )
            self._operands = operands[0], operands[1]
            assert self._entering is not None
            self.in_one_row = self._entering.dim() == 3
            if self.in_one_row:
                self._entering = heads_of(self._entering, self._progress.batch)
            if not self.in_one_row or self._head_factor is not None:
                self._products += 1  # what leads from q kᵀ, of all heads in one row, to the softmax was not followed
            return self._attend_by_hand(layer, value, output).flatten(0, 1)
        matrix = self._weights.detach()
        query, key, value = (
            in_every_head(part, matrix) for part in (self._operands[0], self._operands[1].transpose(-2, -1), value)
        )
        if self._products > 1:  # relative positions that depend on q or k; what nobody knows must not be read
            self.mixed.add(layer)
            key = value.new_full((), float("nan")).expand_as(value)
        elif not self._known and not self._measure_factor(query.detach(), key.detach()):
            self.mixed.add(layer)
        self._check(layer, matrix.shape[0], *matrix.shape[-2:])
        record = AttentionRecord(
            *(None, key.detach(), value.detach(), self._scale(layer, key)),
            matrix=matrix,
            head_scale=self._head_factor,
        )
        if self._plan.needs.scores & {layer, layer - 1}:  # behind the last block as in it
            assert self._entering is not None
            record.scores = self._entering.detach()
        if layer in self._plan.intervention.attention_scale:
            self.forget()
            return self._attend_scaled(layer, record, value)
        if self._plan.rules - NEED_NO_SCORES:
            if not self._followed:
                rules = ", ".join(sorted(self._plan.rules - NEED_NO_SCORES))
                raise UnsupportedModelError(
                    f"{self._anatomy.name} writes out its attention in a way that the rules {rules} cannot follow; "
                    "use its fused attention, if it has one"
                )
            ours = AttentionRecord(query, key, value, self._factor, matrix=matrix)
            output = Attend.apply(query, key, value, output.detach, ours, self._in_force)
        self._keep(layer, record, output)
        self.forget()
        return output

    def _measure_factor(self, query: Tensor, key: Tensor) -> bool:
        """Find out what q kᵀ was multiplied with on a way that was not followed; whether that is a number per head.

        To a softmax it is the same what is added to a whole row (written-out ones take off the largest score), so rows
        are compared without their means.
        """
        assert self._entering is not None
        products, scores = (
            rows - rows.mean(dim=-1, keepdim=True)
            for rows in (exact(query @ key.transpose(-2, -1)), exact(self._entering.detach()))
        )
        factor = (products * scores).sum(dim=(0, 2, 3)) / products.square().sum(dim=(0, 2, 3))
        factor = factor.view(-1, 1, 1)
        if not bool((scores - factor * products).abs().amax() < _ROUNDING * scores.abs().amax()):
            return False
        one = float(factor.mean())
        alike = bool((factor - one).abs().amax() < _ROUNDING * abs(one))
        self._factor, self._head_factor = (1.0 if abs(one - 1) < _ROUNDING else one, None) if alike else (1.0, factor)
        return True

    def _scale(self, layer: int, key: Tensor) -> float:
        """The number in front of q kᵀ: what scores were multiplied with, or else what q is likely to have been."""
        if self._factor != 1:
            return self._factor
        module = self._anatomy.blocks[layer].attention if layer < self._anatomy.depth else None
        for name in ("scale", "scaling"):
            scale = getattr(module, name, None)
            if isinstance(scale, float):
                return scale
        return float(key.shape[-1] ** -0.5) if self._head_factor is None else 1.0


def _factor_of(other: Any) -> float | Tensor | None:
    """A constant that scores are multiplied with: a number, or one for every head (head, 1, 1); ``None`` for others."""
    if isinstance(other, int | float):
        return other
    if not isinstance(other, Tensor) or in_graph(other) or other.dtype == torch.bool:
        return None
    if other.numel() == 1:
        return float(other)
    by_head = other.dim() in (3, 4) and other.numel() == other.shape[-3]
    return exact(other.detach()).reshape(-1, 1, 1) if by_head else None


def only_hides(bias: Tensor | None) -> bool:
    """Whether what is added to scores is a mask: nothing, or so much that nothing is left of them."""
    return bias is not None and bool(((bias == 0) | (bias < _HIDDEN)).all())


def _hidden(args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """The bias that ``masked_fill(scores, mask, value)`` stands for, if its value hides."""
    value = args[2] if len(args) > 2 else None
    if not isinstance(value, int | float) or value >= _HIDDEN:
        return None
    return torch.zeros((), dtype=output.dtype, device=output.device)


def attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - this is the signature of scaled_dot_product_attention
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    """q, k, v with one k and v per head, the score bias and the scale of a fused attention call."""
    del dropout_p  # explained as in evaluation
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    key, value = in_every_head(key, query), in_every_head(value, query)
    bias = additive_bias(attn_mask, query, key.shape[-2], causal=is_causal)
    return query, key, value, bias, query.shape[-1] ** -0.5 if scale is None else scale
