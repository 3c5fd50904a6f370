"""Recording attention, in whatever way a model spells it, and putting it under the rule in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.architecture import Architecture
from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.operations import product_operands
from vitreous.architecture.trace import operation
from vitreous.errors import UnsupportedModelError
from vitreous.tape import multihead
from vitreous.tape.attention import (
    HIDDEN,
    AttentionRecord,
    attend_fused,
    attention_arguments,
    bias_of_heads,
    heads_of,
    in_every_head,
    rows_of,
    score_rows,
)
from vitreous.tape.functions import Attend, Elementwise, InForce, Kind
from vitreous.tape.half import EXACT, exact
from vitreous.tape.interception import in_graph, of_first
from vitreous.tape.plan import Plan
from vitreous.tape.progress import Progress
from vitreous.tape.rulebook import RULES

# mypy: disable-error-code="no-untyped-call"

_EMPTY = AttentionRecord(None, torch.empty(0), torch.empty(0), 1.0)
_ROUNDING = 1e-4  # of the largest score: float32 sums a few hundred products; a capped score is off by far more


class AttentionListener:
    """Keeps the attention calls that a plan asks for and puts them under the rule in force.

    Attributes:
        records: the attention calls of the blocks.
        outputs: O of the calls of each block, as they stand in the graph; several calls are one with all their heads.
        biases: all that is added to the scores of a block: relative positions, masks; ``None`` for what is not known.
        mixed: the blocks whose scores are not q kᵀ alone or not followed to the softmax.
        unknown_keys: those of them in which q and k by themselves do not say how the output depends on them.
        other: by block, why its attention is not one between all tokens of an image.
        unknown: the blocks in which tokens are multiplied with each other, or weighed, in a way that is no attention.
        behind: the attention calls behind the last block, in order; one of them may be what pools the tokens.
        own_steps: the steps from q kᵀ to the weights.
        score_steps: the steps whose operands are noted.
    """

    def __init__(
        self, architecture: Architecture, plan: Plan, progress: Progress, in_force: InForce, linear: multihead.Linear
    ) -> None:
        self._architecture, self._plan, self._progress, self._in_force = architecture, plan, progress, in_force
        self._linear = linear
        self.records: dict[int, AttentionRecord] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self.biases: dict[int, list[Tensor | None]] = {}
        self.mixed: set[int] = set()
        self.unknown_keys: set[int] = set()
        self.other: dict[int, str] = {}
        self.unknown: set[int] = set()
        self.behind: list[tuple[AttentionRecord, Tensor, AttentionCall]] = []
        self._rules_differ = bool(plan.rules - {"plain"})
        self._plain_gradients = self._rules_differ and any(RULES[name].plain_attention for name in plan.rules)
        self._following = sorted(name for name in plan.rules if RULES[name].follows_scores)
        self._calls: dict[int, tuple[int, AttentionCall]] = {}
        for layer, block in enumerate(architecture.blocks):
            self._calls.update((call.output_step, (layer, call)) for call in block.attention)
        others = (*architecture.pooling, *architecture.later)
        self._calls.update((call.output_step, (architecture.depth, call)) for call in others)
        self._later = {call.output_step for call in architecture.later}
        written = [call for _, call in self._calls.values() if call.spelling == "written"]
        self.own_steps = frozenset(step for call in written for step in call.own_steps)
        products = {call.score_step for call in written}
        self.score_steps = frozenset(
            {*products, *(call.entering_step for call in written)}
            | {step for call in written for step in (*call.query_scales, *call.key_scales)}
            | {each.step for call in written for each in call.score_steps or ()}
        ) - {-1}
        self._noted: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
        self._known_products = products
        self._pooling: AttentionCall | None = None

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the operands of q kᵀ, and what was done to it."""
        if number in self.score_steps:
            self._noted[number] = args, kwargs, output

    def arranged(self, layer: int, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors that lie as the outputs of a block do, as one (batch, head, token, channel)."""
        depth = self._architecture.depth
        calls = [self._pooling] if layer == depth else self._architecture.blocks[layer].attention
        heads = torch.cat([self._by_head(*pair) for pair in zip(calls, tensors, strict=True)], dim=1)
        order = self._order(layer)
        return heads if order is None else heads[:, :, order]

    def _order(self, layer: int) -> Tensor | None:
        """By place of the stream as it is read, the token that stands there; ``None`` where tokens lie so."""
        if layer == self._architecture.depth or layer in self.other:
            return None
        order = self._architecture.blocks[layer].input.axes.order
        return None if order is None else torch.tensor(order)

    def _by_head(self, call: AttentionCall | None, tensor: Tensor) -> Tensor:
        if call is None or call.spelling != "written":
            heads_first = call is not None and call.heads_first
            return tensor if tensor.dim() == 4 else heads_of(tensor, self._progress.batch, heads_first=heads_first)
        arranged = call.arrangement("output").arrange(tensor, self._progress.batch)
        assert arranged is not None
        return arranged

    def pool_by(self, place: int) -> None:
        """Of the calls behind the last block, take this one for what pools the tokens."""
        depth, tokens = self._architecture.depth, self._progress.tokens
        record, output, self._pooling = self.behind[place]
        # A class token of the head's own may stand in front of the stream's tokens (CaiT).
        self.records[depth] = record if record.key.shape[2] <= tokens else record.last_keys(tokens)
        self.outputs[depth] = [output]

    def on_fused(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``scaled_dot_product_attention``."""
        found = self._calls.get(self._progress.step)
        if found is None:
            return func(*args, **kwargs)
        layer, call = found
        if not call.over_tokens:
            return self._between_channels(layer, func, args, kwargs)
        query, key, value, bias, scale = attention_arguments(*args, **kwargs)
        batch = self._progress.batch
        if query.dim() > 4:  # windows of an image, each of which counts as one
            ahead = query.shape[:-3]
            if bias is not None:
                bias = bias.expand(*ahead, *bias.shape[-3:]).flatten(0, -4) if bias.dim() > 3 else bias
            query, key, value = (part.flatten(0, -4) for part in (query, key, value))
            flat = self._attend(layer, call, query, key, value, bias, scale)
            return flat.view(*ahead, *flat.shape[1:])
        if query.dim() != 3:
            return self._attend(layer, call, query, key, value, bias, scale)
        if len(query) % batch:
            return func(*args, **kwargs)
        first = call.heads_first
        query, key, value = (heads_of(part, batch, heads_first=first) for part in (query, key, value))
        bias = bias_of_heads(bias, batch, heads_first=first)
        return rows_of(self._attend(layer, call, query, key, value, bias, scale), heads_first=first)

    def on_multi_head(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``multi_head_attention_forward``."""
        found = self._calls.get(self._progress.step)
        if found is None or not multihead.can_open(args, kwargs):
            return func(*args, **kwargs)
        layer, call = found
        return multihead.open_up(
            lambda query, key, value, bias: self._attend(layer, call, query, key, value, bias, query.shape[-1] ** -0.5),
            self._linear,
            args,
            kwargs,
        )

    def _attend(
        self,
        layer: int,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        self._check(layer, query.shape[0], query.shape[2], key.shape[2])
        constant_bias = None if bias is None else bias.detach()
        record = AttentionRecord(query.detach(), key.detach(), value.detach(), scale, constant_bias)
        if bias is not None:
            self.biases.setdefault(layer, []).append(constant_bias)
        if layer in self._plan.intervention.attention_scale:
            return self._attend_scaled(layer, call, record, value)
        if in_graph(bias):
            return self._attend_by_scores(layer, call, record, value, score_rows(query, key, scale, bias))
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
        self._keep(layer, call, record, output)
        return output

    def _attend_by_scores(
        self, layer: int, call: AttentionCall, record: AttentionRecord, value: Tensor, scores: Tensor
    ) -> Tensor:
        """With a mask that depends on the tokens, which has a gradient of its own where A has one."""
        self.mixed.add(layer)
        self.unknown_keys.add(layer)
        weights = self._under_rule(partial(torch.softmax, dim=-1), scores, "softmax")
        record.matrix = weights.detach()
        output = weights.to(value.dtype) @ value
        self._keep(layer, call, record, output)
        return output

    def _under_rule(self, function: Callable[[Tensor], Tensor], scores: Tensor, kind: Kind) -> Tensor:
        """A function of scores, under the rule in force."""
        if not (self._rules_differ and scores.requires_grad):
            return function(scores)
        weights: Tensor = Elementwise.apply(scores, function, 0.0, kind, self._in_force)
        return weights

    def _attend_scaled(self, layer: int, call: AttentionCall, record: AttentionRecord, value: Tensor) -> Tensor:
        """With another attention matrix than the model's: a multiple of it, and a constant."""
        factors = self._plan.intervention.attention_scale[layer].to(record.value)
        record.matrix = record.rows(slice(None)).to(value.dtype) * factors[:, None, None, None]
        output = record.matrix @ value
        self._keep(layer, call, record, output)
        return output

    def _worth_keeping(self, layer: int, record: AttentionRecord) -> bool:
        """Keep A where all of it is needed and it is not larger than half of what a block's backward pass keeps anyway.

        That is about 14 numbers per channel of a token. In half precision the fused kernel's own rounding is wanted.
        """
        if layer not in self._plan.needs.attention or record.value.dtype not in EXACT:
            return False
        width = record.heads * record.value.shape[-1]
        return record.heads * record.key.shape[2] <= 7 * width

    def _keep(self, layer: int, call: AttentionCall, record: AttentionRecord, output: Tensor) -> None:
        if layer == self._architecture.depth:
            if call.output_step not in self._later:
                self.behind.append((record, output, call))
            return
        order = self._order(layer)
        kept = _EMPTY if layer not in self._plan.attention else record if order is None else record.in_order(order)
        if layer in self.records and kept is not _EMPTY:
            joined = self.records[layer].joined(kept) if self._architecture.blocks[layer].joined else None
            if joined is None:
                self.other.setdefault(
                    layer, f"it attends more than once in its block {layer}, so that no one A is the block's"
                )
            kept = kept if joined is None else joined
        self.outputs.setdefault(layer, []).append(output)
        self.records[layer] = kept

    def _check(self, layer: int, batch: int, queries: int, keys: int) -> bool:
        """Note attention that is not between all tokens of each image; whether it is."""
        tokens = self._progress.tokens
        whole = (batch, queries, keys) == (self._progress.batch, tokens, tokens)
        if layer < self._architecture.depth and (batch, queries) == (self._progress.batch, tokens) and keys > tokens:
            self.other.setdefault(
                layer,
                f"attention in its block {layer} has {keys} keys for {tokens} tokens: some belong to no token of the "
                "stream (learned memory, perhaps), so A is not between tokens alone",
            )
        elif layer < self._architecture.depth and not whole:
            self.other.setdefault(
                layer,
                f"attention in its block {layer} runs over {batch} x {queries} x {keys} tokens where "
                f"{self._progress.batch} x {tokens} x {tokens} are those of the images and of the stream: it is "
                "windowed, pooled or between channels, so there is no attention between all patches",
            )
        return whole

    def _between_channels(
        self, layer: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Cross-covariance or linear attention, which has no A between tokens; only the plain gradient goes through."""
        self.unknown.add(layer)
        self.other.setdefault(
            layer, f"attention in its block {layer} is between channels, so there is no attention between all patches"
        )
        output: Tensor = func(*args, **kwargs)
        return output

    # Written out by hand: q kᵀ, perhaps scaled and masked, softmax, A v ----------------------------------------------

    def on_matrix_product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product of matrices: that of A with v, if the architecture says so."""
        step = self._progress.step
        found = self._calls.get(step)
        if found is not None and found[1].spelling == "written" and not self._sums_over_tokens(found[1]):
            return self._attend_by_hand(*found, func, args, kwargs)
        output = func(*args, **kwargs)
        layer = self._progress.layer
        inside = layer is not None and self._progress.inside_block
        known = step in self._known_products and found is None
        if inside and not known and self._multiplies_tokens(func, args, kwargs):
            self.unknown.add(self._progress.next_block)
        return output

    def _sums_over_tokens(self, call: AttentionCall) -> bool:
        """Whether what looks like weights are sums over tokens: linear attention, q (kᵀ v), without a softmax."""
        placement = self._architecture.placements.get(call.score_step)
        return call.softmax_step < 0 and placement is not None and bool((placement.tokens < 0).all())

    def _multiplies_tokens(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        operands = product_operands(operation(func), args, kwargs)
        return operands is not None and all(map(in_graph, operands))

    def on_softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One that belongs to no attention: it weighs tokens in a head, or something else."""
        scores, layer = args[0], self._progress.layer
        if layer is None or not isinstance(scores, Tensor):
            return func(*args, **kwargs)
        if self._weighs_tokens(scores, args[1] if len(args) > 1 else kwargs.get("dim")):
            return self._under_rule(of_first(func, args, kwargs), scores, "pooling")
        if in_graph(scores) and self._progress.inside_block:
            self.unknown.add(layer)
        return func(*args, **kwargs)

    def _weighs_tokens(self, scores: Tensor, axis: Any) -> bool:
        """Whether a head is about to add up its tokens, by scores of shape (batch, tokens, any), some prefix left out.

        Slots that compete for tokens, (batch, slots, tokens), have a softmax over the same axis, but are fewer.
        """
        if not self._progress.behind or scores.dim() != 3 or axis not in (1, -2):
            return False
        tokens = self._progress.tokens
        return len(scores) == self._progress.batch and tokens < 2 * scores.shape[1] <= 2 * tokens

    def _attend_by_hand(
        self, layer: int, call: AttentionCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        if not call.over_tokens:
            return self._between_channels(layer, func, args, kwargs)
        operands = product_operands(operation(func), args, kwargs)
        assert operands is not None
        weights, value = operands if call.weights_first else operands[::-1]
        batch = self._progress.batch
        matrix = call.arrangement("weights").arrange(weights, batch)
        values = call.arrangement("value").arrange(value, batch)
        if matrix is None or values is None or len(matrix) != len(values):
            self._check(layer, weights.numel() // (call.queries * call.keys), call.queries, call.keys)
            return self._with_constant_weights(call, func, args, kwargs, weights)
        whole = self._check(layer, matrix.shape[0], *matrix.shape[-2:])
        values = in_every_head(values, matrix)
        query, key = self._query_and_key(call, matrix)
        factor, head_factor, followed = self._scores_of(layer, call, query, key)
        mixed = layer in self.mixed or not call.plain_weights
        unknown = key is None or (mixed and not self._follows_product(layer, call))
        if unknown:
            self.unknown_keys.add(layer)
        query_scale, key_scale = self._factor(call.query_scales), self._factor(call.key_scales)
        scale = factor * query_scale * key_scale
        # As the model made them: what q and k were scaled by counts with the scores.
        own_key = key if key is None or key_scale == 1 else key.detach() / key_scale
        record = AttentionRecord(
            query=None,
            key=values.new_full((), float("nan")).expand_as(values) if unknown or own_key is None else own_key.detach(),
            value=values.detach(),
            scale=self._scale(scale, head_factor, values if key is None else key),
            matrix=matrix.detach(),
            head_scale=head_factor,
        )
        if self._plan.needs.scores & {layer, layer - 1} and call.entering_step >= 0:  # behind the last block as in it
            record.scores = self._entering(call)
        if layer in self._plan.intervention.attention_scale and whole:
            output = self._attend_scaled(layer, call, record, values)
            shape = func(*args, **kwargs).shape
            restored = call.arrangement("output").restore(output, batch, shape)
            if layer in self.outputs:
                self.outputs[layer][-1] = restored
            return restored
        if self._following:
            output = self._follow(call, func, args, kwargs, (query, key, values, matrix), factor, followed=followed)
        else:
            output = self._with_constant_weights(call, func, args, kwargs, weights)
            if mixed and not unknown:
                factor = self._product_factor(call) * query_scale * key_scale
                record.product_gradient = self._product_gradient(call, output, factor)
        self._keep(layer, call, record, output)
        return output

    def _follows_product(self, layer: int, call: AttentionCall) -> bool:
        """Whether dy/d(q kᵀ) can be had by autograd: A is made of nothing else, and the block has one call."""
        calls = self._architecture.blocks[layer].attention if layer < self._architecture.depth else (call,)
        return call.scores_alone and len(calls) == 1 and self._order(layer) is None

    def _product_gradient(self, call: AttentionCall, output: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
        """A function that gives dy/d(q kᵀ) for dy/dO, both (batch, head, to, .), by the model's own steps."""
        product, batch = self._noted[call.score_step][2], self._progress.batch

        def gradient_of(output_gradient: Tensor) -> Tensor:
            rule, self._in_force.rule = self._in_force.rule, RULES["plain"]
            try:
                given = call.arrangement("output").restore(output_gradient, batch, output.shape).to(output.dtype)
                (found,) = torch.autograd.grad(output, product, given, retain_graph=True)
            finally:
                self._in_force.rule = rule
            arranged = call.arrangement("scores").arrange(found, batch)
            assert arranged is not None
            return arranged * factor

        return gradient_of

    def _with_constant_weights(
        self,
        call: AttentionCall,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: Tensor,
    ) -> Tensor:
        """The product, with A under the rule in force."""
        del call
        if self._rules_differ and weights.requires_grad:
            ruled = self._under_rule(_identity, weights, "softmax")
            args = tuple(_replaced(value, weights, ruled) for value in args)
            kwargs = {name: _replaced(value, weights, ruled) for name, value in kwargs.items()}
        product: Tensor = func(*args, **kwargs)
        return product

    def _follow(
        self,
        call: AttentionCall,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
        factor: float,
        *,
        followed: bool,
    ) -> Tensor:
        """The whole call under a rule that follows scores from q kᵀ to A v."""
        query, key, value, matrix = parts
        if not followed or query is None or key is None:
            raise UnsupportedModelError(
                f"{self._architecture.name} writes out its attention in a way that the rules "
                f"{', '.join(self._following)} cannot follow; use its fused attention, if it has one"
            )
        output: Tensor = func(*args, **kwargs).detach()
        arrangement, batch = call.arrangement("output"), self._progress.batch
        arranged = arrangement.arrange(output, batch)
        assert arranged is not None
        record = AttentionRecord(query, key, value, factor, matrix=matrix.detach())
        ruled = Attend.apply(query, key, value, arranged.clone, record, self._in_force)
        return arrangement.restore(ruled, batch, output.shape)

    def _query_and_key(self, call: AttentionCall, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What was multiplied to scores, (batch, head, token, channel)."""
        noted = self._noted.get(call.score_step)
        if noted is None:
            return None, None
        args, kwargs, _ = noted
        operands = product_operands(operation_of(self._architecture, call.score_step), args, kwargs)
        if operands is None:
            return None, None
        query, key = operands if call.query_first else operands[::-1]
        batch = self._progress.batch
        arranged = call.arrangement("query").arrange(query, batch), call.arrangement("key").arrange(key, batch)
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
                product *= 1 / number if operation_of(self._architecture, step) == "div" else number
        return product

    def _entering(self, call: AttentionCall) -> Tensor | None:
        """What entered the softmax, (batch, head, to, from)."""
        noted = self._noted.get(call.entering_step)
        if noted is None:
            return None
        scores = noted[2]
        return call.arrange_scores(scores.detach(), self._progress.batch) if isinstance(scores, Tensor) else None

    def _scores_of(
        self, layer: int, call: AttentionCall, query: Tensor | None, key: Tensor | None
    ) -> tuple[float, Tensor | None, bool]:
        """What q kᵀ was multiplied with, as a number or head by head, and whether rules can follow it."""
        factors = None if call.score_steps is None else self._factors(call)
        if factors is None:
            measured = self._measured_factor(call, query, key)
            if measured is None:
                self.mixed.add(layer)
            return (1.0, None, False) if measured is None else (*measured, False)
        self._note_biases(layer, call)
        factor, head_factor = factors
        return factor, head_factor, head_factor is None and call.plain_weights

    def _factors(self, call: AttentionCall) -> tuple[float, Tensor | None] | None:
        """The constants that scores are multiplied with; ``None`` where one is more than a number for each head."""
        factor, head_factor = self._product_factor(call), None
        for each in call.score_steps or ():
            if each.kind != "scale":
                continue
            args, kwargs, _ = self._noted[each.step]
            number = _factor_of(_other_operand(args, kwargs))
            if number is None:
                return None
            number = 1 / number if operation_of(self._architecture, each.step) == "div" else number
            if isinstance(number, Tensor):
                head_factor = number if head_factor is None else head_factor * number
            else:
                factor *= number
        return factor, head_factor

    def _note_biases(self, layer: int, call: AttentionCall) -> None:
        """Keep what is added to scores, and what hides some of them."""
        added: list[Tensor | None] = []
        for each in call.score_steps or ():
            args, kwargs, output = self._noted[each.step]
            if each.kind == "bias":
                added.append(torch.as_tensor(_other_operand(args, kwargs)).detach())
            elif each.kind == "mask":
                added.append(_hidden(args, kwargs, output))
        if added:
            self.biases.setdefault(layer, []).extend(added)

    def _product_factor(self, call: AttentionCall) -> float:
        """What the product itself multiplies with, as ``baddbmm`` may."""
        _, kwargs, _ = self._noted[call.score_step]
        return float(kwargs.get("alpha", 1)) if operation_of(self._architecture, call.score_step) == "baddbmm" else 1.0

    def _measured_factor(
        self, call: AttentionCall, query: Tensor | None, key: Tensor | None
    ) -> tuple[float, Tensor | None] | None:
        """Find out what q kᵀ was multiplied with on a way that was not followed; ``None`` if it is no number per head.

        To a softmax it is the same what is added to a whole row (written-out ones take off the largest score), so rows
        are compared without their means.
        """
        entering = self._entering(call)
        if entering is None or query is None or key is None:
            return None
        products, scores = (
            rows - rows.mean(dim=-1, keepdim=True)
            for rows in (exact(query.detach() @ key.detach().transpose(-2, -1)), exact(entering))
        )
        factor = (products * scores).sum(dim=(0, 2, 3)) / products.square().sum(dim=(0, 2, 3))
        factor = factor.view(-1, 1, 1)
        if not bool((scores - factor * products).abs().amax() < _ROUNDING * scores.abs().amax()):
            return None
        one = float(factor.mean())
        alike = bool((factor - one).abs().amax() < _ROUNDING * abs(one))
        return (1.0 if abs(one - 1) < _ROUNDING else one, None) if alike else (1.0, factor)

    def _scale(self, factor: float, head_factor: Tensor | None, key: Tensor) -> float:
        """The number in front of q kᵀ: what scores were multiplied with, or else what q is likely to have been."""
        if factor != 1:
            return factor
        return float(key.shape[-1] ** -0.5) if head_factor is None else 1.0


def operation_of(architecture: Architecture, step: int) -> str:
    """What a step does."""
    return architecture.operations[step]


def _identity(values: Tensor) -> Tensor:
    return values.view_as(values)


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, old, new) for item in value)
    return value


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
    return exact(other.detach()).reshape(-1, 1, 1) if by_head else None


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """The bias that ``masked_fill(scores, mask, value)`` stands for, if its value hides."""
    value = args[2] if len(args) > 2 else kwargs.get("value")
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    if not isinstance(value, int | float) or value >= HIDDEN:
        return None
    return torch.zeros((), dtype=output.dtype, device=output.device)
