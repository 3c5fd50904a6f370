"""What every token contributes to every other one in a block, without a tensor of (tokens, tokens, channels).

With attention and the norms' deviations held as they were, a block up to its feed-forward part is linear: the stream of
token i is Σ_j T_i(x_j) and biases, with T_i(x_j) = Σ_h A_hij v_hj W_O^h + 1{i=j} x_j (Kobayashi et al. 2021; Modarressi
et al. 2022; Ferrando et al. 2022). The residual connection is one more head here, which attends to itself alone and
carries the token; a norm gives other vectors, weighed by 1 over the deviation of token i. So in all cases
T_i(x_j) = Σ_t w_tij f_tj over a few terms t, and lengths and distances are worked out from w and f.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitreous.anatomy.norms import LinearNorm
from vitreous.methods.linear_parts import value_without_bias
from vitreous.methods.view import View, exact
from vitreous.tape import AttentionRecord
from vitreous.tape.attention import Rows, pieces_of

# Differences of vectors are worked on in pieces of about this many numbers: they stay in the processor's cache.
_CACHED = 1 << 19


@dataclass(frozen=True)
class Contributions:
    """T_i(x_j) of one block, as weights and vectors.

    Attributes:
        attention: the attention call of the block.
        vectors: f, (batch, from, terms, channels); terms are the heads, or the heads and the token itself, once for
            each of ``scales``.
        residual: whether the token itself is one of them.
        scales: factors (batch, to) of the weights; ``None`` is 1.
    """

    attention: AttentionRecord
    vectors: Tensor
    residual: bool
    scales: tuple[Tensor | None, ...] = (None,)

    def through(self, norm: LinearNorm, tokens: Tensor) -> Contributions:
        """Behind a norm that was given ``tokens``."""
        inverse = norm.deviation(tokens).reciprocal_()
        scales = tuple(inverse if scale is None else inverse * scale for scale in self.scales)
        return Contributions(self.attention, norm.linear(self.vectors), self.residual, scales)

    def __add__(self, other: Contributions) -> Contributions:
        vectors = torch.cat([self.vectors, other.vectors], dim=2)
        return Contributions(self.attention, vectors, self.residual, (*self.scales, *other.scales))

    def lengths(self, rows: Rows) -> Tensor:
        """||T_i(x_j)||_2 for some i, (batch, rows, tokens).

        Its square is Σ_tu w_tij w_uij <f_tj, f_uj>: a Gram matrix of the terms for every token j is all it takes.
        """
        weights = self.weights(rows)
        squared = (weights @ self._gram).mul_(weights).sum(dim=-1)
        return squared.clamp_(min=0).sqrt_().transpose(1, 2)

    def distances(self, rows: Rows, goals: Tensor, shift: float = 0.0) -> Tensor:
        """||T_i(x_j) - goal_i + shift||_1 for some i, (batch, rows, tokens); a few (j, i, channel) at a time."""
        weights = self.weights(rows)
        aims = shift - goals[:, rows]
        found = weights.new_empty(weights.shape[:3])
        for image, aim in enumerate(aims):
            for tokens in pieces_of(weights.shape[1], aim.numel(), _CACHED):
                differences = torch.baddbmm(aim[None], weights[image, tokens], self.vectors[image, tokens])
                torch.linalg.vector_norm(differences, ord=1, dim=-1, out=found[image, tokens])
        return found.transpose(1, 2)

    def weights(self, rows: Rows) -> Tensor:
        """The weights w for some i, (batch, from, rows, terms)."""
        attention = exact(self.attention.rows(rows))
        batch, heads, count, tokens = attention.shape
        group = heads + self.residual
        weights = attention.new_zeros(batch, tokens, count, group * len(self.scales))
        weights[..., :heads] = attention.permute(0, 3, 2, 1)
        if self.residual:
            own = torch.arange(tokens, device=weights.device)[rows]
            weights[:, own, torch.arange(count, device=weights.device), heads] = 1
        # The first group holds what the others are made of, so it is scaled last.
        for place, scale in reversed(list(enumerate(self.scales))):
            factor = 1 if scale is None else scale[:, None, rows, None]
            weights[..., place * group : (place + 1) * group] = weights[..., :group] * factor
        return weights

    @cached_property
    def _gram(self) -> Tensor:
        return self.vectors @ self.vectors.transpose(-2, -1)


def contributions(view: View, layer: int, *, biases: bool, residual: bool) -> Contributions:
    """What reaches the stream by the attention of a block, and by the residual connection.

    Args:
        view: the run.
        layer: the block.
        biases: whether the values' biases count; the output projection's, which belongs to no token, never does.
        residual: whether the residual connection counts.
    """
    value = view.value(layer) if biases else value_without_bias(view, layer)
    # W_O once per head: (head, tokens, head's channels) x (head, head's channels, channels).
    carried = torch.matmul(value, view.heads_to_stream(layer).permute(1, 2, 0)).transpose(1, 2)
    vectors = torch.cat([carried, view.tokens(layer)[:, :, None]], dim=2) if residual else carried
    return Contributions(view.attention(layer), vectors, residual)
