"""The recorder: what is kept of one forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vitreous.architecture import Architecture, Point
from vitreous.errors import UnsupportedModelError
from vitreous.tape.attention.handler import AttentionHandler
from vitreous.tape.patches.embedding import Embedding, embedding_of
from vitreous.tape.recording import torch_functions as ops
from vitreous.tape.recording.gradient_breaks import GradientBreaks, mark_below_graph
from vitreous.tape.recording.interception import Handler, Interception, Progress, result_at, with_result
from vitreous.tape.recording.linear_maps import LinearMaps
from vitreous.tape.recording.plan import PIXELS, Plan
from vitreous.tape.rules import RULES
from vitreous.tape.rules.autograd import ActiveRule
from vitreous.tape.rules.handler import RuleHandler
from vitreous.tape.rules.relevance_handler import RelevanceHandler


class Recorder:
    """Intercepts one forward pass and keeps what ``plan`` names.

    Attributes:
        progress: how far the pass has come.
        active_rule: the rule that backward passes follow.
        tokens: block inputs x_l as they stand in the graph; index L holds the last block's output.
        norms: the outputs of the blocks' first norms, as they stand in the graph.
        residual_mids: the stream with the attention branch of a block added.
        after_attention: the stream between the two parts of a block: in a post-norm block, normalised.
        residual_posts: the stream with the feed-forward branch of a block added.
        attention: the attention calls.
        linear_maps: the weights of norms and projections, as the run had them.
        relevance: what rules that carry relevance could follow.
        gradient_breaks: the calls at which gradients end.
        embeddings: the convolutions and poolings before the first block, among them the patch embedding.
        embedded: in a run that puts other tokens in the place of a block's, those that the model itself made.
        leaf: where the graph begins, if that is in front of a block or behind the last.
    """

    def __init__(self, architecture: Architecture, plan: Plan, batch: int, *, reads_text: bool = False) -> None:
        self.architecture, self.plan, self._reads_text = architecture, plan, reads_text
        self.progress = Progress(architecture, batch)
        self.active_rule = ActiveRule(RULES["plain"])
        self.gradient_breaks = GradientBreaks(
            self.progress, marks_below=bool(plan.biases) and plan.graph_start != PIXELS
        )
        self.tokens: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.residual_mids: dict[int, Tensor] = {}
        self.after_attention: dict[int, Tensor] = {}
        self.residual_posts: dict[int, Tensor] = {}
        self.embeddings: list[Embedding] = []
        self.embedded: Tensor | None = None
        self.leaf: Tensor | None = None
        self._rules = RuleHandler(plan, self.progress, self.active_rule, architecture)
        self.relevance = RelevanceHandler(architecture, plan, self.progress, self.active_rule, self._rules.is_gate)
        on_linear = self.relevance.over(self._rules.on_opened_linear, self.relevance.on_linear)

        def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = on_linear(F.linear, (tokens, weight, bias), {})
            return result

        self.attention = AttentionHandler(architecture, plan, self.progress, self.active_rule, linear)
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
            if layer in needs.residual | needs.linear_norms:
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

    def interception(self) -> Interception:
        """The context in which the model has to run."""
        handlers = {function: self.gradient_breaks.over(handler) for function, handler in self._handlers().items()}
        return Interception(self.architecture, self, handlers, self.gradient_breaks.over(self._otherwise))

    def start(self, pixels: Tensor) -> None:
        """The model is about to be given a picture; the graph may begin there."""
        if self.plan.graph_start == PIXELS:
            self.tokens[PIXELS] = self.leaf = pixels.requires_grad_()
        elif self.plan.biases:
            mark_below_graph(pixels)

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
                self.residual_mids[layer] = point.axes.tokens(value)
            elif kind == "middle":
                self.after_attention[layer] = point.axes.tokens(value)
            elif kind == "end":
                self.residual_posts[layer] = point.axes.tokens(value)
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
        elif layer == 0 and self._reads_text and self.plan.biases:
            mark_below_graph(stream)
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

        hear(ops.CONVOLUTION, relevance.over(self._on_convolution, relevance.on_embedding))
        hear(ops.CONVOLUTION_OF_ROW, relevance.noting(self._on_convolution_of_row))
        hear(ops.GRID_POOLING, self._on_pooling)
        in_blocks = lambda: self.progress.layer is not None  # noqa: E731
        hear(ops.ATTENTION, relevance.noting(attention.on_fused, unless=in_blocks))
        hear(ops.MULTI_HEAD_ATTENTION, attention.on_multi_head)
        hear(ops.SOFTMAX, relevance.noting(attention.on_softmax, unless=in_blocks))
        product = relevance.over(attention.on_matrix_product, relevance.on_matrix_product)
        hear(ops.MATRIX_PRODUCT, rules.before_product(product) if rules.rules_differ else product)
        hear(ops.SAME_VALUES, relevance.over(_as_it_is, relevance.on_same_values))
        if rules.rules_differ:
            hear(ops.RMS_NORM, rules.on_rms_norm)
            hear(ops.NORMALIZE, relevance.noting(rules.on_normalize))
            divided = (*ops.DIVISION, *ops.DIVISION_IN_PLACE, *ops.MASKED_FILL)
            hear(divided, rules.over_division(relevance.on_divide))
        if rules.rules_differ or self.plan.biases:
            hear(ops.LAYER_NORM, rules.on_layer_norm)
            hear(ops.BATCH_NORM, relevance.noting(rules.on_batch_norm))
            hear(ops.GROUP_NORM, relevance.noting(rules.on_group_norm))
            hear(ops.ADDED_PRODUCT, relevance.noting(rules.on_added_product))
            hear(ops.JOINING, relevance.noting(rules.on_join))
            hear(ops.INVERSE_ROOT, rules.on_deviation)
            hear(ops.DEVIATION, relevance.noting(rules.on_deviation))
            hear(ops.DEVIATION_AND_MEAN, relevance.noting(rules.on_deviation_and_mean))
            hear(ops.DEVIATION_STEPS, relevance.noting(rules.on_deviation_step))
            hear(ops.ROOT, rules.on_length)
            hear(ops.SQUARE, relevance.noting(rules.on_square))
            hear(ops.POWER, rules.on_power)
            hear(ops.LENGTHS, relevance.noting(rules.on_length))
            hear(tuple(ops.ACTIVATIONS), rules.on_activation)
            hear(tuple(ops.GATES), relevance.noting(rules.on_gate, unless=lambda: self.progress.inside_block))
            hear(ops.TANH, relevance.noting(rules.on_gate, unless=lambda: self.progress.layer is not None))
            hear(ops.MULTIPLICATION, relevance.over(rules.on_multiply, relevance.on_multiply))
            hear(ops.ADDITION, relevance.over(rules.on_add, relevance.on_add))
            hear(ops.MULTIPLICATION_IN_PLACE, relevance.noting(rules.on_multiply_in_place))
            hear(ops.ADDITION_IN_PLACE, relevance.noting(rules.on_add))
            hear(ops.SUBTRACTION, relevance.noting(rules.on_subtract))
            hear(ops.SUBTRACTION_FROM, relevance.noting(rules.on_subtract_from))
            hear(ops.GATED, relevance.noting(rules.on_gated))
            hear(ops.LINEAR, relevance.over(rules.on_linear, relevance.on_linear))
            hear(ops.ADDMM, relevance.noting(rules.on_addmm))
        if relevance.follows:
            hear(ops.POOLING, relevance.on_pool)
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
