"""Attention that a model writes out by hand, followed step by step: q kᵀ, perhaps scaled and masked, softmax, A v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitreous.tape import interception as heard
from vitreous.tape.attention import HIDDEN, heads_of
from vitreous.tape.half import exact
from vitreous.tape.interception import in_graph

_MULTIPLICATION = (*heard.MULTIPLICATION, *heard.MULTIPLICATION_IN_PLACE)
_DIVISION = (*heard.DIVISION, *heard.DIVISION_IN_PLACE)
_ADDITION = (*heard.ADDITION, *heard.ADDITION_IN_PLACE)
_ROUNDING = 1e-4  # of the largest score: float32 sums a few hundred products; a capped score is off by far more


@dataclass
class WrittenAttention:
    """What was seen so far of one attention.

    Attributes:
        operands: q and kᵀ, as the product that gave the scores got them.
        scores: q kᵀ on its way to the softmax; ``None`` where it was lost sight of.
        factor: what it was multiplied with.
        head_factor: further factors, one for every head, (head, 1, 1).
        added: what was added to it: relative positions, masks; ``None`` for what is not known.
        mixed: whether the scores are made of more than this product, or it is not known what of it.
        entering: what entered the softmax.
        known: whether that was q kᵀ, all steps to it followed.
        followed: whether rules can follow these steps, too.
        weights: A, in the tensor that the next step takes; ``None`` in front of the softmax.
    """

    operands: tuple[Tensor, Tensor] | None = None
    scores: Tensor | None = None
    factor: float = 1.0
    head_factor: Tensor | None = None
    added: list[Tensor | None] = field(default_factory=list)
    mixed: bool = False
    entering: Tensor | None = None
    known: bool = False
    followed: bool = False
    weights: Tensor | None = None
    _multiplied: bool = False

    def multiply(self, left: Tensor, right: Tensor, product: Tensor) -> None:
        """A product in front of the softmax. The first one is q kᵀ; another (relative positions) enters besides."""
        # A product with a weight matrix is a projection, not a part of the scores.
        projects = min(left.dim(), right.dim()) <= 2
        if not projects:
            self.mixed, self._multiplied = self._multiplied, True
            self.scores, self.factor, self.head_factor, self.followed = product, 1.0, None, True
        if not projects or not self._multiplied:
            self.operands = left, right

    def is_taken_by(self, args: tuple[Any, ...]) -> bool:
        """Whether a call works on q kᵀ on its way to the softmax, perhaps with a constant in front of it."""
        if self.scores is None or not args:
            return False
        return args[0] is self.scores or (len(args) > 1 and args[1] is self.scores and not in_graph(args[0]))

    def step(self, func: Callable[..., Any], args: tuple[Any, ...], output: Any) -> None:
        """Scores are scaled by a number or head by head, or something constant is added to them; perhaps in place."""
        first = args[0] is self.scores
        other = (args[1] if len(args) > 1 else None) if first else args[0]
        factor = _factor_of(other)
        if func in _MULTIPLICATION and factor is not None:
            self._scale_by(factor)
        elif func in _DIVISION and factor is not None and first:
            self._scale_by(1 / factor)
        elif func not in (*_ADDITION, *heard.MASKED_FILL) or in_graph(other):
            self.scores = None if output is self.scores else self.scores  # changed in place into something else
            return
        else:
            self.added.append(torch.as_tensor(other) if func in _ADDITION else _hidden(args, output))
        self.scores = output

    def _scale_by(self, factor: float | Tensor) -> None:
        if not isinstance(factor, Tensor):
            self.factor *= factor
            return
        self.head_factor = factor if self.head_factor is None else self.head_factor * factor
        self.followed = False

    def keep_values(self, before: Any, after: Tensor) -> None:
        """Dropout that does nothing, or another dtype, between softmax and A v or between q kᵀ and softmax."""
        if self.weights is not None:
            self.reshape(before, after)
        elif self.scores is not None and before is self.scores:
            self.followed = self.followed and after is self.scores
            self.scores = after

    def reshape(self, before: Any, after: Tensor) -> None:
        """A may be multiplied with v for all heads of a batch in one row: (batch x head, to, from)."""
        if self.weights is not None and before is self.weights:
            self.weights = after

    def lies_in_one_row(self, scores: Tensor, batch: int, tokens: int) -> bool:
        """Whether these are q kᵀ with all heads of a batch in one row: (batch x head, to, from)."""
        if self.scores is None or self.operands is None:
            return False
        rows = len(self.operands[0])
        of_rows = all(part.dim() == 3 for part in self.operands) and rows % batch == 0
        return of_rows and scores.shape == (rows, tokens, tokens)

    def pass_softmax(self, scores: Tensor, weights: Tensor) -> None:
        """What enters is the scores, what comes out is A."""
        self.known, self.entering, self.weights = scores is self.scores, scores, weights
        self.followed = self.followed and self.known

    def meets_values(self, left: Tensor) -> bool:
        """Whether a product with this tensor on its left is A v."""
        return self.weights is not None and left is self.weights and self.operands is not None

    def split_heads(self, batch: int) -> bool:
        """Give A, which has all heads of a batch in one row, an axis for heads; whether q kᵀ had them so, too."""
        assert self.weights is not None
        assert self.operands is not None
        assert self.entering is not None
        in_one_row = self.entering.dim() == 3
        query, key = (heads_of(part, batch) if part.dim() == 3 else part for part in self.operands)
        self.operands, self.weights = (query, key), heads_of(self.weights, batch)
        if in_one_row:
            self.entering = heads_of(self.entering, batch)
        # What leads to the softmax was not followed across the change, nor are factors of rows those of heads.
        self.mixed |= not in_one_row or self.head_factor is not None
        return in_one_row

    def measure_factor(self, query: Tensor, key: Tensor) -> bool:
        """Find out what q kᵀ was multiplied with on a way that was not followed; whether that is a number per head.

        To a softmax it is the same what is added to a whole row (written-out ones take off the largest score), so rows
        are compared without their means.
        """
        assert self.entering is not None
        products, scores = (
            rows - rows.mean(dim=-1, keepdim=True)
            for rows in (exact(query @ key.transpose(-2, -1)), exact(self.entering.detach()))
        )
        factor = (products * scores).sum(dim=(0, 2, 3)) / products.square().sum(dim=(0, 2, 3))
        factor = factor.view(-1, 1, 1)
        if not bool((scores - factor * products).abs().amax() < _ROUNDING * scores.abs().amax()):
            return False
        one = float(factor.mean())
        alike = bool((factor - one).abs().amax() < _ROUNDING * abs(one))
        self.factor, self.head_factor = (1.0 if abs(one - 1) < _ROUNDING else one, None) if alike else (1.0, factor)
        return True


def _factor_of(other: Any) -> float | Tensor | None:
    """A constant that scores are multiplied with: a number, or one for every head (head, 1, 1); ``None`` for others."""
    if isinstance(other, int | float):
        return other
    if not isinstance(other, Tensor) or in_graph(other) or other.dtype == torch.bool:
        return None
    if other.numel() == 1:
        return float(other)
    by_head = other.dim() in (3, 4) and other.numel() == other.shape[-3]
    return exact(other.detach()).reshape(-1, 1, 1) if by_head else None


def _hidden(args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """The bias that ``masked_fill(scores, mask, value)`` stands for, if its value hides."""
    value = args[2] if len(args) > 2 else None
    if not isinstance(value, int | float) or value >= HIDDEN:
        return None
    return torch.zeros((), dtype=output.dtype, device=output.device)
