"""Contributions of every token to every other one in a block, without a tensor of (tokens, tokens, channels).

With attention and the norms' deviations held constant, a block up to its feed-forward part is linear: the stream of
token i is Σ_j T_i(x_j) and biases, with T_i(x_j) = Σ_h A_hij v_hj W_O^h + 1{i=j} x_j (Kobayashi et al. 2021; Modarressi
et al. 2022; Ferrando et al. 2022). The residual connection is treated as one more head, which attends to itself only
and carries the token; a norm gives other vectors, weighted by 1 over the deviation of token i. So in all cases
T_i(x_j) = Σ_t w_tij f_tj over a few terms t, and lengths and distances are computed from w and f.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.architecture.norms import LinearNorm
from vitreous.methods.readout import View, projected_lengths
from vitreous.tape import AttentionRecord
from vitreous.tape.attention import Rows, pieces_of
from vitreous.tape.recording.linear_maps import through_value_weight


def norms(view: View, layer: int) -> tuple[LinearNorm, LinearNorm]:
    """The two norms of a block."""
    first, second = view.tape.linear_norms(layer)
    assert first is not None
    assert second is not None
    return first, second


def value_without_bias(view: View, layer: int) -> Tensor:
    """W_V (N(x) - the norm's bias) of a pre-norm block, (batch, head, tokens, channels): values without biases."""
    first, _ = norms(view, layer)
    normed = view.norm(layer)
    from_token = normed if first.bias is None else normed - first.bias.to(normed.dtype)
    return through_value_weight(view.tape, layer, from_token)


@dataclass(frozen=True)
class HeadUpdates:
    """T_hi(v_hj): what head h carries from token j to token i of the stream, before A_hij weights it.

    T_hi = diag(after_i) W_h diag(before_hi), where statistics of norms and gates between the heads and the residual sum
    are held constant. With W_O and LayerScale only, T is W_O of head h for every i.

    Attributes:
        value: v, (batch, head, tokens, head's channels).
        weight: W, (channels, head, head's channels).
        before: factors of the heads' channels, (batch, head, tokens, head's channels); ``None`` is 1.
        after: factors of the stream's channels, (batch, tokens, channels or 1); ``None`` is 1.
    """

    value: Tensor
    weight: Tensor
    before: Tensor | None
    after: Tensor | None

    @property
    def token_factor(self) -> Tensor | None:
        """One factor for every i and all channels, (batch, tokens); ``None`` is 1."""
        return None if self.after is None or self.after.shape[-1] > 1 else self.after[..., 0]

    @property
    def by_channel(self) -> bool:
        """Whether channels are weighted differently for every i."""
        return self.before is not None or (self.after is not None and self.after.shape[-1] > 1)

    def lengths(self, rows: Rows) -> Tensor:
        """||T_hi(v_hj)|| for some i, (batch, head, rows, tokens); (batch, head, 1, tokens) if it is equal for all i."""
        if self.by_channel:
            found = torch.stack([_lengths(self.value, self.gram(row)) for row in self._numbers(rows)], dim=2)
        else:
            found = self._alike
        factor = self.token_factor
        return found if factor is None else found * factor[:, None, rows, None].abs()

    def products(self, tokens: Tensor, rows: Rows) -> Tensor:
        """<E_j, T_hi(v_hj)> with tokens E, of the same shape."""
        if self.after is not None and self.after.shape[-1] > 1:
            weights = (self._weight_of(row) for row in self._numbers(rows))
            parts = (torch.einsum("bnd,bdhk->bhnk", tokens, weight) * self.value for weight in weights)
            return torch.stack([part.sum(-1) for part in parts], dim=2)
        backwards = torch.einsum("bnd,dhk->bhnk", tokens, self.weight) * self.value
        if self.before is None:
            found = backwards.sum(-1)[:, :, None]
        else:
            found = self.before[:, :, rows] @ backwards.transpose(-2, -1)
        factor = self.token_factor
        return found if factor is None else found * factor[:, None, rows, None]

    @cached_property
    def _alike(self) -> Tensor:
        return projected_lengths(self.value, self.weight)[:, :, None]

    def _numbers(self, rows: Rows) -> list[int]:
        numbers: list[int] = torch.arange(self.value.shape[2], device=self.value.device)[rows].tolist()
        return numbers

    def _weight_of(self, row: int) -> Tensor:
        """T_hi without the factor that all channels share, (batch, channels, head, head's channels)."""
        weight = self.weight[None]
        if self.after is not None and self.after.shape[-1] > 1:
            weight = weight * self.after[:, row, :, None, None]
        return weight if self.before is None else weight * self.before[:, None, :, row]

    def gram(self, row: int) -> Tensor:
        """The products of the columns of T_hi, (batch, head, head's channels, head's channels)."""
        weight = self._weight_of(row)
        return torch.einsum("bdhk,bdhl->bhkl", weight, weight)

    def carried(self, row: int, attention: Tensor) -> Tensor:
        """Σ_h A_hij T_hi(v_hj) for one i and its row of A, (batch, head, tokens) -> (batch, tokens, channels)."""
        weight = self._weight_of(row)
        found = torch.einsum(
            "bhnk,bdhk->bnd", self.value * attention[..., None], weight.expand(len(self.value), *[-1] * 3)
        )
        factor = self.token_factor
        return found if factor is None else found * factor[:, row, None, None]


def head_updates(view: View, layer: int, value: Tensor | None = None) -> HeadUpdates:
    """Return the updates of a block's heads, for its own values or for the given ones."""
    projection = view.tape.head_projection(layer)
    assert projection is not None
    value = view.value(layer) if value is None else value
    heads = value.shape[1]
    weight = at_least_float32(projection.weight).to(value.dtype)
    before = projection.before
    if before is not None:
        before = before.to(value.dtype).reshape(*before.shape[:2], heads, -1).transpose(1, 2)
    after = None if projection.after is None else projection.after.to(value.dtype)
    return HeadUpdates(value, weight.reshape(len(weight), heads, -1), before, after)


def _lengths(value: Tensor, gram: Tensor) -> Tensor:
    """||T(v)|| by the products of T's columns, (batch, head, tokens)."""
    return ((value @ gram) * value).sum(-1).clamp_(min=0).sqrt_()


# Differences of vectors are computed in pieces of about this many numbers, which fit into the CPU cache.
_CACHED = 1 << 19


class Group(NamedTuple):
    """Some of the terms: one vector per head, and one for the residual connection if it counts.

    Attributes:
        vectors: f, (batch, from, terms, channels).
        scale: a factor (batch, to) of their weights; ``None`` is 1.
    """

    vectors: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class Contributions:
    """T_i(x_j) of one block, as weights and vectors.

    Attributes:
        attention: the attention call of the block.
        residual: whether the residual connection is the last term of every group.
        groups: the terms; the weights of all groups are the same but for their scale.
        factor: a factor of all heads' weights, (batch, to): 1 over the deviation of a norm between the heads and the
            residual sum; ``None`` is 1.
    """

    attention: AttentionRecord
    residual: bool
    groups: tuple[Group, ...]
    factor: Tensor | None = None

    def through(self, norm: LinearNorm, tokens: Tensor) -> Contributions:
        """Return the contributions after a norm whose input was ``tokens``."""
        inverse = norm.deviation(tokens).reciprocal_()
        groups = (Group(norm.linear(vectors), _product(scale, inverse)) for vectors, scale in self.groups)
        return replace(self, groups=tuple(groups))

    def __add__(self, other: Contributions) -> Contributions:
        return replace(self, groups=self.groups + other.groups)

    def lengths(self, rows: Rows) -> Tensor:
        """||T_i(x_j)||_2 for some i, (batch, rows, tokens).

        Its square is Σ_tu w_tij w_uij <f_tj, f_uj>: Gram matrices of the terms for every token j are all it takes.
        """
        weights = self.weights(rows)
        squared = weights.new_zeros(weights.shape[:3])
        for gram, scale in self._grams:
            part = (weights @ gram).mul_(weights).sum(dim=-1)
            squared += part if scale is None else part.mul_(scale[:, None, rows])
        return squared.clamp_(min=0).sqrt_().transpose(1, 2)

    def distances(self, rows: Rows, goals: Tensor, shift: float = 0.0) -> Tensor:
        """||T_i(x_j) - goal_i + shift||_1 for some i, (batch, rows, tokens); a few (j, i, channel) at a time."""
        weights = self.weights(rows)
        found = weights.new_empty(weights.shape[:3])
        for image, aim in enumerate(shift - goals[:, rows]):
            scales = [None if scale is None else scale[image, rows, None] for _, scale in self.groups]
            for tokens in pieces_of(weights.shape[1], aim.numel(), _CACHED):
                share = weights[image, tokens]
                shares = torch.cat([share if scale is None else share * scale for scale in scales], dim=-1)
                differences = torch.baddbmm(aim.expand(len(share), -1, -1), shares, self._vectors[image, tokens])
                # Explicitly: torch's 1-norm takes ten times as long.
                torch.sum(differences.abs_(), dim=-1, out=found[image, tokens])
        return found.transpose(1, 2)

    def weights(self, rows: Rows) -> Tensor:
        """The weights w for some i, without the groups' scales, (batch, from, rows, terms)."""
        attention = at_least_float32(self.attention.rows(rows)).permute(0, 3, 2, 1)
        if self.factor is not None:
            attention = attention * self.factor[:, None, rows, None]
        batch, tokens, count, heads = attention.shape
        if not self.residual:
            return attention.contiguous()
        weights = attention.new_zeros(batch, tokens, count, heads + 1)
        weights[..., :heads] = attention
        own = torch.arange(tokens, device=weights.device)[rows]
        weights[:, own, torch.arange(count, device=weights.device), heads] = 1
        return weights

    @cached_property
    def _vectors(self) -> Tensor:
        """The vectors of all groups as terms of one, (batch, from, terms of all groups, channels)."""
        return torch.cat([vectors for vectors, _ in self.groups], dim=2)

    @cached_property
    def _grams(self) -> list[tuple[Tensor, Tensor | None]]:
        """Gram matrices (batch, from, term, term) of pairs of groups, and the scales; mixed pairs count double."""
        found = []
        for first, second in combinations_with_replacement(self.groups, 2):
            gram = first.vectors @ second.vectors.transpose(-2, -1)
            found.append((gram if first is second else gram.mul_(2), _product(first.scale, second.scale)))
        return found


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


@dataclass(frozen=True)
class GatedContributions:
    """Contributions with a gate that weights the channels of every token i differently, so that f depends on i.

    The vectors of one i are computed at a time.

    Attributes:
        attention: the attention call of the block.
        updates: the updates of its heads.
        tokens: what the residual connection adds, (batch, tokens, channels); ``None`` if it does not count.
        summands: for each summand the norms that were applied to it, with 1 over their deviations.
    """

    attention: AttentionRecord
    updates: HeadUpdates
    tokens: Tensor | None
    summands: tuple[tuple[tuple[LinearNorm, Tensor], ...], ...] = ((),)

    def through(self, norm: LinearNorm, tokens: Tensor) -> GatedContributions:
        """Return the contributions after a norm whose input was ``tokens``."""
        passed = norm, norm.deviation(tokens).reciprocal_()
        return replace(self, summands=tuple((*norms, passed) for norms in self.summands))

    def __add__(self, other: GatedContributions) -> GatedContributions:
        return replace(self, summands=self.summands + other.summands)

    def lengths(self, rows: Rows) -> Tensor:
        """||T_i(x_j)||_2 for some i, (batch, rows, tokens)."""
        return torch.stack([vectors.norm(dim=-1) for _, vectors in self._vectors(rows)], dim=1)

    def distances(self, rows: Rows, goals: Tensor, shift: float = 0.0) -> Tensor:
        """||T_i(x_j) - goal_i + shift||_1 for some i, (batch, rows, tokens)."""
        found = [(vectors - goals[:, row, None] + shift).abs_().sum(-1) for row, vectors in self._vectors(rows)]
        return torch.stack(found, dim=1)

    def _vectors(self, rows: Rows) -> Iterator[tuple[int, Tensor]]:
        """T_i(x_j) for one i after the other, (batch, tokens, channels)."""
        attention = at_least_float32(self.attention.rows(rows))
        for place, row in enumerate(torch.arange(self.attention.value.shape[2])[rows].tolist()):
            carried = self.updates.carried(row, attention[:, :, place])
            if self.tokens is not None:
                carried[:, row] += self.tokens[:, row]
            parts = []
            for norms in self.summands:
                part = carried
                for norm, inverse in norms:
                    part = norm.linear(part) * inverse[:, row, None, None]
                parts.append(part)
            yield row, torch.stack(parts).sum(0)


def contributions(view: View, layer: int, *, biases: bool, residual: bool) -> Contributions | GatedContributions:
    """Return the contributions to the stream through the attention of a block, and through the residual connection.

    Args:
        view: the recorded run.
        layer: the block.
        biases: include the biases of the values; that of the output projection belongs to no token and is left out.
        residual: include the residual connection.
    """
    updates = head_updates(view, layer, None if biases else value_without_bias(view, layer))
    tokens = view.tokens(layer) * view.tape.skip(layer)[0] if residual else None
    if updates.by_channel:
        return GatedContributions(view.attention(layer), updates, tokens)
    # W_O once per head: (head, tokens, head's channels) x (head, head's channels, channels).
    carried = torch.matmul(updates.value, updates.weight.permute(1, 2, 0)).transpose(1, 2)
    vectors = carried if tokens is None else torch.cat([carried, tokens[:, :, None]], dim=2)
    return Contributions(view.attention(layer), residual, (Group(vectors, None),), updates.token_factor)
