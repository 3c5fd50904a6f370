"""The parts of a block that decompositions take as linear maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitreous._utils.tensors import exact
from vitreous.architecture.norms import LinearNorm
from vitreous.methods.readout import projected_lengths
from vitreous.methods.view import View
from vitreous.tape.attention import Rows
from vitreous.tape.recording.linear_maps import through_value_weight


def norms(view: View, layer: int) -> tuple[LinearNorm, LinearNorm]:
    """The two norms of a block."""
    first, second = view.tape.linear_norms(layer)
    assert first is not None
    assert second is not None
    return first, second


def value_without_bias(view: View, layer: int) -> Tensor:
    """W_V (N(x) - the norm's bias) of a pre-norm block, (batch, head, tokens, channels): what comes from x alone."""
    first, _ = norms(view, layer)
    normed = view.norm(layer)
    from_token = normed if first.bias is None else normed - first.bias.to(normed.dtype)
    return through_value_weight(view.tape, layer, from_token)


@dataclass(frozen=True)
class HeadUpdates:
    """T_hi(v_hj): what head h carries from token j to token i of the stream, before A_hij weighs it.

    T_hi = diag(after_i) W_h diag(before_hi), where statistics of norms and gates between the heads and the residual sum
    are held as they were in the run. Where only W_O and LayerScale stand there, T is W_O of head h for every i.

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
        """Whether channels are weighed differently for every i."""
        return self.before is not None or (self.after is not None and self.after.shape[-1] > 1)

    def lengths(self, rows: Rows) -> Tensor:
        """||T_hi(v_hj)|| for some i, (batch, head, rows, tokens); (batch, head, 1, tokens) where all i are alike."""
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
    """What the heads of a block carry from token to token; of other values than the block's own, where given."""
    projection = view.tape.head_projection(layer)
    assert projection is not None
    value = view.value(layer) if value is None else value
    heads = value.shape[1]
    weight = exact(projection.weight).to(value.dtype)
    before = projection.before
    if before is not None:
        before = before.to(value.dtype).reshape(*before.shape[:2], heads, -1).transpose(1, 2)
    after = None if projection.after is None else projection.after.to(value.dtype)
    return HeadUpdates(value, weight.reshape(len(weight), heads, -1), before, after)


def _lengths(value: Tensor, gram: Tensor) -> Tensor:
    """||T(v)|| by the products of T's columns, (batch, head, tokens)."""
    return ((value @ gram) * value).sum(-1).clamp_(min=0).sqrt_()
