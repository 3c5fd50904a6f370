"""The recorder: what is kept of one forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vitreous.architecture import Architecture, Point
from vitreous.errors import UnsupportedModelError
from vitreous.tape import interception as heard
from vitreous.tape.attention_listener import AttentionListener
from vitreous.tape.cuts import Cuts
from vitreous.tape.embedding import Embedding, embedding_of
from vitreous.tape.functions import InForce
from vitreous.tape.interception import Handler, Interception, result_at, with_result
from vitreous.tape.linear_maps import LinearMaps
from vitreous.tape.plan import PIXELS, Plan
from vitreous.tape.progress import Progress
from vitreous.tape.relevance_listener import RelevanceListener
from vitreous.tape.rule_listener import RuleListener
from vitreous.tape.rulebook import RULES


class Recorder:
    """Listens to one forward pass and keeps what ``plan`` asks for.

    Attributes:
        progress: how far the pass has come.
        in_force: the rule that backward passes follow.
        tokens: block inputs x_l as they stand in the graph; index L holds the last block's output.
        norms: the outputs of the blocks' first norms, as they stand in the graph.
        mids: the stream with the attention branch of a block added.
        middles: the stream between the two parts of a block: in a post-norm block, normalised.
        ends: the stream with the feed-forward branch of a block added.
        attention: the attention calls.
        linear_maps: the weights of norms and projections, as the run had them.
        relevance: what rules that carry relevance could follow.
        cuts: the calls at which gradients end.
        embeddings: the convolutions and poolings before the first block, among them the patch embedding.
        embedded: in a run that puts other tokens in the place of a block's, those that the model itself made.
        leaf: where the graph begins, if that is in front of a block or behind the last.
    """

    def __init__(self, architecture: Architecture, plan: Plan, batch: int, *, reads_text: bool = False) -> None:
        self.architecture, self.plan, self._reads_text = architecture, plan, reads_text
        self.progress = Progress(architecture, batch)
        self.in_force = InForce(RULES["plain"])
        self.cuts = Cuts(self.progress)
        self.tokens: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.mids: dict[int, Tensor] = {}
        self.middles: dict[int, Tensor] = {}
        self.ends: dict[int, Tensor] = {}
        self.embeddings: list[Embedding] = []
        self.embedded: Tensor | None = None
        self.leaf: Tensor | None = None
        self._rules = RuleListener(plan, self.progress, self.in_force, architecture)
        self.relevance = RelevanceListener(architecture, plan, self.progress, self.in_force, self._rules.is_gate)
        on_linear = self.relevance.over(self._rules.on_opened_linear, self.relevance.on_linear)

        def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = on_linear(F.linear, (tokens, weight, bias), {})
            return result

        self.attention = AttentionListener(architecture, plan, self.progress, self.in_force, linear)
        self.linear_maps = LinearMaps(architecture, plan.needs)
        self._points = self._wanted_points()
        self.own_steps = self.attention.own_steps
        self.steps = frozenset(self._points) | self.attention.score_steps | self.linear_maps.steps

    def _wanted_points(self) -> dict[int, list[tuple[str, int, Point]]]:
        """By step: what of its results is kept, and as what."""
        points: dict[int, list[tuple[str, int, Point]]] = defaultdict(list)

        def keep(kind: str, layer: int, point: Point) -> None:
            points[point.step].append((kind, layer, point))

        blocks, needs = self.architecture.blocks, self.plan.needs
        for layer, block in enumerate(blocks):
            keep("stream", layer, block.input)
            if layer in needs.halves | needs.linear_norms:
                keep("mid", layer, block.residual_mid)
                keep("middle", layer, block.middle)
                keep("end", layer, block.residual_post)
            if layer in self.plan.norms:
                keep("norm", layer, block.normalised)
        keep("stream", len(blocks), blocks[-1].output)
        # The stream last: what stands in its place is for all who read it behind.
        for kept in points.values():
            kept.sort(key=lambda each: each[0] == "stream")
        return points

    def listening(self) -> Interception:
        """The context in which the model has to run."""
        handlers = {function: self.cuts.over(handler) for function, handler in self._handlers().items()}
        return Interception(self.architecture, self, handlers, self.cuts.over(self._otherwise))

    def before(self, number: int) -> None:
        """A step is about to run."""
        self.progress.step = number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Keep what a step gave; start the graph where the first block that needs one begins."""
        self.attention.after(number, args, kwargs, output)
        self.linear_maps.after(number, args, kwargs)
        for kind, layer, point in self._points.get(number, ()):
            value = result_at(output, point.output)
            if kind == "stream":
                output = with_result(output, point.output, self._on_stream(layer, point, value))
            elif kind == "mid":
                self.mids[layer] = point.axes.tokens(value)
            elif kind == "middle":
                self.middles[layer] = point.axes.tokens(value)
            elif kind == "end":
                self.ends[layer] = point.axes.tokens(value)
            else:
                self.norms[layer] = value
        return output

    def _on_stream(self, layer: int, point: Point, stream: Tensor) -> Tensor:
        """x_l has been made."""
        name, depth = self.architecture.name, self.progress.depth
        if layer == 0 and self.plan.intervention.stream is not None:
            stream = self.embedded = _in_graph_from_here(stream)
        replacement = self.plan.intervention.replacement(layer)
        if replacement is not None:
            self.progress.batch = len(replacement)
            stream = point.axes.stream(replacement.detach(), stream.shape)
        count = point.axes.tokens(stream).shape[1]
        if layer > 0 and count != self.progress.tokens:
            raise UnsupportedModelError(
                f"{name} has {self.progress.tokens} tokens in front of block {layer - 1} and {count} behind it: tokens "
                "that are dropped or joined on the way have no place in a map"
            )
        self.progress.tokens = count
        # Numbers of tokens have no gradient, so what a text's model embeds them as is its input.
        input_is_wanted = self._reads_text and layer == 0 and self.plan.graph_start == PIXELS
        starts = layer == self.plan.graph_start and not (0 < layer < depth and stream.requires_grad)
        if starts or input_is_wanted or (layer == depth and not stream.requires_grad):
            stream = self.leaf = _in_graph_from_here(stream)
        if input_is_wanted:
            self.tokens[PIXELS] = stream
        if layer in self.plan.tokens or layer == depth:
            self.tokens[layer] = stream
        if layer > 0:
            self._rules.forget()
        if layer == depth:
            self.relevance.leave_last_block()
        return stream

    def stream_of(self, layer: int, tensor: Tensor) -> Tensor:
        """A tensor that lies in memory as x_l does, as (batch, tokens, channels)."""
        blocks = self.architecture.blocks
        point = blocks[layer].input if layer < len(blocks) else blocks[-1].output
        return point.axes.tokens(tensor)

    def norm_of(self, layer: int, tensor: Tensor) -> Tensor:
        """A tensor that lies in memory as the output of a block's first norm does, as (batch, tokens, channels)."""
        return self.architecture.blocks[layer].normalised.axes.tokens(tensor)

    def _otherwise(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that nobody waits for."""
        return self.relevance.on_unknown(func, args, kwargs) if self.relevance.follows else func(*args, **kwargs)

    def _handlers(self) -> dict[Callable[..., Any], Handler]:
        attention, rules, relevance = self.attention, self._rules, self.relevance
        handlers: dict[Callable[..., Any], Handler] = {}

        def hear(functions: tuple[Callable[..., Any], ...], handler: Handler) -> None:
            handlers.update(dict.fromkeys(functions, handler))

        hear(heard.CONVOLUTION, relevance.over(self._on_convolution, relevance.on_embedding))
        hear(heard.CONVOLUTION_OF_ROW, relevance.noting(self._on_convolution_of_row))
        hear(heard.GRID_POOLING, self._on_pooling)
        in_blocks = lambda: self.progress.layer is not None  # noqa: E731
        hear(heard.ATTENTION, relevance.noting(attention.on_fused, unless=in_blocks))
        hear(heard.MULTI_HEAD_ATTENTION, attention.on_multi_head)
        hear(heard.SOFTMAX, relevance.noting(attention.on_softmax, unless=in_blocks))
        product = relevance.over(attention.on_matrix_product, relevance.on_matrix_product)
        hear(heard.MATRIX_PRODUCT, rules.before_product(product) if rules.rules_differ else product)
        hear(heard.SAME_VALUES, relevance.over(_as_it_is, relevance.on_same_values))
        if rules.rules_differ:
            hear(heard.RMS_NORM, rules.on_rms_norm)
            hear(heard.NORMALIZE, relevance.over_normalize(rules.on_normalize))
            divided = (*heard.DIVISION, *heard.DIVISION_IN_PLACE, *heard.MASKED_FILL)
            hear(divided, rules.over_division(relevance.on_divide))
        if rules.rules_differ or self.plan.biases:
            hear(heard.LAYER_NORM, rules.on_layer_norm)
            hear(heard.BATCH_NORM, relevance.noting(rules.on_batch_norm))
            hear(heard.GROUP_NORM, relevance.noting(rules.on_group_norm))
            hear(heard.ADDED_PRODUCT, relevance.noting(rules.on_added_product))
            hear(heard.JOINING, relevance.noting(rules.on_join))
            hear(heard.INVERSE_ROOT, rules.on_deviation)
            hear(heard.DEVIATION, relevance.noting(rules.on_deviation))
            hear(heard.DEVIATION_AND_MEAN, relevance.noting(rules.on_deviation_and_mean))
            hear(heard.DEVIATION_STEPS, relevance.noting(rules.on_deviation_step))
            hear(heard.ROOT, rules.on_length)
            hear(heard.SQUARE, relevance.noting(rules.on_square))
            hear(heard.POWER, rules.on_power)
            hear(heard.LENGTHS, relevance.noting(rules.on_length))
            hear(tuple(heard.ACTIVATIONS), rules.on_activation)
            hear(tuple(heard.GATES), relevance.noting(rules.on_gate, unless=lambda: self.progress.inside_block))
            hear(heard.TANH, relevance.noting(rules.on_gate, unless=lambda: self.progress.layer is not None))
            hear(heard.MULTIPLICATION, relevance.over(rules.on_multiply, relevance.on_multiply))
            hear(heard.ADDITION, relevance.over(rules.on_add, relevance.on_add))
            hear(heard.MULTIPLICATION_IN_PLACE, relevance.noting(rules.on_multiply_in_place))
            hear(heard.ADDITION_IN_PLACE, relevance.noting(rules.on_add))
            hear(heard.SUBTRACTION, relevance.noting(rules.on_subtract))
            hear(heard.SUBTRACTION_FROM, relevance.noting(rules.on_subtract_from))
            hear(heard.GATED, relevance.noting(rules.on_gated))
            hear(heard.LINEAR, relevance.over(rules.on_linear, relevance.on_linear))
            hear(heard.ADDMM, relevance.noting(rules.on_addmm))
        if relevance.follows:
            hear(heard.POOLING, relevance.on_pool)
        return handlers

    def _on_convolution(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.progress.reached_blocks:
            return self._rules.on_convolution(func, args, kwargs)
        output = func(*args, **kwargs)
        self.embeddings.append(embedding_of(output, *args, **kwargs))
        return output

    def _on_convolution_of_row(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In front of the blocks it makes no grid of patches."""
        return self._rules.on_convolution(func, args, kwargs) if self.progress.reached_blocks else func(*args, **kwargs)

    def _on_pooling(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._otherwise(func, args, kwargs)
        if not self.progress.reached_blocks and isinstance(output, Tensor):
            self.embeddings.append(Embedding.without_patch(output, args[0]))
        return output


def _as_it_is(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _in_graph_from_here(tokens: Tensor) -> Tensor:
    """The model's own tensor with a gradient, wherever the model reads it; nothing that made it is in the graph."""
    if tokens.requires_grad or isinstance(tokens, nn.Parameter):  # made with a gradient of its own, or not ours to mark
        return tokens.detach().requires_grad_()
    return tokens.requires_grad_()
