"""Records attention, in whatever way a model spells it, and puts it under the active rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import EXACT
from vitreous.architecture import Architecture
from vitreous.architecture.attention import AttentionCall
from vitreous.architecture.operations import product_operands
from vitreous.architecture.trace import depends_on_input
from vitreous.tape.attention import written as multihead
from vitreous.tape.attention.record import (
    AttentionRecord,
    attend_fused,
    attention_arguments,
    bias_of_heads,
    heads_of,
    in_every_head,
    rows_of,
    score_rows,
)
from vitreous.tape.attention.written import ScoreReader, WrittenScores
from vitreous.tape.recording.interception import Handler, Progress, TorchCall, in_graph
from vitreous.tape.recording.plan import Plan
from vitreous.tape.rules import RULES
from vitreous.tape.rules.autograd import ActiveRule, Attend, Elementwise, Kind, share

# mypy: disable-error-code="no-untyped-call"

_EMPTY = AttentionRecord(None, torch.empty(0), torch.empty(0), 1.0)


class AttentionHandler:
    """Records the attention calls that a plan names and puts them under the active rule.

    ``on_linear`` are the handlers of the projections inside ``multi_head_attention_forward``.

    Attributes:
        records: the attention calls of the blocks.
        outputs: O of the calls of each block, as they stand in the graph; several calls are one with all their heads.
        biases: all that is added to the scores of a block: relative positions, masks; ``None`` for what is not known.
        mixed: the blocks whose scores are not q kᵀ alone or not followed to the softmax.
        unknown_keys: those of them in which q and k by themselves do not say how the output depends on them.
        other: by block, why its attention is not one between all tokens of an image.
        unknown: the blocks in which tokens are multiplied with each other, or weighed, in a way that is no attention.
        multiplied: the blocks in which tokens are multiplied with each other so, also where no gradient comes.
        unfollowed: the blocks whose attention is more than softmax(scale q kᵀ + bias) v, for rules that treat it whole.
        after_blocks: the attention calls after the last block, in order; one of them may be what pools the tokens.
        scores: reads the scores of attention that a model writes out itself.
    """

    def __init__(
        self,
        architecture: Architecture,
        plan: Plan,
        progress: Progress,
        active_rule: ActiveRule,
        on_linear: tuple[Handler, ...],
    ) -> None:
        self._architecture, self._plan, self._progress, self._active_rule = architecture, plan, progress, active_rule
        self._on_linear = on_linear
        self.records: dict[int, AttentionRecord] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self.biases: dict[int, list[Tensor | None]] = {}
        self.mixed: set[int] = set()
        self.unknown_keys: set[int] = set()
        self.other: dict[int, str] = {}
        self.unknown: set[int] = set()
        self.multiplied: set[int] = set()
        self.unfollowed: set[int] = set()
        self.after_blocks: list[tuple[AttentionRecord, Tensor, AttentionCall]] = []
        self._rules_differ = bool(plan.rules - {"plain"})
        self._plain_gradients = self._rules_differ and any(RULES[name].reads_plain_attention for name in plan.rules)
        self._follows = any(RULES[name].follows_scores for name in plan.rules)
        self._calls: dict[int, tuple[int, AttentionCall]] = {}
        for layer, block in enumerate(architecture.blocks):
            self._calls.update((call.output_step, (layer, call)) for call in block.attention)
        others = (*architecture.pooling, *architecture.later)
        self._calls.update((call.output_step, (architecture.depth, call)) for call in others)
        self._later = {call.output_step for call in architecture.later}
        self.scores = ScoreReader(architecture, progress, [spec for _, spec in self._calls.values()])
        self._pooling: AttentionCall | None = None

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

    def _by_head(self, spec: AttentionCall | None, tensor: Tensor) -> Tensor:
        if spec is None or spec.spelling != "written":
            heads_first = spec is not None and spec.heads_first
            return tensor if tensor.dim() == 4 else heads_of(tensor, self._progress.batch, heads_first=heads_first)
        arranged = spec.arrangement("output").arrange(tensor, self._progress.batch)
        assert arranged is not None
        return arranged

    def pool_by(self, place: int) -> None:
        """Of the calls after the last block, take this one for what pools the tokens."""
        depth, tokens = self._architecture.depth, self._progress.tokens
        record, output, self._pooling = self.after_blocks[place]
        # A class token of the head's own may stand before the stream's tokens (CaiT).
        self.records[depth] = record if record.key.shape[2] <= tokens else record.last_keys(tokens)
        self.outputs[depth] = [output]

    def on_fused(self, call: TorchCall) -> Any:
        """``scaled_dot_product_attention``."""
        found = self._calls.get(self._progress.step)
        if found is None:
            return call.proceed()
        layer, spec = found
        if not spec.over_tokens:
            return self._between_channels(layer, call)
        query, key, value, bias, scale = attention_arguments(*call.args, **call.kwargs)
        batch = self._progress.batch
        if query.dim() > 4:  # windows of an image, each of which counts as one
            ahead = query.shape[:-3]
            if bias is not None:
                bias = bias.expand(*ahead, *bias.shape[-3:]).flatten(0, -4) if bias.dim() > 3 else bias
            query, key, value = (part.flatten(0, -4) for part in (query, key, value))
            flat = self._attend(layer, spec, query, key, value, bias, scale)
            return flat.view(*ahead, *flat.shape[1:])
        if query.dim() != 3:
            return self._attend(layer, spec, query, key, value, bias, scale)
        if len(query) % batch:
            return call.proceed()
        first = spec.heads_first
        query, key, value = (heads_of(part, batch, heads_first=first) for part in (query, key, value))
        bias = bias_of_heads(bias, batch, heads_first=first)
        return rows_of(self._attend(layer, spec, query, key, value, bias, scale), heads_first=first)

    def on_multi_head(self, call: TorchCall) -> Any:
        """``multi_head_attention_forward``."""
        found = self._calls.get(self._progress.step)
        if found is None or not multihead.can_open(call.args, call.kwargs):
            return call.proceed()
        layer, spec = found
        return multihead.open_up(
            lambda query, key, value, bias: self._attend(layer, spec, query, key, value, bias, query.shape[-1] ** -0.5),
            self._linear,
            call.args,
            call.kwargs,
        )

    def _linear(self, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A projection inside ``multi_head_attention_forward``, through the handlers of a linear layer."""
        result: Tensor = TorchCall(nn.functional.linear, (tokens, weight, bias), handlers=self._on_linear).proceed()
        return result

    def _attend(
        self,
        layer: int,
        spec: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        self._check(layer, spec, query.shape[0], query.shape[2], key.shape[2])
        constant_bias = None if bias is None else bias.detach()
        record = AttentionRecord(query.detach(), key.detach(), value.detach(), scale, constant_bias)
        if bias is not None:
            self.biases.setdefault(layer, []).append(constant_bias)
        if layer in self._plan.intervention.attention_scale:
            return self._attend_scaled(layer, spec, record, value)
        if bias is not None and in_graph(bias):
            scores = self._shared(score_rows(query, key, scale, None)) + bias
            return self._attend_by_scores(layer, spec, record, value, scores)
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
            output: Tensor = Attend.apply(query, key, value, forward_call, record, self._active_rule)
        else:
            output = forward_call()
        self._keep(layer, spec, record, output)
        return output

    def _attend_by_scores(
        self, layer: int, spec: AttentionCall, record: AttentionRecord, value: Tensor, scores: Tensor
    ) -> Tensor:
        """With a mask that depends on the tokens, which has a gradient of its own where A has one."""
        self.mixed.add(layer)
        self.unfollowed.add(layer)
        self.unknown_keys.add(layer)
        weights = self._under_rule(partial(torch.softmax, dim=-1), scores, "softmax")
        record.matrix = weights.detach()
        output = self._shared(weights.to(value.dtype) @ value)
        self._keep(layer, spec, record, output)
        return output

    def _under_rule(self, function: Callable[[Tensor], Tensor], scores: Tensor, kind: Kind) -> Tensor:
        """A function of scores, under the active rule."""
        if not (self._rules_differ and scores.requires_grad):
            return function(scores)
        weights: Tensor = Elementwise.apply(scores, function, 0.0, kind, self._active_rule)
        return weights

    def _shared(self, product: Tensor) -> Tensor:
        """A product inside attention, both factors of which get what the active rule leaves them."""
        if self._follows and product.requires_grad:
            share(product, self._active_rule)
        return product

    def _attend_scaled(self, layer: int, spec: AttentionCall, record: AttentionRecord, value: Tensor) -> Tensor:
        """With another attention matrix than the model's: a multiple of it, and a constant."""
        factors = self._plan.intervention.attention_scale[layer].to(record.value)
        record.matrix = record.rows(slice(None)).to(value.dtype) * factors[:, None, None, None]
        output = record.matrix @ value
        self._keep(layer, spec, record, output)
        return output

    def _worth_keeping(self, layer: int, record: AttentionRecord) -> bool:
        """Keep A where all of it is needed and it is not larger than half of what a block's backward pass keeps anyway.

        That is about 14 numbers per channel of a token. In half precision the fused kernel's own rounding is wanted.
        """
        if layer not in self._plan.needs.attention or record.value.dtype not in EXACT:
            return False
        width = record.heads * record.value.shape[-1]
        return record.heads * record.key.shape[2] <= 7 * width

    def _keep(self, layer: int, spec: AttentionCall, record: AttentionRecord, output: Tensor) -> None:
        if layer == self._architecture.depth:
            if spec.output_step not in self._later:
                self.after_blocks.append((record, output, spec))
            return
        if spec.key_tokens and record.key.shape[2] == spec.keys and layer in self._plan.attention:
            record = record.of_keys(torch.tensor(spec.key_tokens))
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

    def _check(self, layer: int, spec: AttentionCall, batch: int, queries: int, keys: int) -> bool:
        """Note attention that is not between all tokens of each image; whether it is."""
        tokens = self._progress.tokens
        looked_at = len(spec.key_tokens) if spec.key_tokens and keys == spec.keys else keys
        whole = (batch, queries, looked_at) == (self._progress.batch, tokens, tokens)
        attends = layer < self._architecture.depth and (batch, queries) == (self._progress.batch, tokens)
        if attends and keys > tokens and not whole:
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

    def _between_channels(self, layer: int, call: TorchCall) -> Tensor:
        """Cross-covariance or linear attention, which has no A between tokens; only the plain gradient goes through."""
        self.unknown.add(layer)
        self.other.setdefault(
            layer, f"attention in its block {layer} is between channels, so there is no attention between all patches"
        )
        output: Tensor = call.proceed()
        return output

    # Attention that a model writes out: q kᵀ, perhaps scaled and masked, softmax, A v --------------------------------

    def on_matrix_product(self, call: TorchCall) -> Any:
        """A product of matrices; at the step that the architecture names, that of A with v."""
        step = self._progress.step
        found = self._calls.get(step)
        if found is not None and found[1].spelling == "written" and not self._sums_over_tokens(found[1]):
            return self._attend_written(*found, call)
        output = call.proceed()
        if step in self.scores.products and found is None:
            return self._shared(output)
        operands = product_operands(call.operation, call.args, call.kwargs)
        if self._progress.inside_block and operands is not None and all(map(depends_on_input, operands)):
            self.multiplied.add(self._progress.next_block)
            if all(map(in_graph, operands)):
                self.unknown.add(self._progress.next_block)
        return output

    def _sums_over_tokens(self, spec: AttentionCall) -> bool:
        """Whether what looks like weights are sums over tokens: linear attention, q (kᵀ v), without a softmax."""
        placement = self._architecture.placements.get(spec.score_step)
        return spec.softmax_step < 0 and placement is not None and bool((placement.tokens < 0).all())

    def on_softmax(self, call: TorchCall) -> Any:
        """One that belongs to no attention: it weighs tokens in a head, or something else."""
        scores, layer = call.args[0], self._progress.layer
        if layer is None or not isinstance(scores, Tensor):
            return call.proceed()
        if self._weighs_tokens(scores, call.argument(1, "dim")):
            return self._under_rule(call.of_first(), scores, "pooling")
        if in_graph(scores) and self._progress.inside_block:
            self.unknown.add(layer)
        return call.proceed()

    def _weighs_tokens(self, scores: Tensor, axis: Any) -> bool:
        """Whether a head is about to add up its tokens, by scores of shape (batch, tokens, any), some prefix left out.

        Slots that compete for tokens, (batch, slots, tokens), have a softmax over the same axis, but are fewer.
        """
        if not self._progress.after_blocks or scores.dim() != 3 or axis not in (1, -2):
            return False
        tokens = self._progress.tokens
        return len(scores) == self._progress.batch and tokens < 2 * scores.shape[1] <= 2 * tokens

    def _attend_written(self, layer: int, spec: AttentionCall, call: TorchCall) -> Tensor:
        """A v of attention that a model writes out itself."""
        if not spec.over_tokens:
            return self._between_channels(layer, call)
        operands = product_operands(call.operation, call.args, call.kwargs)
        assert operands is not None
        weights, value = operands if spec.weights_first else operands[::-1]
        batch = self._progress.batch
        matrix = spec.arrangement("weights").arrange(weights, batch)
        values = spec.arrangement("value").arrange(value, batch)
        if matrix is None or values is None or len(matrix) != len(values):
            self._check(layer, spec, weights.numel() // (spec.queries * spec.keys), spec.queries, spec.keys)
            self.unfollowed.add(layer)
            return self._shared(self._with_ruled_weights(call, weights))
        whole = self._check(layer, spec, matrix.shape[0], *matrix.shape[-2:])
        values = in_every_head(values, matrix)
        scores = self.scores.read(spec, matrix)
        record = self._written_record(layer, spec, scores, matrix, values)
        if layer in self._plan.intervention.attention_scale and whole:
            scaled = self._attend_scaled(layer, spec, record, values)
            restored = spec.arrangement("output").restore(scaled, batch, call.proceed().shape)
            if layer in self.outputs:
                self.outputs[layer][-1] = restored
            return restored
        by_head = scores.head_factor is None or len(scores.head_factor) == matrix.shape[1]
        followed = scores.followed and by_head and scores.query is not None and scores.key is not None
        if not followed:
            self.unfollowed.add(layer)
        if self._follows and followed:
            output = self._follow(spec, call, scores, values, matrix)
        else:
            output = self._shared(self._with_ruled_weights(call, weights))
            if layer not in self.unknown_keys and self._is_mixed(layer, spec):
                record.product_gradient = self._product_gradient(spec, output, scores.own_scale)
        self._keep(layer, spec, record, output)
        return output

    def _is_mixed(self, layer: int, spec: AttentionCall) -> bool:
        """Whether A is made of q kᵀ by more than scaling, adding constants and a softmax."""
        return layer in self.mixed or not spec.plain_weights

    def _follows_product(self, layer: int, spec: AttentionCall) -> bool:
        """Whether autograd gives dy/d(q kᵀ): A is made of nothing else, and the block has one call."""
        specs = self._architecture.blocks[layer].attention if layer < self._architecture.depth else (spec,)
        return spec.scores_alone and len(specs) == 1 and self._order(layer) is None

    def _product_gradient(self, spec: AttentionCall, output: Tensor, own_scale: float) -> Callable[[Tensor], Tensor]:
        """A function that gives dy/d(q kᵀ) for dy/dO, both (batch, head, to, .), by the model's own steps."""
        product, batch = self.scores.product(spec), self._progress.batch
        factor = self.scores.product_factor(spec) * own_scale

        def gradient_of(output_gradient: Tensor) -> Tensor:
            rule, self._active_rule.rule = self._active_rule.rule, RULES["plain"]
            try:
                given = spec.arrangement("output").restore(output_gradient, batch, output.shape).to(output.dtype)
                (found,) = torch.autograd.grad(output, product, given, retain_graph=True)
            finally:
                self._active_rule.rule = rule
            arranged = spec.arrangement("scores").arrange(found, batch)
            assert arranged is not None
            return arranged * factor

        return gradient_of

    def _written_record(
        self, layer: int, spec: AttentionCall, scores: WrittenScores, matrix: Tensor, values: Tensor
    ) -> AttentionRecord:
        if scores.mixed:
            self.mixed.add(layer)
        if scores.biases:
            self.biases.setdefault(layer, []).extend(scores.biases)
        key = scores.own_key
        unknown = key is None or (self._is_mixed(layer, spec) and not self._follows_product(layer, spec))
        if unknown:
            self.unknown_keys.add(layer)
        record = AttentionRecord(
            query=None,
            key=values.new_full((), float("nan")).expand_as(values) if unknown or key is None else key.detach(),
            value=values.detach(),
            scale=scores.scale(values),
            matrix=matrix.detach(),
            head_scale=scores.head_factor,
        )
        if self._plan.needs.scores & {layer, layer - 1} and spec.entering_step >= 0:  # after the last block as in it
            record.scores = self.scores.entering(spec)
        return record

    def _with_ruled_weights(self, call: TorchCall, weights: Tensor) -> Tensor:
        """The product A v, with A under the active rule."""
        args, kwargs = call.args, call.kwargs
        if self._rules_differ and weights.requires_grad:
            ruled = self._under_rule(_identity, weights, "softmax")
            args = tuple(_replaced(value, weights, ruled) for value in args)
            kwargs = {name: _replaced(value, weights, ruled) for name, value in kwargs.items()}
        product: Tensor = call.proceed_with(args, kwargs)
        return product

    def _follow(
        self, spec: AttentionCall, call: TorchCall, scores: WrittenScores, value: Tensor, matrix: Tensor
    ) -> Tensor:
        """The whole call under a rule that follows scores from q kᵀ to A v."""
        query, key = scores.query, scores.key
        assert query is not None
        assert key is not None
        output: Tensor = call.proceed().detach()
        arrangement, batch = spec.arrangement("output"), self._progress.batch
        arranged = arrangement.arrange(output, batch)
        assert arranged is not None
        record = AttentionRecord(
            query, key, value, scores.factor, matrix=matrix.detach(), head_scale=scores.head_factor
        )
        ruled = Attend.apply(query, key, value, arranged.clone, record, self._active_rule)
        return arrangement.restore(ruled, batch, output.shape)


def _identity(values: Tensor) -> Tensor:
    return values.view_as(values)


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, old, new) for item in value)
    return value
