"""One attention call as it was recorded, and the arithmetic that rebuilds A and its gradients from it.

The attention matrix never has to live in the autograd graph (GradToken eq. 4): with O = A V per head,
dy/dA = (dy/dO) Vᵀ. So q, k, v and the gradient arriving at O are kept, and A is rebuilt where it is needed,
for the rows that are needed, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._utils.torch_state import at_least_float32

# Rows of A are worked on in pieces of at most this many numbers, which bounds memory for thousands of tokens.
_PIECE = 1 << 23
# Smaller pieces stay in the processor's caches, and several of them at a time cost little memory (with 2,305 tokens a
# tenth less time and half the peak of relevance), as long as a product has some rows: 100 cost 15% more than 200.
_SMALL_PIECE = 1 << 21
_SOME_ROWS = 256
HIDDEN = -9e3  # masks are written as -1e4 or less: a score lower by this much has no share of the softmax

Rows = slice | Tensor


@dataclass(frozen=True)
class FusedCall:
    """A fused attention call as a graph of its own: its kernel gives dq, dk and dv without ever storing A."""

    inputs: tuple[Tensor, Tensor, Tensor]
    output: Tensor

    def gradients(self, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, each a new tensor."""
        query, key, value = torch.autograd.grad(self.output, self.inputs, output_gradient, retain_graph=True)
        return query, key, value


def attend_fused(record: AttentionRecord) -> FusedCall | None:
    """Run a call by a fused kernel; ``None`` where torch has none for it, for its own way back would store A."""
    assert record.query is not None
    with torch.enable_grad():
        query, key, value = (part.detach().requires_grad_() for part in (record.query, record.key, record.value))
        attend = nn.functional.scaled_dot_product_attention
        output = attend(query, key, value, attn_mask=record.bias, scale=record.scale)
    kernel = output.grad_fn
    return FusedCall((query, key, value), output) if kernel and kernel.name().startswith("ScaledDot") else None


@dataclass
class AttentionRecord:
    """The parts of one attention call: (batch, head, token, channel) each, outside any graph.

    Attributes:
        query: q, or ``None`` where the model itself computed A (eager attention) and ``matrix`` holds it.
        key: k, one per query head.
        value: v, one per query head.
        scale: the factor in front of q kᵀ.
        bias: what is added to the scores before the softmax (relative positions, masks), or ``None``.
        matrix: A itself where it was worth keeping.
        scores: what entered the softmax, where the model itself computed it and a method reads it.
        fused: the same call by a fused kernel, where it can return its gradients.
        head_scale: further factors in front of q kᵀ, one for every head (head, 1, 1), where a model has such.
        product_gradient: gives dy/d(q kᵀ) for dy/dO where A is made of q kᵀ by more than scaling, adding constants and
            a softmax: heads that are mixed before or behind it, scores of which the largest are kept.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    scale: float
    bias: Tensor | None = None
    matrix: Tensor | None = None
    scores: Tensor | None = None
    fused: FusedCall | None = None
    head_scale: Tensor | None = None
    product_gradient: Callable[[Tensor], Tensor] | None = None

    @property
    def heads(self) -> int:
        """How many heads the call has."""
        return self.value.shape[1]

    @property
    def queries(self) -> int:
        """How many query tokens there are: as many as keys, except in a pooling attention."""
        source = self.matrix if self.query is None else self.query
        assert source is not None
        return source.shape[2]

    @property
    def full_scale(self) -> float | Tensor:
        """All factors in front of q kᵀ: a number, or one for every head (head, 1, 1)."""
        return self.scale if self.head_scale is None else self.scale * self.head_scale

    def rows(self, rows: Rows) -> Tensor:
        """A for some query tokens: (batch, head, rows, tokens)."""
        if self.matrix is not None:
            return self.matrix[:, :, rows]
        assert self.query is not None
        return attention_rows(self.query[:, :, rows], self.key, self.scale, self._bias_rows(rows))

    def __getitem__(self, index: Any) -> Tensor:
        """A, (batch, head, tokens, tokens), indexed as a tensor; ``rows`` rebuilds no more of it than is wanted."""
        return self.rows(slice(None))[index]

    def score_rows(self, rows: Rows) -> Tensor:
        """The scores before the softmax for some query tokens: (batch, head, rows, tokens)."""
        if self.scores is not None:
            return self.scores[:, :, rows]
        assert self.query is not None
        return score_rows(self.query[:, :, rows], self.key, self.scale, self._bias_rows(rows))

    def _bias_rows(self, rows: Rows) -> Tensor | None:
        if self.bias is None or self.bias.shape[-2] == 1:
            return self.bias
        return self.bias[..., rows, :]

    def cut(self, batch: Rows, count: int) -> AttentionRecord:
        """The call of some texts, between their first ``count`` tokens alone."""
        return AttentionRecord(
            query=None if self.query is None else self.query[batch, :, :count],
            key=self.key[batch, :, :count],
            value=self.value[batch, :, :count],
            scale=self.scale,
            bias=None if self.bias is None else _unless_zero(_cut_scores(self.bias, batch, count)),
            matrix=None if self.matrix is None else _cut_scores(self.matrix, batch, count),
            scores=None if self.scores is None else _cut_scores(self.scores, batch, count),
            head_scale=self.head_scale,
        )

    def in_order(self, order: Tensor) -> AttentionRecord:
        """The call with its tokens in another order."""
        order = order.to(self.key.device)
        known = self.scores is not None or self.query is not None
        return AttentionRecord(
            query=None,
            key=self.key[:, :, order],
            value=self.value[:, :, order],
            scale=self.scale,
            matrix=self.rows(slice(None))[:, :, order][..., order],
            scores=self.score_rows(slice(None))[:, :, order][..., order] if known else None,
            head_scale=self.head_scale,
        )

    def last_keys(self, count: int) -> AttentionRecord:
        """The call as its last ``count`` keys see it: their part of A, which was normalised over all."""
        matrix = self.rows(slice(None))[..., -count:]
        scores = None if self.scores is None else self.scores[..., -count:]
        return AttentionRecord(
            query=None,
            key=self.key[:, :, -count:],
            value=self.value[:, :, -count:],
            scale=self.scale,
            matrix=matrix,
            scores=scores,
            head_scale=self.head_scale,
        )

    def of_keys(self, places: Tensor) -> AttentionRecord:
        """The call as some of its keys see it, where the others are learned and belong to no token."""
        places, matrix, values = places.to(self.key.device), self.rows(slice(None)), self.value

        def product_gradient(output_gradient: Tensor) -> Tensor:
            if self.product_gradient is not None:
                return self.product_gradient(output_gradient)[..., places]
            gradient = output_gradient @ values.transpose(-2, -1).to(output_gradient.dtype)
            return score_gradient(matrix.to(gradient.dtype), gradient)[..., places] * self.full_scale

        return AttentionRecord(
            query=None,
            key=self.key[:, :, places],
            value=values[:, :, places],
            scale=self.scale,
            matrix=matrix[..., places],
            scores=None if self.scores is None else self.scores[..., places],
            head_scale=self.head_scale,
            product_gradient=product_gradient,
        )

    def joined(self, other: AttentionRecord) -> AttentionRecord | None:
        """Two calls of the same tokens as one with the heads of both; ``None`` where they do not fit together."""
        if self.key.shape[2:] != other.key.shape[2:] or self.value.shape[2:] != other.value.shape[2:]:
            return None
        if self.scale != other.scale or self.head_scale is not None or other.head_scale is not None:
            return None

        def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
            return None if first is None or second is None else torch.cat([first, second], dim=1)

        written = self.query is None or other.query is None or self.bias is not None or other.bias is not None
        matrices = [call.rows(slice(None)) for call in (self, other)] if written else [self.matrix, other.matrix]
        return AttentionRecord(
            query=None if written else both(self.query, other.query),
            key=torch.cat([self.key, other.key], dim=1),
            value=torch.cat([self.value, other.value], dim=1),
            scale=self.scale,
            matrix=both(*matrices),
            scores=both(self.scores, other.scores),
        )

    def heads_apart(self) -> Iterator[AttentionRecord]:
        """The call as several with one head each: what is made of one is smaller by as much."""
        for head in range(self.heads):
            one = slice(head, head + 1)
            yield AttentionRecord(
                query=None if self.query is None else self.query[:, one],
                key=self.key[:, one],
                value=self.value[:, one],
                scale=self.scale,
                bias=None if self.bias is None else _of_head(self.bias, head),
                matrix=None if self.matrix is None else self.matrix[:, one],
                scores=None if self.scores is None else self.scores[:, one],
                head_scale=None if self.head_scale is None else self.head_scale[one],
            )

    def pieces(self, rows: int | None = None) -> Iterator[slice]:
        """So many rows, or all, cut so that one piece of A stays small."""
        return row_pieces(self.value.shape[0] * self.heads, self.queries if rows is None else rows, self.key.shape[2])


def _of_head(scores: Tensor, head: int) -> Tensor:
    """Of (batch, head, to, from), in which the first axes may be missing or of size 1."""
    return scores if scores.dim() < 3 or scores.shape[-3] == 1 else scores.narrow(-3, head, 1)


def _cut_scores(scores: Tensor, batch: Rows, count: int) -> Tensor:
    """Of (batch, head, to, from), in which axes of size 1 stand for any size."""
    some = scores if len(scores) == 1 else scores[batch]
    return some[..., :count, :count] if scores.shape[-2] > 1 else some[..., :count]


def _unless_zero(bias: Tensor) -> Tensor | None:
    """Nothing in the place of zeros: a mask that hid padding alone, which has been cut off."""
    return bias if bool(bias.any()) else None


def row_pieces(matrices: int, rows: int, columns: int) -> Iterator[slice]:
    """Cut ``rows`` so that ``matrices`` pieces of (rows, columns) stay small together and still have some rows."""
    numbers = matrices * columns
    return pieces_of(rows, numbers, min(_PIECE, max(_SMALL_PIECE, _SOME_ROWS * numbers)))


def pieces_of(rows: int, numbers: int, size: int) -> Iterator[slice]:
    """Cut ``rows`` of so many ``numbers`` each into pieces of about ``size`` numbers."""
    step = max(1, min(rows, size // max(1, numbers)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def score_rows(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Scale q kᵀ + bias, a new tensor; half precision is worked out in float32, as fused kernels do."""
    scores = (at_least_float32(query) * scale) @ at_least_float32(key).transpose(-2, -1)
    return scores if bias is None else scores + bias.to(scores.dtype)


def attention_rows(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """softmax(scale q kᵀ + bias)."""
    scores = score_rows(query, key, scale, bias)
    # In place on a tensor that is not used elsewhere: A is the largest array of the whole pass.
    return torch.softmax(scores, dim=-1, out=scores)


def additive_bias(mask: Tensor | None, query: Tensor, keys: int, *, causal: bool) -> Tensor | None:
    """The score bias that an attention mask stands for: boolean masks keep where true, causal hides the future."""
    if causal:
        visible = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=query.device).tril()
        return additive_bias(visible, query, keys, causal=False)
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        hidden = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        return hidden.masked_fill_(~mask, float("-inf"))
    return mask


def only_hides(bias: Tensor | None) -> bool:
    """Whether what is added to scores is a mask: nothing, or so much that nothing is left of them."""
    return bias is not None and bool(((bias == 0) | (bias < HIDDEN)).all())


def attention_arguments(
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
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    key, value = in_every_head(key, query), in_every_head(value, query)
    bias = additive_bias(attn_mask, query, key.shape[-2], causal=is_causal)
    return query, key, value, bias, query.shape[-1] ** -0.5 if scale is None else scale


def heads_of(rows: Tensor, batch: int, *, heads_first: bool = False) -> Tensor:
    """(batch x head, token, channel) -> (batch, head, token, channel); (head x batch, ...) if ``heads_first``."""
    if heads_first:
        return rows.reshape(-1, batch, *rows.shape[1:]).transpose(0, 1)
    return rows.reshape(batch, -1, *rows.shape[1:])


def rows_of(heads: Tensor, *, heads_first: bool = False) -> Tensor:
    """What ``heads_of`` was given."""
    return (heads.transpose(0, 1) if heads_first else heads).flatten(0, 1)


def in_every_head(part: Tensor, others: Tensor) -> Tensor:
    """K or v, (batch, head, token, channel), once for each head of ``others``, if all share it (multi-query attention).

    What reaches the heads adds up where they share it: relevance as gradients do.
    """
    if part.dim() != 4 or part.shape[1] != 1 or part.shape[0] != others.shape[0] or others.shape[1] == 1:
        return part
    return part.expand(-1, others.shape[1], -1, -1)


def bias_of_heads(bias: Tensor | None, batch: int, *, heads_first: bool = False) -> Tensor | None:
    """``heads_of`` a score bias, which may have one row for all heads, or no such axis."""
    if bias is None or bias.dim() < 3 or len(bias) == 1:
        return bias
    return heads_of(bias, batch, heads_first=heads_first)


def value_gradient(record: AttentionRecord, output_gradient: Tensor) -> Tensor:
    """Aᵀ dO: all that reaches the values, and all there is when A is held constant."""
    total: Tensor | None = None
    for rows in record.pieces():
        part = record.rows(rows).to(output_gradient.dtype).transpose(-2, -1) @ output_gradient[:, :, rows]
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def plain_gradients(record: AttentionRecord, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of ordinary attention, by the fused kernel where there is one, or a few rows of A at a time."""
    if record.fused is not None:
        return record.fused.gradients(output_gradient)
    assert record.query is not None
    key, value, dtype = record.key, record.value, output_gradient.dtype
    query_parts: list[Tensor] = []
    key_total = torch.zeros_like(key)
    value_total = torch.zeros_like(value)
    for rows in record.pieces():
        attention = record.rows(rows).to(dtype)
        gradient = output_gradient[:, :, rows]
        value_total += attention.transpose(-2, -1) @ gradient
        scores = score_gradient(attention, gradient @ value.transpose(-2, -1))
        query_parts.append((scores @ key).mul_(record.full_scale))
        key_total += scores.transpose(-2, -1) @ (record.query[:, :, rows] * record.full_scale)
    return torch.cat(query_parts, dim=2), key_total, value_total


def score_gradient(attention: Tensor, attention_gradient: Tensor) -> Tensor:
    """Through the softmax: dS = A * (dA - Σ_j A dA)."""
    # torch's own kernel, which makes no matrix besides the result.
    backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001
    result: Tensor = backward(attention_gradient, attention, -1, attention.dtype)
    return result
