"""The recorder: what is kept of one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.anatomy.description import NormPlace
from vitreous.errors import UnsupportedModelError
from vitreous.tape import interception as heard
from vitreous.tape.attention_listener import AttentionListener
from vitreous.tape.cuts import Cuts
from vitreous.tape.embedding import Embedding, embedding_of
from vitreous.tape.functions import InForce
from vitreous.tape.interception import Handler, Interception
from vitreous.tape.plan import PIXELS, Plan
from vitreous.tape.progress import Progress
from vitreous.tape.relevance_listener import RelevanceListener
from vitreous.tape.residual_sums import ResidualSums
from vitreous.tape.rule_listener import RuleListener
from vitreous.tape.rulebook import RULES


class Recorder:
    """Listens to one forward pass and keeps what ``plan`` asks for.

    Attributes:
        progress: how far the pass has come.
        in_force: the rule that backward passes follow.
        tokens: block inputs x_l as they stand in the graph; index L holds the last block's output.
        norms: the outputs of the blocks' first norms.
        attended: what the attention part's contribution was added up to, where norms are read as linear maps.
        middles: the stream between the two parts of a block.
        ends: what the feed-forward part's contribution was added up to.
        attention: the attention calls.
        relevance: what rules that carry relevance could follow.
        cuts: the calls at which gradients end.
        sums: what is added to the stream in blocks whose W_O is read.
        misplaced_norms: pre-norm blocks, by their names, whose first norm got something else than the block's input.
        embeddings: the convolutions and poolings before the first block, among them the patch embedding.
        embedded: in a run that puts other tokens in the place of a block's, those that the model itself made.
        leaf: where the graph begins, if that is in front of a block or behind the last.
    """

    def __init__(self, anatomy: Anatomy, plan: Plan, batch: int, *, reads_text: bool = False) -> None:
        self.anatomy, self.plan, self._reads_text = anatomy, plan, reads_text
        self.progress = Progress(anatomy.depth, batch)
        self.in_force = InForce(RULES["plain"])
        self.cuts = Cuts(self.progress)
        self.tokens: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.attended: dict[int, Tensor] = {}
        self.middles: dict[int, Tensor] = {}
        self.ends: dict[int, Tensor] = {}
        self.misplaced_norms: set[int] = set()
        self.embeddings: list[Embedding] = []
        self.embedded: Tensor | None = None
        self.leaf: Tensor | None = None
        self._seen_outside: set[torch.Size] = set()
        self._stream_shape: torch.Size | None = None
        self._block_input: Tensor | None = None
        self._input_version = 0
        self._block_output: Tensor | None = None
        self._rules = RuleListener(plan, self.progress, self.in_force, batch_first=anatomy.batch_first)
        self.relevance = RelevanceListener(anatomy, plan, self.progress, self.in_force, self._rules.is_gate)
        on_linear = self.relevance.over(self._rules.on_opened_linear, self.relevance.on_linear)

        def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = on_linear(F.linear, (tokens, weight, bias), {})
            return result

        self.attention = AttentionListener(anatomy, plan, self.progress, self.in_force, linear)
        self.sums = ResidualSums(plan.needs.projections, batch_first=anatomy.batch_first, reads_text=reads_text)
        self._places = self._where_things_are()

    def listening(self) -> Interception:
        """The context in which the model has to run."""
        handlers = {function: self.cuts.over(handler) for function, handler in self._handlers().items()}
        return Interception(self, handlers, frozenset(self._places), self.cuts.over(self._otherwise))

    def _otherwise(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that nobody waits for."""
        return self.relevance.on_unknown(func, args, kwargs) if self.relevance.follows else func(*args, **kwargs)

    def _where_things_are(self) -> dict[nn.Module, tuple[str, int]]:
        places = dict.fromkeys(self.anatomy.alike_outside, ("outside", -1))
        for layer, block in enumerate(self.anatomy.blocks):
            places[block.module] = ("block", layer)
            if block.attention is not None:
                places[block.attention] = ("attention", layer)
            if layer in self.plan.needs.projections and block.projection:
                places[block.projection] = ("projection", layer)
            if layer in self.plan.needs.halves | self.plan.norms and block.first_norm:
                places[block.first_norm] = ("first_norm", layer)
            if layer in self.plan.needs.halves and block.second_norm:
                places[block.second_norm] = ("second_norm", layer)
        return places

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
        hear(heard.SAME_VALUES, relevance.over(attention.on_same_values, relevance.on_same_values))
        if self._reads_text:
            hear(heard.RESHAPE, attention.on_reshape)
        if rules.rules_differ:
            hear(heard.RMS_NORM, rules.on_rms_norm)
            hear(heard.NORMALIZE, relevance.noting(rules.on_normalize))
            divided = (*heard.DIVISION, *heard.DIVISION_IN_PLACE, *heard.MASKED_FILL)
            hear(divided, self._or_score_step(rules.over_division(relevance.on_divide)))
        if rules.rules_differ or self.plan.biases:
            hear(heard.LAYER_NORM, rules.on_layer_norm)
            hear(heard.BATCH_NORM, relevance.noting(rules.on_batch_norm))
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
            hear(heard.MULTIPLICATION, self._or_score_step(relevance.over(rules.on_multiply, relevance.on_multiply)))
            hear(heard.ADDITION, self._or_score_step(relevance.over(rules.on_add, relevance.on_add)))
            hear(heard.MULTIPLICATION_IN_PLACE, self._or_score_step(relevance.noting(rules.on_multiply_in_place)))
            hear(heard.ADDITION_IN_PLACE, self._or_score_step(relevance.noting(rules.on_add)))
            hear(heard.SUBTRACTION, relevance.noting(rules.on_subtract))
            hear(heard.SUBTRACTION_FROM, relevance.noting(rules.on_subtract_from))
            hear(heard.GATED, relevance.noting(rules.on_gated))
            hear(heard.LINEAR, relevance.over(rules.on_linear, relevance.on_linear))
            hear(heard.ADDMM, relevance.noting(rules.on_addmm))
        if relevance.follows:
            hear(heard.POOLING, relevance.on_pool)
        # What hand-written scores are multiplied with has to be known under every rule.
        for function in heard.SCORE_STEPS:
            handlers.setdefault(function, self._or_score_step(self._otherwise))
        if self.plan.needs.projections:
            for function in (*heard.ADDITION, *heard.ADDITION_IN_PLACE):
                handlers[function] = self.sums.over(handlers[function])
        return handlers

    def _or_score_step(self, otherwise: Handler) -> Handler:
        """Arithmetic on hand-written attention scores belongs to the attention, other arithmetic to the rules."""

        def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            chosen = self.attention.on_score_step if self.attention.follows(args) else otherwise
            return chosen(func, args, kwargs)

        return handler

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Note where the forward pass is; start the graph at the first block that needs one."""
        role, layer = self._places[module]
        if role == "block":
            return self._enter_block(layer, arguments)
        if role == "outside":
            self._enter_outside(arguments)
        elif role == "attention":
            self.progress.attending = layer
            self.attention.forget()
        elif role == "projection":
            self.sums.project(running=True)
        elif role == "first_norm" and layer in self.plan.needs.linear_norms and self._place(layer) == "post":
            self.attended[layer] = arguments[0]
        elif role == "first_norm" and self._place(layer) == "pre":
            # By address: some blocks reshape the stream for their norm.
            if self._block_input is None or arguments[0].data_ptr() != self._block_input.data_ptr():
                self.misplaced_norms.add(layer)
        elif role == "second_norm" and layer in self.plan.needs.halves:
            # Pre-norm: its input is the stream after attention. Post-norm: the stream with the feed-forward part added.
            kept = self.middles if self._place(layer) == "pre" else self.ends
            kept[layer] = arguments[0]
        return None

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Keep what a part gave."""
        role, layer = self._places[module]
        if role == "block":
            return self._leave_block(layer, output)
        if role == "attention":
            self.progress.attending = None
        elif role == "projection":
            self.sums.project(running=False)
        elif role == "first_norm":
            self.norms[layer] = output
            if self._place(layer) == "post":
                self.middles[layer] = output
        return None

    def _place(self, layer: int) -> NormPlace:
        return self.anatomy.blocks[layer].norm_place

    def _enter_outside(self, arguments: tuple[Any, ...]) -> None:
        """A module like the blocks runs outside of their stack; on other tokens (a decoder, a fusion) it may."""
        if not self.progress.inside_block and arguments and isinstance(arguments[0], Tensor):
            self._seen_outside.add(arguments[0].shape)
            self._check_outside()

    def _check_outside(self) -> None:
        """None may run on the stream, which before the first block is not known yet."""
        if self._stream_shape in self._seen_outside:
            kind = type(self.anatomy.blocks[0].module).__name__
            raise UnsupportedModelError(
                f"{self.anatomy.name} runs another {kind} on its tokens than the {self.anatomy.depth} of its stack of "
                "blocks, so that maps would leave out what it attends to; put all of them into one nn.ModuleList or "
                "nn.Sequential"
            )

    def _enter_block(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        name = self.anatomy.name
        if layer != self.progress.next_block:
            raise UnsupportedModelError(f"{name} runs its blocks out of order or more than once; this is not supported")
        if not arguments or not isinstance(arguments[0], Tensor):
            raise UnsupportedModelError(f"{name} does not hand the tokens to its blocks as their first argument")
        tokens = arguments[0]
        if layer == 0 and self.plan.intervention.stream is not None:
            tokens = self.embedded = _in_graph_from_here(tokens)
        tokens = self._replaced(layer, tokens)
        if tokens.dim() != 3:
            raise UnsupportedModelError(
                f"{name} hands its blocks a tensor of shape {tuple(tokens.shape)}, not (batch, tokens, channels): "
                "there is no token stream to read, so no method here serves it"
            )
        self.progress.inside_block = True
        self._count_tokens(layer, tokens)
        self._stream_shape = arguments[0].shape
        self._check_outside()
        if self._reads_text and layer > 0 and arguments[0] is not self._block_output:
            raise UnsupportedModelError(
                f"{name} does something with its tokens between blocks {layer - 1} and {layer}, a convolution over "
                "neighbours perhaps, which belongs to no block: no method here follows it"
            )
        self._rules.biases.enter_block(name, layer, as_given=layer == 0 or arguments[0] is self._block_output)
        # Numbers of tokens have no gradient, so what a text's model embeds them as is its input.
        input_is_wanted = self._reads_text and layer == 0 and self.plan.graph_start == PIXELS
        # Behind the block before, the graph may have begun already, and the model may have gone on from there.
        begun = layer > 0 and tokens.requires_grad
        if (layer == self.plan.graph_start and not begun) or input_is_wanted:
            tokens = self.leaf = _in_graph_from_here(tokens)
        if input_is_wanted:
            self.tokens[PIXELS] = tokens
        if layer in self.plan.tokens:
            self.tokens[layer] = tokens
        self._block_input, self._input_version = tokens, _version_of(tokens)
        self.sums.enter_block(layer, tokens)
        return (tokens, *arguments[1:])

    def _count_tokens(self, layer: int, tokens: Tensor) -> None:
        """A map has a place for every token, so that none may be dropped, joined or added between blocks."""
        count = tokens.shape[1] if self.anatomy.batch_first else tokens.shape[0]
        if layer > 0 and count != self.progress.tokens:
            raise UnsupportedModelError(
                f"{self.anatomy.name} has {self.progress.tokens} tokens in front of block {layer - 1} and {count} "
                "behind it: tokens that are dropped or joined on the way have no place in a map"
            )
        self.progress.tokens = count

    def _replaced(self, layer: int, tokens: Tensor) -> Tensor:
        stream = self.plan.intervention.replacement(layer)
        if stream is None:
            return tokens
        self.progress.batch = len(stream)
        return stream.detach() if self.anatomy.batch_first else stream.detach().transpose(0, 1)

    def _leave_block(self, layer: int, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) else output
        if not isinstance(tokens, Tensor):
            raise UnsupportedModelError(
                f"block {layer} of {self.anatomy.name} returns {type(tokens).__name__}, not its tokens alone or as the "
                "first of a tuple; this is not supported"
            )
        self._check_alone(tokens, output)
        read = layer in self.plan.tokens or layer in self.plan.needs.halves
        if read and self._block_input is not None and _version_of(self._block_input) != self._input_version:
            raise self.changes_in_place()
        self.progress.inside_block, self.progress.next_block, self._block_input = False, layer + 1, None
        self.attention.leave_block(layer)
        self._rules.forget()
        self.sums.leave_block()
        last = layer + 1 == self.anatomy.depth
        tokens = self._replaced(layer + 1, tokens) if last else tokens
        # Here and not where the next block begins: the head, too, may read what this block gives.
        if layer + 1 == self.plan.graph_start or (last and not tokens.requires_grad):
            tokens = self.leaf = _in_graph_from_here(tokens)
        self._block_output = tokens
        if last:
            self._count_tokens(layer + 1, tokens)
            self.tokens[layer + 1] = tokens
            self.relevance.leave_last_block()
        if layer in self.plan.needs.halves and self._place(layer) == "pre":
            self.ends[layer] = tokens
        return (tokens, *output[1:]) if isinstance(output, tuple) else tokens

    def _check_alone(self, tokens: Tensor, output: Any) -> None:
        """Several streams of tokens (CoaT's scales) meet in a block, and a map of one would leave out the others."""
        if not isinstance(output, tuple) or not self.anatomy.batch_first:
            return
        batch, count = tokens.shape[:2]
        beside = [one.shape for one in output[1:] if isinstance(one, Tensor) and one.dim() == 3]
        others = [str(shape[1]) for shape in beside if shape[0] == batch and shape[1] != count]
        if others:
            raise UnsupportedModelError(
                f"the blocks of {self.anatomy.name} carry several streams at once, of {count} and {', '.join(others)} "
                "tokens, so that there is no single stream of tokens to read: no method here serves it"
            )

    def changes_in_place(self) -> UnsupportedModelError:
        """The refusal of a model that overwrites tokens which a method reads, or which gradients need."""
        return UnsupportedModelError(
            f"{self.anatomy.name} changes tokens in place (x += ...), so that those in front of a block are lost; "
            "methods that read them or a gradient need x = x + ..."
        )

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


def _version_of(tokens: Tensor) -> int:
    """How often a tensor was changed in place; those of inference mode do not count it."""
    try:
        return tokens._version  # noqa: SLF001  # there is no public name for it
    except RuntimeError:
        return 0


def _in_graph_from_here(tokens: Tensor) -> Tensor:
    """The model's own tensor with a gradient, wherever the model reads it; nothing that made it is in the graph."""
    if tokens.requires_grad or isinstance(tokens, nn.Parameter):  # made with a gradient of its own, or not ours to mark
        return tokens.detach().requires_grad_()
    return tokens.requires_grad_()
