"""Hearing attention, in whatever way a model spells it: fused, nn.MultiheadAttention, or written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import UnsupportedModelError
from vitreous.tape import multihead
from vitreous.tape.attention import (
    AttentionRecord,
    attend_fused,
    attention_arguments,
    bias_of_heads,
    heads_of,
    in_every_head,
    score_rows,
)
from vitreous.tape.functions import Attend, Elementwise, InForce, Kind
from vitreous.tape.half import EXACT
from vitreous.tape.interception import in_graph, of_first
from vitreous.tape.plan import Plan
from vitreous.tape.progress import Progress
from vitreous.tape.rulebook import RULES
from vitreous.tape.written_attention import WrittenAttention

# mypy: disable-error-code="no-untyped-call"

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
        biases: all that is added to the scores of a block: relative positions, masks; ``None`` for what is not known.
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
        self.biases: dict[int, list[Tensor | None]] = {}
        self.mixed: set[int] = set()
        self.repeated: set[int] = set()
        self.unknown: set[int] = set()
        self._open = False  # whether something like a part of an attention was heard and none came of it so far
        self.behind: list[tuple[AttentionRecord, Tensor]] = []
        self.in_one_row = False
        self._rules_differ = bool(plan.rules - {"plain"})
        self._plain_gradients = self._rules_differ and any(RULES[name].plain_attention for name in plan.rules)
        self._following = sorted(name for name in plan.rules if RULES[name].follows_scores)
        self._written = WrittenAttention()

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
            self.biases.setdefault(layer, []).append(constant_bias)
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

    def forget(self) -> None:
        """Start anew with hand-written attention: another attention module or block begins."""
        self._written = WrittenAttention()

    def on_matrix_product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first product before a softmax is q kᵀ, the one that the softmax's output enters is A v."""
        output = func(*args, **kwargs)
        layer = self._progress.layer
        if layer is None or len(args) < 2 or not isinstance(args[1], Tensor):
            return output
        if self._written.meets_values(args[0]):
            return self._attend_by_hand(layer, args[1], output)
        if self._written.weights is None:
            self._open |= in_graph(args[0]) and in_graph(args[1])
            self._written.multiply(args[0], args[1], output)
        return output

    def follows(self, args: tuple[Any, ...]) -> bool:
        """Whether a call works on q kᵀ on its way to the softmax."""
        return self._written.is_taken_by(args)

    def on_score_step(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arithmetic on q kᵀ."""
        output = func(*args, **kwargs)
        self._written.step(func, args, output)
        return output

    def on_softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What enters is the scores, what comes out is A."""
        scores, layer = args[0], self._progress.layer
        if layer is None or not isinstance(scores, Tensor):
            return func(*args, **kwargs)
        if self._weighs_tokens(scores, args[1] if len(args) > 1 else kwargs.get("dim")):
            return self._softmax(of_first(func, args, kwargs), scores, "pooling")
        self._open |= in_graph(scores)
        if scores.dim() != 4 and not self._are_of_all_heads(scores, layer):
            return func(*args, **kwargs)
        weights = self._softmax(of_first(func, args, kwargs), scores)
        self._written.pass_softmax(scores, weights)
        return weights

    def _weighs_tokens(self, scores: Tensor, axis: Any) -> bool:
        """Whether a head is about to add up its tokens, by scores of shape (batch, tokens, any), some prefix left out.

        Slots that compete for tokens, (batch, slots, tokens), have a softmax over the same axis, but are fewer.
        """
        if not self._progress.behind or not self._anatomy.batch_first or scores.dim() != 3 or axis not in (1, -2):
            return False
        tokens = self._progress.tokens
        return len(scores) == self._progress.batch and tokens < 2 * scores.shape[1] <= 2 * tokens

    def _are_of_all_heads(self, scores: Tensor, layer: int) -> bool:
        """Whether these are q kᵀ of a block with all heads of a batch in one row."""
        batch, tokens = self._progress.batch, self._progress.tokens
        return layer < self._anatomy.depth and self._written.lies_in_one_row(scores, batch, tokens)

    def on_same_values(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dropout that does nothing, or another dtype."""
        output = func(*args, **kwargs)
        if args:
            self._written.keep_values(args[0], output)
        return output

    def on_reshape(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Another shape of the same numbers."""
        output = func(*args, **kwargs)
        self._written.reshape(args[0], output)
        return output

    def _attend_by_hand(self, layer: int, value: Tensor, output: Tensor) -> Tensor:
        written, batch = self._written, self._progress.batch
        assert written.weights is not None
        if written.weights.dim() == 3:
            self.in_one_row |= written.split_heads(batch)
            value, output = (heads_of(part, batch) if part.dim() == 3 else part for part in (value, output))
            return self._attend_by_hand(layer, value, output).flatten(0, 1)
        assert written.operands is not None
        matrix = written.weights.detach()
        query, key, value = (
            in_every_head(part, matrix) for part in (written.operands[0], written.operands[1].transpose(-2, -1), value)
        )
        if written.mixed:  # relative positions that depend on q or k; what nobody knows must not be read
            self.mixed.add(layer)
            key = value.new_full((), float("nan")).expand_as(value)
        elif not written.known and not written.measure_factor(query.detach(), key.detach()):
            self.mixed.add(layer)
        self._check(layer, matrix.shape[0], *matrix.shape[-2:])
        if written.added:
            self.biases.setdefault(layer, []).extend(written.added)
        record = AttentionRecord(
            query=None,
            key=key.detach(),
            value=value.detach(),
            scale=self._scale(layer, key),
            matrix=matrix,
            head_scale=written.head_factor,
        )
        if self._plan.needs.scores & {layer, layer - 1}:  # behind the last block as in it
            assert written.entering is not None
            record.scores = written.entering.detach()
        self.forget()
        if layer in self._plan.intervention.attention_scale:
            return self._attend_scaled(layer, record, value)
        if self._following:
            if not written.followed:
                raise UnsupportedModelError(
                    f"{self._anatomy.name} writes out its attention in a way that the rules "
                    f"{', '.join(self._following)} cannot follow; use its fused attention, if it has one"
                )
            ours = AttentionRecord(query, key, value, written.factor, matrix=matrix)
            output = Attend.apply(query, key, value, output.detach, ours, self._in_force)
        self._keep(layer, record, output)
        return output

    def _scale(self, layer: int, key: Tensor) -> float:
        """The number in front of q kᵀ: what scores were multiplied with, or else what q is likely to have been."""
        if self._written.factor != 1:
            return self._written.factor
        module = self._anatomy.blocks[layer].attention if layer < self._anatomy.depth else None
        for name in ("scale", "scaling"):
            scale = getattr(module, name, None)
            if isinstance(scale, float):
                return scale
        return float(key.shape[-1] ** -0.5) if self._written.head_factor is None else 1.0
