"""The view of a method: one tape and the gradients of one target, without access to the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitreous._utils.tensors import at_least_float32
from vitreous.errors import UnsupportedModelError
from vitreous.tape import AttentionRecord, Gradients, Layout, Pass, Tape
from vitreous.tape.attention import Rows
from vitreous.tape.rules.lrp import attention_relevance
from vitreous.tape.runner import ModelRunner

_FORMER_NAMES = {
    "subject": "runner",
    "heads_to_stream": "output_projection",
    "attended": "residual_mid",
    "middle": "after_attention",
    "end": "residual_post",
}


@dataclass(frozen=True)
class Row:
    """A row vector over tokens, given by its entries at ``rows``: one row of a product of matrices.

    A rollout needs only one row, so matrices are multiplied from the left by a row vector and never by each other.
    """

    weights: Tensor  # (batch, rows)
    rows: Rows

    def dense(self, tokens: int) -> Tensor:
        """All entries, (batch, tokens)."""
        if isinstance(self.rows, slice):
            return self.weights
        return self.weights.new_zeros(len(self.weights), tokens).index_copy_(1, self.rows, self.weights)


@dataclass(frozen=True, repr=False)
class View:
    """One tape and the gradients of one target per image, by backward pass.

    What can be read for a block ``l`` (0 to ``depth`` - 1), and how a method declares it (``activations=("tokens",)``,
    ``gradients=("attention",)``):

    =========================================  =========================================  ==============================
    read                                       what                                       declared as
    =========================================  =========================================  ==============================
    ``tokens(l)``                              x_l, the block's input                     activation ``tokens``
    ``norm(l)``                                the first norm's output                    activation ``norms``
    ``residual_mid(l)``                        x_l plus the attention output              activation ``residual``
    ``after_attention(l)``                     that, normalised in a post-norm block       activation ``residual``
    ``residual_post(l)``                       that plus the feed-forward output          activation ``residual``
    ``attention(l)``, ``attention_matrix(l)``  A, all rows                                activation ``attention``
    ``value(l)``, a few rows of A              v of every head                            activation ``attention_rows``
    ``output_projection(l)``                   W_O of every head                          activation ``projections`` too
    ``token_gradient(backward, l)``            dy/dx_l                                    gradient ``tokens``
    ``norm_gradient(backward, l)``             the gradient at the first norm             gradient ``norms``
    ``attention_gradient(backward, l)``        dy/dA                                      gradient ``attention``
    ``attention_relevance(backward, l)``       R_A, under a rule that carries it          gradient ``attention``
    ``biases(backward, l)``                    bias x gradient                            gradient ``biases``
    =========================================  =========================================  ==============================

    Always available: ``layout``, ``depth``, ``dtype``, ``read_row``, ``last_attention``.

    Attributes:
        tape: the recorded run.
        gradients: the gradients of each backward pass.
        target: the explained class of each image, (batch,).
        runner: runs the model again, for methods that need it.
    """

    tape: Tape
    gradients: Mapping[Pass, Gradients]
    target: Tensor
    runner: ModelRunner

    def __dir__(self) -> list[str]:
        """List the public names: what can be read."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    if not TYPE_CHECKING:  # type checkers report the former names as errors

        def __getattr__(self, name: str) -> Any:
            """Resolve names of earlier versions, with a warning."""
            if name not in _FORMER_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            new = _FORMER_NAMES[name]
            warnings.warn(f"view.{name} is now called view.{new}", DeprecationWarning, stacklevel=2)
            return getattr(self, new)

    def __repr__(self) -> str:
        grid = " x ".join(map(str, self.layout.grid))
        return (
            f"{type(self).__name__}({len(self.target)} images, {self.depth} blocks, {self.layout.tokens} tokens, the "
            f"last {grid} of them patches; dir() lists what can be read)"
        )

    @property
    def layout(self) -> Layout:
        """Patch grid, prefix tokens and the tokens that the head reads."""
        return self.tape.layout

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return self.tape.depth

    def tokens(self, layer: int) -> Tensor:
        """x_l, the input of a block, (batch, tokens, channels); layer L is the last block's output."""
        return at_least_float32(self.tape.tokens(layer))

    def token_gradient(self, backward: Pass, layer: int) -> Tensor:
        """dy/dx_l, (batch, tokens, channels)."""
        return at_least_float32(self.gradients[backward].tokens[layer])

    def norm(self, layer: int) -> Tensor:
        """The output of a block's first norm, (batch, tokens, channels)."""
        return at_least_float32(self.tape.norm(layer))

    def norm_gradient(self, backward: Pass, layer: int) -> Tensor:
        """The gradient at the output of a block's first norm, (batch, tokens, channels)."""
        return at_least_float32(self.gradients[backward].norms[layer])

    def biases(self, backward: Pass, layer: int) -> Tensor:
        """Bias x gradient of all biases in a block, (batch, tokens); index L is everything after the last block."""
        return self.gradients[backward].biases[layer]

    def attention(self, layer: int) -> AttentionRecord:
        """The attention call of a block: q, k, v, and A by ``rows(...)`` or indexed as a tensor."""
        return self.tape.attention(layer)

    def attention_matrix(self, layer: int, rows: Rows = slice(None)) -> Tensor:
        """A of a block, or some rows of it, (batch, head, rows, tokens)."""
        return at_least_float32(self.attention(layer).rows(rows))

    def residual_mid(self, layer: int) -> Tensor:
        """The stream after adding the attention output, before the norm of a post-norm block."""
        return at_least_float32(self.tape.residual_mid(layer))

    def after_attention(self, layer: int) -> Tensor:
        """The stream between the attention and the feed-forward part of a block, (batch, tokens, channels)."""
        return at_least_float32(self.tape.after_attention(layer))

    def residual_post(self, layer: int) -> Tensor:
        """The stream after adding the feed-forward output, before the norm of a post-norm block."""
        return at_least_float32(self.tape.residual_post(layer))

    def value(self, layer: int) -> Tensor:
        """The values v of every head, with all biases, (batch, head, tokens, channels)."""
        return at_least_float32(self.attention(layer).value)

    def output_projection(self, layer: int) -> Tensor:
        """W_O of every head, LayerScale included, (channels of the stream, head, channels of the head)."""
        projection = self.tape.head_projection(layer)
        assert projection is not None
        if not projection.same_for_all_tokens:
            raise UnsupportedModelError(
                f"in block {layer} the output of the attention heads is normalised or gated, token by token, before it "
                "is added to the residual stream, so there is no single W_O"
            )
        weight = at_least_float32(projection.weight)
        return weight.reshape(len(weight), self.attention(layer).heads, -1)

    def attention_gradient(self, backward: Pass, layer: int, rows: Rows = slice(None)) -> Tensor:
        """dy/dA = (dy/dO) Vᵀ for some rows, (batch, head, rows, tokens); GradToken eq. 4."""
        value = self.value(layer)
        output_gradient = self.gradients[backward].outputs[layer].to(value.dtype)
        return output_gradient[:, :, rows] @ value.transpose(-2, -1)

    def attention_relevance(self, backward: Pass, layer: int, rows: Rows = slice(None)) -> Tensor:
        """R_A for some rows, (batch, head, rows, tokens), under a rule that carries relevance."""
        return attention_relevance(self.attention(layer), rows, self.gradients[backward].outputs[layer][:, :, rows])

    @cached_property
    def read_row(self) -> Row:
        """The tokens that the head reads, with equal weights summing to 1: the class token's row."""
        read = self.layout.read
        weights = torch.full(
            (len(self.tape.logits), len(read)), 1 / len(read), dtype=self.dtype, device=self.tape.logits.device
        )
        return Row(weights, read)

    @property
    def last_attention(self) -> tuple[int, Tensor]:
        """The layer of the last attention and the rows that the output depends on: the class token's, or all pooled.

        Layer L is an attention pooling after the last block.
        """
        queries = self.layout.pooling_queries
        return (self.depth - 1, self.layout.read) if queries is None else (self.depth, queries)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores: the model's precision, at least float32."""
        return at_least_float32(self.tape.logits[:0]).dtype
