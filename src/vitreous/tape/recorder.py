"""The recorder: what is kept of one forward pass, and where a rule takes hold of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import UnsupportedModelError
from vitreous.tape import interception as heard
from vitreous.tape import multihead
from vitreous.tape.attention import AttentionRecord, additive_bias
from vitreous.tape.functions import Attend, Elementwise, InForce, Normalise
from vitreous.tape.interception import Handler, Interception
from vitreous.tape.plan import Plan
from vitreous.tape.rules import RULES

# mypy: disable-error-code="no-untyped-call"

_EXACT = (torch.float32, torch.float64)


class Recorder:
    """Listens to one forward pass and keeps what ``plan`` asks for.

    Attributes:
        tokens: block inputs x_l as they stand in the graph; index L holds the last block's output.
        middles: the stream between the two parts of a block.
        ends: what the feed-forward part's contribution was added up to.
        attention: the attention calls of the blocks.
        outputs: O of each call, as it stands in the graph.
        misplaced_norms: pre-norm blocks, by their names, whose first norm got something else than the block's input.
        behind: the attention calls behind the last block, in order; one of them may be what pools the tokens.
        grid: (rows, columns) of the last convolution before the first block: the patch embedding.
    """

    def __init__(self, anatomy: Anatomy, plan: Plan, batch: int) -> None:
        self.anatomy, self.plan, self.batch = anatomy, plan, batch
        self.in_force = InForce(RULES["plain"])
        self.tokens: dict[int, Tensor] = {}
        self.middles: dict[int, Tensor] = {}
        self.ends: dict[int, Tensor] = {}
        self.attention: dict[int, AttentionRecord] = {}
        self.outputs: dict[int, Tensor] = {}
        self.behind: list[tuple[AttentionRecord, Tensor]] = []
        self.misplaced_norms: set[int] = set()
        self.grid: tuple[int, int] | None = None
        # With the plain rule alone autograd itself does the right thing and nothing is replaced.
        self._rules_differ = bool(plan.rules - {"plain"})
        self._places = self._where_things_are()
        self._next_block = 0
        self._inside_block = False
        self._stream = 0
        self._block_input: Tensor | None = None
        self._attending: int | None = None
        self._operands: tuple[Tensor, Tensor] | None = None
        self._weights: Tensor | None = None

    def listening(self) -> Interception:
        """The context in which the model has to run."""
        return Interception(self, self._handlers(), frozenset(self._places))

    @property
    def reached_blocks(self) -> bool:
        """Whether the forward pass got as far as the first block."""
        return self._inside_block or self._next_block > 0

    def _where_things_are(self) -> dict[nn.Module, tuple[str, int]]:
        places: dict[nn.Module, tuple[str, int]] = {}
        for layer, block in enumerate(self.anatomy.blocks):
            places[block.module] = ("block", layer)
            if block.attention is not None:
                places[block.attention] = ("attention", layer)
            if layer in self.plan.halves and block.first_norm is not None and block.second_norm is not None:
                places[block.first_norm] = ("first_norm", layer)
                places[block.second_norm] = ("second_norm", layer)
        return places

    def _handlers(self) -> dict[Callable[..., Any], Handler]:
        handlers: dict[Callable[..., Any], Handler] = {}

        def hear(functions: tuple[Callable[..., Any], ...], handler: Handler) -> None:
            handlers.update(dict.fromkeys(functions, handler))

        hear(heard.CONVOLUTION, self._on_convolution)
        hear(heard.ATTENTION, self._on_attention)
        hear(heard.MULTI_HEAD_ATTENTION, self._on_multi_head_attention)
        hear(heard.SOFTMAX, self._on_softmax)
        hear(heard.MATRIX_PRODUCT, self._on_matrix_product)
        hear(heard.SAME_VALUES, self._on_same_values)
        if self._rules_differ:
            hear(heard.LAYER_NORM, self._on_layer_norm)
            hear(heard.RMS_NORM, self._on_rms_norm)
            hear(heard.GATES, self._on_gate)
            hear(tuple(heard.ACTIVATIONS), self._on_activation)
        return handlers

    # Modules ---------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Note where the forward pass is; start the graph at the first block that needs one."""
        role, layer = self._places[module]
        if role == "block":
            return self._enter_block(layer, arguments)
        if role == "attention":
            self._attending, self._operands, self._weights = layer, None, None
        elif role == "first_norm" and self.anatomy.blocks[layer].norm_place == "pre":
            # By address: some blocks reshape the stream for their norm.
            if self._block_input is None or arguments[0].data_ptr() != self._block_input.data_ptr():
                self.misplaced_norms.add(layer)
        elif role == "second_norm":
            # Pre-norm: its input is the stream after attention. Post-norm: the stream with the feed-forward part added.
            kept = self.middles if self.anatomy.blocks[layer].norm_place == "pre" else self.ends
            kept[layer] = arguments[0]
        return None

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Keep what a part gave."""
        role, layer = self._places[module]
        if role == "block":
            return self._leave_block(layer, output)
        if role == "attention":
            self._attending = None
        elif role == "first_norm" and self.anatomy.blocks[layer].norm_place == "post":
            self.middles[layer] = output
        return None

    def _enter_block(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        name = self.anatomy.name
        if layer != self._next_block:
            raise UnsupportedModelError(f"{name} runs its blocks out of order or more than once; this is not supported")
        if not arguments or not isinstance(arguments[0], Tensor):
            raise UnsupportedModelError(f"{name} does not hand the tokens to its blocks as their first argument")
        tokens = arguments[0]
        if tokens.dim() != 3:
            raise UnsupportedModelError(
                f"{name} hands its blocks a tensor of shape {tuple(tokens.shape)}, not (batch, tokens, channels): "
                "there is no token stream to read, so no method here serves it"
            )
        self._inside_block = True
        self._stream = tokens.shape[1] if self.anatomy.batch_first else tokens.shape[0]
        if layer == self.plan.graph_start:
            tokens = tokens.detach().requires_grad_()
            arguments = (tokens, *arguments[1:])
        if layer in self.plan.tokens:
            self.tokens[layer] = tokens
        self._block_input = tokens
        return arguments

    def _leave_block(self, layer: int, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) else output
        self._inside_block, self._next_block, self._block_input = False, layer + 1, None
        self._operands = self._weights = None
        last = layer + 1 == self.anatomy.depth
        if last and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()
        if last:
            self.tokens[layer + 1] = tokens
        if layer in self.plan.halves and self.anatomy.blocks[layer].norm_place == "pre":
            self.ends[layer] = tokens
        return (tokens, *output[1:]) if isinstance(output, tuple) else tokens

    # Attention -------------------------------------------------------------------------------------------------------

    def _layer_of_call(self) -> int | None:
        """The block that is running, whose attention it must be; L behind the last block (pooling by attention).

        A block that has no attention module of its own may still attend, and a rule must take hold of that.
        """
        if self._attending is not None:
            return self._attending
        return self._next_block if self._inside_block or self._next_block == self.anatomy.depth else None

    def _on_attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self._layer_of_call()
        if layer is None:
            return func(*args, **kwargs)
        return self._attend(layer, *_attention_arguments(*args, **kwargs))

    def _on_multi_head_attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self._layer_of_call()
        if layer is None or not multihead.can_open(args, kwargs):
            return func(*args, **kwargs)
        return multihead.open_up(
            lambda query, key, value, bias: self._attend(layer, query, key, value, bias, query.shape[-1] ** -0.5),
            args,
            kwargs,
        )

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        self._check_attention(layer, query.shape[0], query.shape[2], key.shape[2])
        record = AttentionRecord(query.detach(), key.detach(), value.detach(), scale, bias)
        if self._worth_keeping(layer, record):
            record.matrix = record.rows(slice(None))

        def forward_call() -> Tensor:
            if record.matrix is not None:
                return record.matrix @ value
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

        in_graph = query.requires_grad or key.requires_grad or value.requires_grad
        if in_graph and (self._rules_differ or record.matrix is not None):
            output: Tensor = Attend.apply(query, key, value, forward_call, record, self.in_force)
        else:
            output = forward_call()
        self._keep_call(layer, record, output)
        return output

    def _worth_keeping(self, layer: int, record: AttentionRecord) -> bool:
        """Keep A where all of it is needed and it is not larger than half of what a block's backward pass keeps anyway.

        That is about 14 numbers per channel of a token. In half precision the fused kernel's own rounding is wanted.
        """
        if layer not in self.plan.matrices or record.value.dtype not in _EXACT:
            return False
        width = record.heads * record.value.shape[-1]
        return record.heads * record.key.shape[2] <= 7 * width

    def _keep_call(self, layer: int, record: AttentionRecord, output: Tensor) -> None:
        if layer == self.anatomy.depth:
            self.behind.append((record, output))
            return
        if layer in self.attention:
            raise UnsupportedModelError(f"{self.anatomy.name} attends more than once in block {layer}")
        self.outputs[layer] = output
        self.attention[layer] = record if layer in self.plan.attention else _EMPTY

    def _check_attention(self, layer: int, batch: int, queries: int, keys: int) -> None:
        """Between all tokens, or it is no attention between patches; which call behind the blocks pools shows later."""
        if layer < self.anatomy.depth and (batch, queries, keys) != (self.batch, self._stream, self._stream):
            raise UnsupportedModelError(
                f"{self.anatomy.name}: attention in block {layer} runs over {batch} x {queries} x {keys} tokens where "
                f"the batch holds {self.batch} pictures of {self._stream} tokens: it is windowed, pooled or between "
                "channels, so there is no attention between all patches and no method here serves it"
            )

    # Attention written out by hand: q kᵀ, softmax, A v ---------------------------------------------------------------

    def _on_matrix_product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        layer = self._layer_of_call()
        if layer is None or len(args) < 2 or not isinstance(args[1], Tensor):
            return output
        if self._weights is not None and args[0] is self._weights and self._operands is not None:
            self._keep_eager_call(layer, self._operands[1].transpose(-2, -1), args[1], output)
            self._weights = self._operands = None
        elif self._weights is None:
            self._operands = (args[0], args[1])
        return output

    def _keep_eager_call(self, layer: int, key: Tensor, value: Tensor, output: Tensor) -> None:
        assert self._weights is not None
        matrix = self._weights.detach()
        self._check_attention(layer, matrix.shape[0], *matrix.shape[-2:])
        record = AttentionRecord(None, key.detach(), value.detach(), self._scale(layer, key), matrix=matrix)
        self._keep_call(layer, record, output)

    def _scale(self, layer: int, key: Tensor) -> float:
        module = self.anatomy.blocks[layer].attention if layer < self.anatomy.depth else None
        for name in ("scale", "scaling"):
            scale = getattr(module, name, None)
            if isinstance(scale, float):
                return scale
        return float(key.shape[-1] ** -0.5)

    def _on_softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layer_of_call() is None or not isinstance(args[0], Tensor) or args[0].dim() != 4:
            return func(*args, **kwargs)
        self._weights = self._elementwise(func, args, kwargs, slope_at_zero=0.0, gate=True)
        return self._weights

    def _on_same_values(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if self._weights is not None and args and args[0] is self._weights:
            self._weights = output
        return output

    # Where a rule takes hold -----------------------------------------------------------------------------------------

    def _on_layer_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._normalise(func, args, kwargs, eps=_argument(args, kwargs, 4, "eps", 1e-5), centred=True)

    def _on_rms_norm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        eps = _argument(args, kwargs, 3, "eps", None)
        eps = torch.finfo(args[0].dtype).eps if eps is None else eps
        return self._normalise(func, args, kwargs, eps=eps, centred=False)

    def _normalise(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, eps: float, centred: bool
    ) -> Any:
        tokens = args[0]
        if not tokens.requires_grad:
            return func(*args, **kwargs)
        shape = tuple(_argument(args, kwargs, 1, "normalized_shape", None))
        weight = _argument(args, kwargs, 2, "weight", None)

        def function(value: Tensor) -> Tensor:
            result: Tensor = func(value, *args[1:], **kwargs)
            return result

        return Normalise.apply(tokens, weight, shape, eps, centred, function, self.in_force)

    def _on_activation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._elementwise(func, args, kwargs, slope_at_zero=heard.ACTIVATIONS[func], gate=False)

    def _on_gate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a block these weigh something (hand-written GELU, gated attention, RMSNorm); a head may end in one."""
        if not self._inside_block:
            return func(*args, **kwargs)
        return self._elementwise(func, args, kwargs, slope_at_zero=0.0, gate=True)

    def _elementwise(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        slope_at_zero: float,
        gate: bool,
    ) -> Any:
        tokens = args[0]
        if not self._rules_differ or not tokens.requires_grad:
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}

        def function(value: Tensor) -> Tensor:
            result: Tensor = func(value, *args[1:], **kwargs)
            return result

        return Elementwise.apply(tokens, function, slope_at_zero, gate, self.in_force)

    def _on_convolution(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if not self.reached_blocks:
            self.grid = (output.shape[-2], output.shape[-1])
        return output


_EMPTY = AttentionRecord(None, torch.empty(0), torch.empty(0), 1.0)


def _attention_arguments(
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
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    bias = additive_bias(attn_mask, query, key.shape[-2], causal=is_causal)
    return query, key, value, bias, query.shape[-1] ** -0.5 if scale is None else scale


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
