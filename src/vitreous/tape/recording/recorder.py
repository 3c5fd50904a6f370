"""The recorder: what is kept of one forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.architecture import Architecture, Point
from vitreous.errors import UnsupportedModelError
from vitreous.tape.attention.handler import AttentionHandler
from vitreous.tape.patches.grid_probe import Embedding, embedding_of
from vitreous.tape.recording import interception as ops
from vitreous.tape.recording.gradient_breaks import GradientBreaks, mark_below_graph
from vitreous.tape.recording.interception import (
    Handler,
    HandlerTable,
    Interception,
    Progress,
    TorchCall,
    result_at,
    with_result,
)
from vitreous.tape.recording.linear_maps import LinearMaps
from vitreous.tape.recording.plan import PIXELS, Plan
from vitreous.tape.removal import TokenDropping
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
        leaf: where the graph begins, if that is before a block or after the last.
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
        # No bound method of the recorder itself: a cycle of references would keep the graph alive.
        on_linear: tuple[Handler, ...] = (self._rules.on_opened_linear,)
        on_linear = (*on_linear, self.relevance.on_linear) if self.relevance.follows else on_linear
        self.attention = AttentionHandler(architecture, plan, self.progress, self.active_rule, on_linear)
        self.linear_maps = LinearMaps(architecture, plan.needs)
        self._points = self._wanted_points()
        kept = plan.intervention.kept
        self._dropping = None if kept is None else TokenDropping(architecture, kept, plan.intervention.patches)
        self.own_steps = self.attention.scores.own_steps
        self.steps = (
            frozenset(self._points) | self.attention.scores.steps | self.linear_maps.steps | self.relevance.steps
        )

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
        # The stream last: what stands in its place is what all later steps read.
        for kept in points.values():
            kept.sort(key=lambda each: each[0] == "stream")
        return points

    def interception(self) -> Interception:
        """The context in which the model has to run."""
        table = self._handler_table()
        if self._dropping is not None:  # outermost, so that all others see operands that fit
            for function, handler in self._dropping.handlers().items():
                table.add((function,), handler, *table.handlers_of(function))
        return Interception(self.architecture, self, table)

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
        if self._dropping is not None and number in self._dropping.steps:
            output = self._dropping.after(number, args, kwargs, output)
        self.attention.scores.after(number, args, kwargs, output)
        self.linear_maps.after(number, args, kwargs)
        output = self.relevance.on_norm_output(number, output)
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
        self.relevance.after_step(number, output)
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
        stream = self._with_inserted(layer, point, stream)
        count = point.axes.tokens(stream).shape[1]
        if layer > 0 and count != self.progress.tokens:
            raise UnsupportedModelError(
                f"{name} has {self.progress.tokens} tokens before block {layer - 1} and {count} after it: tokens that "
                "are dropped or merged have no position in a map"
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

    def _with_inserted(self, layer: int, point: Point, stream: Tensor) -> Tensor:
        """The stream with the tokens that an intervention puts into it."""
        if layer not in self.plan.intervention.inserted:
            return stream
        places, values = self.plan.intervention.inserted[layer]
        tokens = point.axes.tokens(stream).clone()
        tokens[torch.arange(len(places), device=places.device), places] = values.to(tokens)
        return point.axes.stream(tokens, stream.shape)

    def stream_of(self, layer: int, tensor: Tensor) -> Tensor:
        """A tensor that lies in memory as x_l does, as (batch, tokens, channels)."""
        blocks = self.architecture.blocks
        point = blocks[layer].input if layer < len(blocks) else blocks[-1].output
        return point.axes.tokens(tensor)

    def norm_of(self, layer: int, tensor: Tensor) -> Tensor:
        """A tensor that lies in memory as the output of a block's first norm does, as (batch, tokens, channels)."""
        return self.architecture.blocks[layer].normalised.axes.tokens(tensor)

    def _handler_table(self) -> HandlerTable:
        """By torch function, the handlers that act on its calls, from the outermost to the one next to the function.

        Those of ``relevance`` take part only if a rule carries relevance.
        """
        attention, rules, relevance = self.attention, self._rules, self.relevance
        first = self.gradient_breaks.check
        table = HandlerTable((first, relevance.on_unknown) if relevance.follows else (first,))

        def act(functions: Iterable[Callable[..., Any]], *handlers: Handler) -> None:
            acting = [
                each for each in handlers if relevance.follows or getattr(each, "__self__", None) is not relevance
            ]
            table.add(functions, first, *acting)

        act(ops.CONVOLUTION, self._record_convolution, rules.on_convolution, relevance.on_embedding)
        act(ops.CONVOLUTION_OF_ROW, rules.on_convolution, relevance.on_row_convolution)
        act(ops.GRID_POOLING, self._record_pooling, relevance.on_unknown)
        act(ops.ATTENTION, relevance.on_unknown_before_blocks, attention.on_fused)
        act(ops.MULTI_HEAD_ATTENTION, attention.on_multi_head)
        act(ops.SOFTMAX, relevance.on_unknown_before_blocks, attention.on_softmax)
        act(ops.MATRIX_PRODUCT, attention.on_matrix_product, relevance.on_matrix_product)
        act(ops.SAME_VALUES, relevance.on_same_values)
        if rules.rules_differ:
            act(ops.MATRIX_PRODUCT, rules.on_matrix_product, attention.on_matrix_product, relevance.on_matrix_product)
            act(ops.RMS_NORM, rules.on_rms_norm)
            act(ops.NORMALIZE, relevance.on_normalize, rules.on_normalize)
            act((*ops.DIVISION, *ops.DIVISION_IN_PLACE, *ops.MASKED_FILL), rules.on_division, relevance.on_divide)
        if rules.rules_differ or self.plan.biases:
            act(ops.LAYER_NORM, rules.on_layer_norm)
            act(ops.BATCH_NORM, relevance.on_unknown, rules.on_batch_norm)
            act(ops.GROUP_NORM, relevance.on_unknown, rules.on_group_norm)
            act(ops.ADDED_PRODUCT, relevance.on_unknown, rules.on_added_product)
            act(ops.JOINING, relevance.on_unknown, rules.on_join)
            act(ops.INVERSE_ROOT, rules.on_deviation)
            act(ops.DEVIATION, relevance.on_unknown, rules.on_deviation)
            act(ops.DEVIATION_AND_MEAN, relevance.on_unknown, rules.on_deviation_and_mean)
            act(ops.DEVIATION_STEPS, relevance.on_unknown, rules.on_deviation_step)
            act(ops.ROOT, rules.on_length)
            act(ops.SQUARE, relevance.on_square, rules.on_square)
            act(ops.POWER, rules.on_power)
            act(ops.LENGTHS, relevance.on_unknown, rules.on_length)
            act(ops.ACTIVATIONS, rules.on_activation)
            act(ops.GATES, relevance.on_unknown_outside_blocks, rules.on_gate)
            act(ops.TANH, relevance.on_unknown_before_blocks, rules.on_gate)
            act(ops.MULTIPLICATION, rules.on_multiply, relevance.on_multiply)
            act(ops.ADDITION, rules.on_add, relevance.on_add)
            act(ops.MULTIPLICATION_IN_PLACE, relevance.on_unknown, rules.on_multiply_in_place)
            act(ops.ADDITION_IN_PLACE, rules.on_add, relevance.on_add_in_place)
            act(ops.SUBTRACTION, rules.on_subtract, relevance.on_subtract)
            act(ops.SUBTRACTION_FROM, rules.on_subtract_from, relevance.on_subtract)
            act(ops.GATED, relevance.on_unknown, rules.on_gated)
            act(ops.LINEAR, rules.on_linear, relevance.on_linear)
            act(ops.ADDMM, rules.on_addmm, relevance.on_addmm)
        if relevance.follows:
            act(ops.POOLING, relevance.on_pool)
            act(ops.NEGATION, relevance.on_negate)
            act(ops.INTERPOLATION, relevance.on_interpolate)
        return table

    def _record_convolution(self, call: TorchCall) -> Any:
        """In front of the blocks, a convolution may make the patches."""
        output = call.proceed()
        if not self.progress.reached_blocks:
            self.embeddings.append(embedding_of(output, *call.args, **call.kwargs))
        return output

    def _record_pooling(self, call: TorchCall) -> Any:
        """In front of the blocks, a pooling makes the grid of patches coarser."""
        output = call.proceed()
        if not self.progress.reached_blocks and isinstance(output, Tensor):
            self.embeddings.append(Embedding.without_patch(output, call.args[0]))
        return output


def _in_graph_from_here(tokens: Tensor) -> Tensor:
    """The model's own tensor with a gradient, wherever the model reads it; nothing that made it is in the graph."""
    if tokens.requires_grad or isinstance(tokens, nn.Parameter):  # made with a gradient of its own, or not ours to mark
        return tokens.detach().requires_grad_()
    return tokens.requires_grad_()
