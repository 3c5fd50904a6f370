"""Running a model with the attention that goes to some tokens damped (AtMan) or switched off.

Column j of the scores before the softmax says how much token j is looked at. A factor on it is a factor on key j and on
the bias of its column, so fused attention stays fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import UnsupportedModelError
from vitreous.tape import interception as heard
from vitreous.tape import multihead
from vitreous.tape.attention import attention_arguments, bias_of_heads, heads_of
from vitreous.tape.dropping import with_prefix
from vitreous.tape.interception import Handler, Interception


class ScoreEditing:
    """Listens to one forward pass and edits the attention scores of all blocks and of a pooling attention behind them.

    Args:
        anatomy: where the blocks are.
        factor: what the scores of a token's column are multiplied with, (batch, tokens); ``None`` leaves them.
        kept: patches that may be looked at, (batch, k), ascending; the columns of the others are hidden, and behind the
            last block the others are dropped. ``None`` keeps all.
        patches: how many patches a whole picture has.
    """

    def __init__(self, anatomy: Anatomy, *, factor: Tensor | None, kept: Tensor | None, patches: int) -> None:
        self._anatomy, self._factor, self._kept, self._patches = anatomy, factor, kept, patches
        self._layers = {block.module: layer for layer, block in enumerate(anatomy.blocks)}
        self._layer: int | None = None
        self._batch = 1
        self._count = 0
        self._hidden: Tensor | None = None  # (batch, tokens), 0 or -inf
        self._edited: set[int] = set()

    def listening(self) -> Interception:
        """The context in which the model has to run."""
        handlers: dict[Callable[..., Any], Handler] = {
            **dict.fromkeys(heard.ATTENTION, self._on_fused),
            **dict.fromkeys(heard.MULTI_HEAD_ATTENTION, self._on_multi_head),
            **dict.fromkeys(heard.SOFTMAX, self._on_softmax),
        }
        return Interception(self, handlers, frozenset(self._layers))

    def check(self) -> None:
        """Refuse a model in which some block's attention was not seen."""
        unseen = set(range(self._anatomy.depth)) - self._edited
        if unseen:
            raise UnsupportedModelError(
                f"{self._anatomy.name}: no attention was seen in block {min(unseen)}, so none can be held back from "
                "single patches and no patch can be dropped; paint them instead (by=paint)"
            )

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Note where the forward pass is."""
        self._layer = self._layers[module]
        stream: Tensor = arguments[0]
        self._batch, self._count = stream.shape[:2] if self._anatomy.batch_first else (stream.shape[1], len(stream))
        if self._kept is not None and self._hidden is None:
            tokens = with_prefix(self._kept, self._count - self._patches)
            hidden = stream.new_full((len(tokens), self._count), float("-inf"))
            self._hidden = hidden.scatter_(1, tokens, 0.0)
        return None

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Drop behind the last block what was hidden in all of them."""
        if self._layers[module] + 1 < self._anatomy.depth:
            self._layer = None
            return None
        self._layer = self._anatomy.depth
        if self._kept is None:
            return None
        stream = output[0] if isinstance(output, tuple) else output
        tokens = with_prefix(self._kept, self._count - self._patches)
        if self._anatomy.batch_first:
            stream = torch.take_along_dim(stream, tokens[..., None], dim=1)
        else:
            stream = torch.take_along_dim(stream, tokens.T[..., None], dim=0)
        self._hidden = None
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    def _on_fused(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layer is None:
            return func(*args, **kwargs)
        query, key, value, bias, scale = attention_arguments(*args, **kwargs)
        batch = self._batch
        if query.dim() != 3 or len(query) % batch:
            return self._attend(query, key, value, bias, scale)
        query, key, value = (heads_of(part, batch) for part in (query, key, value))
        return self._attend(query, key, value, bias_of_heads(bias, batch), scale).flatten(0, 1)

    def _on_multi_head(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layer is None or not multihead.can_open(args, kwargs):
            return func(*args, **kwargs)

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
            return self._attend(query, key, value, bias, query.shape[-1] ** -0.5)

        return multihead.open_up(attend, nn.functional.linear, args, kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        factor, hidden = self._columns(key.shape[2], key.dtype)
        if factor is not None:
            key = key * factor.mT
            bias = None if bias is None else bias * factor
        if hidden is not None:
            bias = hidden if bias is None else bias + hidden
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

    def _on_softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0]
        if self._layer is None or not isinstance(scores, Tensor) or scores.dim() != 4:
            return func(*args, **kwargs)
        factor, hidden = self._columns(scores.shape[-1], scores.dtype)
        scores = scores if factor is None else scores * factor
        scores = scores if hidden is None else scores + hidden
        return func(scores, *args[1:], **kwargs)

    def _columns(self, keys: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Factors and biases of the looked-at tokens, (batch, 1, 1, keys); a pooling may leave out the prefix."""
        assert self._layer is not None
        if keys not in (self._count, self._patches):
            return None, None
        self._edited.add(self._layer)
        factor = None if self._factor is None else self._factor[:, None, None, -keys:].to(dtype)
        hidden = None if self._hidden is None else self._hidden[:, None, None, -keys:].to(dtype)
        return factor, hidden
