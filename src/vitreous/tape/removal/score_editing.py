"""Running a model with the attention that goes to some tokens damped (AtMan) or switched off.

Column j of the scores before the softmax belongs to key token j. A factor on it is a factor on key j and on
the bias of its column, so fused attention stays fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitreous.architecture import Architecture
from vitreous.architecture.attention import AttentionCall
from vitreous.errors import UnsupportedModelError
from vitreous.tape.attention import multihead
from vitreous.tape.attention.record import attention_arguments, bias_of_heads, heads_of, rows_of
from vitreous.tape.recording import torch_functions as ops
from vitreous.tape.recording.interception import HandlerTable, Interception, TorchCall, result_at, with_result
from vitreous.tape.removal.dropping import with_prefix


class ScoreEditing:
    """Edits the attention scores of all blocks and of a pooling attention after them.

    Args:
        architecture: where the blocks are.
        factor: what the scores of a token's column are multiplied with, (batch, tokens); ``None`` leaves them.
        kept: patches that may be attended to, (batch, k), ascending; the columns of the others are hidden, and the
            others are dropped after the last block. ``None`` keeps all.
        patches: how many patches a whole picture has.
    """

    def __init__(self, architecture: Architecture, *, factor: Tensor | None, kept: Tensor | None, patches: int) -> None:
        self._architecture, self._factor, self._kept, self._patches = architecture, factor, kept, patches
        blocks = architecture.blocks
        self._calls: dict[int, tuple[int, AttentionCall]] = {}  # by the step at which scores are edited
        for layer, calls in [
            *((layer, block.attention) for layer, block in enumerate(blocks)),
            (len(blocks), architecture.pooling),
        ]:
            for call in (call for call in calls if call.over_tokens):
                step = call.entering_step if call.spelling == "written" else call.output_step
                self._calls[step] = layer, call
        self._start, self._end = blocks[0].input, blocks[-1].output
        self.steps = frozenset({self._start.step, self._end.step, *self._calls})
        self.own_steps: frozenset[int] = frozenset()
        self._step = -1
        self._batch = 1
        self._count = 0
        self._hidden: Tensor | None = None  # (batch, tokens), 0 or -inf
        self._edited: set[int] = set()

    def interception(self) -> Interception:
        """The context in which the model has to run."""
        table = HandlerTable()
        table.add(ops.ATTENTION, self._on_fused)
        table.add(ops.MULTI_HEAD_ATTENTION, self._on_multi_head)
        return Interception(self._architecture, self, table)

    def check(self) -> None:
        """Refuse a model in which some block's attention was not seen."""
        unseen = set(range(self._architecture.depth)) - self._edited
        if unseen:
            raise UnsupportedModelError(
                f"{self._architecture.name}: no attention was seen in block {min(unseen)}, so none can be held back "
                "from single patches and no patch can be dropped; paint them instead (by=paint)"
            )

    def before(self, number: int) -> None:
        """Note where the forward pass is."""
        self._step = number

    def after(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Edit scores; after the last block, drop what was hidden in all of them."""
        del args, kwargs
        if number in self._calls and self._calls[number][1].spelling == "written":
            output = self._edit(self._calls[number], output)
        if number == self._start.step:
            axes, stream = self._start.axes, result_at(output, self._start.output)
            entered = axes.stream(self._enter_stream(axes.tokens(stream)), stream.shape)
            output = with_result(output, self._start.output, entered)
        if number == self._end.step and self._kept is not None:
            left = self._leave_stream(result_at(output, self._end.output))
            output = with_result(output, self._end.output, left)
        return output

    def _enter_stream(self, stream: Tensor) -> Tensor:
        """The stream before the first block, (batch, tokens, channels)."""
        self._batch, self._count = stream.shape[:2]
        if self._kept is not None:
            tokens = with_prefix(self._kept, self._count - self._patches)
            hidden = stream.new_full((len(tokens), self._count), float("-inf"))
            self._hidden = hidden.scatter_(1, tokens, 0.0)
        return stream

    def _leave_stream(self, output: Tensor) -> Tensor:
        assert self._kept is not None
        axes = self._end.axes
        if axes.dims != 3 or axes.order is not None:
            raise UnsupportedModelError(
                f"the stream of {self._architecture.name} is a grid, or other tokens stand behind its patches, so that "
                "none can be left out; paint them instead (by=paint)"
            )
        tokens = with_prefix(self._kept, self._count - self._patches)
        taken = torch.take_along_dim(axes.tokens(output), tokens[..., None], dim=1)
        sizes = list(output.shape)
        sizes[axes.token_axes[0]] = taken.shape[1]
        self._hidden = None
        return axes.stream(taken, torch.Size(sizes))

    def _on_fused(self, call: TorchCall) -> Any:
        found = self._calls.get(self._step)
        if found is None:
            return call.proceed()
        layer, spec = found
        query, key, value, bias, scale = attention_arguments(*call.args, **call.kwargs)
        batch = self._batch
        if query.dim() != 3 or len(query) % batch:
            return self._attend(layer, query, key, value, bias, scale)
        first = spec.heads_first
        query, key, value = (heads_of(part, batch, heads_first=first) for part in (query, key, value))
        bias = bias_of_heads(bias, batch, heads_first=first)
        return rows_of(self._attend(layer, query, key, value, bias, scale), heads_first=first)

    def _on_multi_head(self, call: TorchCall) -> Any:
        found = self._calls.get(self._step)
        if found is None or not multihead.can_open(call.args, call.kwargs):
            return call.proceed()
        layer, _ = found

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
            return self._attend(layer, query, key, value, bias, query.shape[-1] ** -0.5)

        return multihead.open_up(attend, nn.functional.linear, call.args, call.kwargs)

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        factor, hidden = self._columns(layer, key.shape[2], key.dtype)
        if factor is not None:
            key = key * factor.mT
            bias = None if bias is None else bias * factor
        if hidden is not None:
            bias = hidden if bias is None else bias + hidden
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

    def _edit(self, found: tuple[int, AttentionCall], scores: Tensor) -> Tensor:
        """Scores that a model has written out itself."""
        layer, call = found
        arranged = call.arrange_scores(scores, self._batch)
        if arranged is None or arranged.shape[0] != self._batch:
            return scores
        factor, hidden = self._columns(layer, arranged.shape[-1], scores.dtype)
        arranged = arranged if factor is None else arranged * factor
        arranged = arranged if hidden is None else arranged + hidden
        return call.restore_scores(arranged, self._batch, scores.shape)

    def _columns(self, layer: int, keys: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Factors and biases of the looked-at tokens, (batch, 1, 1, keys); a pooling may leave out the prefix."""
        if keys not in (self._count, self._patches):
            return None, None
        self._edited.add(layer)
        factor = None if self._factor is None else self._of_keys(self._factor, keys).to(dtype)
        hidden = None if self._hidden is None else self._of_keys(self._hidden, keys).to(dtype)
        return factor, hidden

    def _of_keys(self, values: Tensor, keys: int) -> Tensor:
        """Values of tokens (batch, tokens) as the keys lie, (batch, 1, 1, keys)."""
        order = self._start.axes.order
        if order is not None and keys == len(order):
            values = values[:, torch.tensor(order, device=values.device).argsort()]
        return values[:, None, None, -keys:]
