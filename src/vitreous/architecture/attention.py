"""An attention call of a run: where its parts are made, and how its tensors lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitreous.architecture.operations import Axes, to_letters

Spelling = Literal["fused", "multi_head", "written"]


@dataclass(frozen=True)
class ScoreStep:
    """A step on the way from q kᵀ to the softmax.

    Attributes:
        step: its number.
        kind: what it does: ``scale`` by a constant, add a constant ``bias``, hide by a ``mask``, or hand on as it is.
    """

    step: int
    kind: Literal["scale", "bias", "mask", "same"]


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a run.

    Attributes:
        spelling: how it is written.
        output_step: the step that gives O: the fused call, or the product with the values.
        queries: how many tokens look.
        keys: how many tokens are looked at.
        rows: for how many batch x head pairs.
        value_axes: the axes of the product with the values: weights first.
        weights_first: whether the weights are the first operand of that product.
        score_step: the step that gives q kᵀ.
        score_axes: its axes: the query first.
        query_first: whether the query is its first operand.
        softmax_step: the step whose output are the weights; of a softmax that is written out, its division.
        score_steps: what was done to q kᵀ on the way to the softmax; ``None`` where that is more than scaling it,
            adding constants and hiding.
        plain_weights: whether what the softmax gives is what the values are multiplied with (heads may be mixed, or
            weights left out, in between).
        entering_step: the step that gives what enters the softmax.
        own_steps: the steps between q kᵀ and the product with the values.
        heads_first: whether, in one row of batch x head, all images of a head come before the next head's.
        query_scales: steps that multiply q with a constant before it meets k.
        key_scales: the same of k.
        over_tokens: whether tokens look at tokens; cross-covariance and linear attention mix channels.
        scores_alone: whether the weights are made of q kᵀ and constants alone, by whatever steps.
        query_axes: the axis of the tokens that look, in the product of q and k and in that with the values.
        key_tokens: the places of the keys that are tokens, where others are learned (memory); else empty.
        head_sizes: the sizes of the axes of heads, where there are several: groups that share keys and values.
    """

    spelling: Spelling
    output_step: int
    output: int
    queries: int
    keys: int
    rows: int
    value_axes: Axes | None = None
    weights_first: bool = True
    score_step: int = -1
    score_axes: Axes | None = None
    query_first: bool = True
    softmax_step: int = -1
    score_steps: tuple[ScoreStep, ...] | None = None
    plain_weights: bool = True
    entering_step: int = -1
    own_steps: frozenset[int] = frozenset()
    heads_first: bool = False
    query_scales: tuple[int, ...] = ()
    key_scales: tuple[int, ...] = ()
    over_tokens: bool = True
    scores_alone: bool = True
    query_axes: tuple[str, str] = ("", "")
    head_sizes: tuple[int, ...] = ()
    key_tokens: tuple[int, ...] = ()

    def arrangement(self, part: Literal["query", "key", "scores", "weights", "value", "output"]) -> Arrangement:
        """How a tensor lies in the two products, scores = q kᵀ and output = weights v, of a written call."""
        axes = self.score_axes if part in {"query", "key", "scores"} else self.value_axes
        assert axes is not None
        # Of scores: the query's and the key's tokens; of O: the query's tokens and the values' channels.
        first = self.query_axes[0 if axes is self.score_axes else 1] or free_axes(axes)[-1]
        second = free_axes(axes.swapped())[-1]
        ahead = "".join(letter for letter in axes.output if letter not in (first, second))
        inner = axes.contracted
        letters, last = {
            "query": (axes.left, (first, inner)),
            "key": (axes.right, (second, inner)),
            "weights": (axes.left, (first, inner)),
            "value": (axes.right, (inner, second)),
        }.get(part, (axes.output, (first, second)))
        return Arrangement(letters, last, ahead, self.heads_first, self.head_sizes)

    def arrange_scores(self, scores: Tensor, batch: int) -> Tensor | None:
        """What entered the softmax as (batch, head, query, key); ``None`` where it lies in another way.

        That may be q kᵀ in another shape: DeBERTa has batch x head in one axis up to there, and then in two.
        """
        arrangement = self.arrangement("scores")
        if scores.dim() == len(arrangement.axes):
            return arrangement.arrange(scores, batch)
        return scores if self._split_by_head(scores, batch) else None

    def restore_scores(self, arranged: Tensor, batch: int, shape: torch.Size) -> Tensor:
        """Scores of (batch, head, query, key) as ``arrange_scores`` got them, of that ``shape``."""
        arrangement = self.arrangement("scores")
        return arrangement.restore(arranged, batch, shape) if len(shape) == len(arrangement.axes) else arranged

    def _split_by_head(self, scores: Tensor, batch: int) -> bool:
        return scores.dim() == 4 and len(scores) == batch and not self.heads_first and self.query_first


def free_axes(axes: Axes) -> list[str]:
    """The axes of a product that its first operand alone has."""
    return [letter for letter in axes.left if letter in axes.output and letter not in axes.right]


@dataclass(frozen=True)
class Arrangement:
    """Where a tensor of an attention product has its images, heads, tokens and channels.

    Attributes:
        axes: its axes, by letters.
        last: the two axes that come last in (batch, head, ., .).
        ahead: all others that the product has, in order.
        heads_first: whether, in one axis of batch x head, all images of a head come before the next head's.
        head_sizes: the sizes of the axes of heads behind that of the images, where there are several.
    """

    axes: str
    last: tuple[str, str]
    ahead: str
    heads_first: bool
    head_sizes: tuple[int, ...] = ()

    def arrange(self, tensor: Tensor, batch: int) -> Tensor | None:
        """The tensor as (batch, head, ., .), a window counting as an image; ``None`` where other axes are left."""
        ordered = to_letters(tensor, self.axes, self.ahead + "".join(self.last))
        sizes = ordered.shape[:-2]
        if self.head_sizes:
            return ordered.expand(-1, *self.head_sizes, -1, -1).flatten(1, -3)
        if len(sizes) > 1:
            images_first = sizes[0] == batch or (sizes[0] == 1 and sizes[1] != batch)
            if len(sizes) == 2 and not images_first and sizes[1] in (1, batch):
                return ordered.transpose(0, 1)
            return ordered.flatten(0, -4) if images_first or sizes[0] % batch == 0 else None
        if len(sizes) != 1 or (sizes[0] % batch and sizes[0] != 1):
            return None
        if sizes[0] in (1, batch):
            return ordered[:, None]
        apart = ordered.reshape(*((-1, batch) if self.heads_first else (batch, -1)), *ordered.shape[1:])
        return apart.transpose(0, 1) if self.heads_first else apart

    def restore(self, arranged: Tensor, batch: int, shape: torch.Size) -> Tensor:
        """A tensor of (batch, head, ., .) as the product itself has it, in its own ``shape``."""
        if self.head_sizes:
            ordered = arranged.reshape(len(arranged), *self.head_sizes, *arranged.shape[2:])
        elif len(self.ahead) == 1:
            flat = arranged.transpose(0, 1) if self.heads_first and arranged.shape[1] > 1 else arranged
            ordered = flat.flatten(0, 1)
        elif len(self.ahead) == 2:
            first, second = (shape[self.axes.index(each)] if each in self.axes else 1 for each in self.ahead)
            windows = second not in (1, batch) and first % batch == 0
            ordered = arranged if first == batch or windows else arranged.transpose(0, 1)
        else:
            sizes = [shape[self.axes.index(letter)] for letter in self.ahead[:-1]]
            ordered = arranged.reshape(*sizes, *arranged.shape[1:])
        order = self.ahead + "".join(self.last)
        return ordered.permute([order.index(letter) for letter in self.axes])
