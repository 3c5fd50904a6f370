"""What a recording has to hold: the union of what the requested methods need, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

Layers = frozenset[int]
NONE: Layers = frozenset()
Objective = Literal["logit", "probability", "others", "intermediate", "intermediate_mean"]
PIXELS = -1  # as a layer: the input of the model, below the first block; of a text, its embedded tokens


class Pass(NamedTuple):
    """One backward pass: under which rule, and of what.

    Attributes:
        rule: one of ``RULES``.
        objective: ``logit`` or ``probability`` of the target class; ``others``, the mean logit of all other classes; or
            ``intermediate``, the logit that the head gives to each block's own output, of which only the gradient at
            that block's attention is read; ``intermediate_mean`` has the mean of these tokens in the place of each.
    """

    rule: str
    objective: Objective

    @property
    def reads_blocks_alone(self) -> bool:
        """Whether the head has to read the output of one block after the other."""
        return self.objective.startswith("intermediate")


@dataclass(frozen=True)
class GradientNeeds:
    """What is read of one backward pass, by layer.

    Attributes:
        tokens: dy/dx_l at the block's input; layer ``PIXELS`` is the picture.
        norms: the gradient at the output of the block's first norm.
        attention: dy/dO_l, from which dy/dA_l follows.
        biases: bias x gradient, summed over channels, of everything in a block; layer L is all after the last block.
    """

    tokens: Layers = NONE
    norms: Layers = NONE
    attention: Layers = NONE
    biases: Layers = NONE

    def __or__(self, other: GradientNeeds) -> GradientNeeds:
        return GradientNeeds(*(getattr(self, part.name) | getattr(other, part.name) for part in fields(self)))

    @property
    def lowest(self) -> int | None:
        """The first block that the pass has to reach."""
        return min(self.tokens | self.norms | self.attention | self.biases, default=None)


@dataclass(frozen=True)
class Needs:
    """What one method reads, by layer.

    Attributes:
        tokens: residual stream x_l at the block's input.
        norms: the output of the block's first norm.
        residual: the stream between attention and feed-forward part, and with the feed-forward part added.
        attention: attention matrices, all rows.
        attention_rows: q, k and v, from which a few rows of A are rebuilt.
        projections: W_O, by which the heads reach the stream.
        linear_norms: both norms as linear maps, with what they were given in this run.
        unbiased_values: in pre-norm blocks the values as they are without the biases of norm and projection, with W_V.
        scores: what enters the softmax, also where a model writes out its attention itself.
        keys: k by itself, where nothing else enters the scores besides q and masks.
        picture: whether the pixels of a picture are read, painted or scaled, which a text does not have.
        plane: whether pictures are turned or filtered in their plane, which a volume or a clip does not have.
        gradients_again: whether gradients are read of further runs, which the method starts itself.
        gradients: what is read of each backward pass.
    """

    tokens: Layers = NONE
    norms: Layers = NONE
    residual: Layers = NONE
    attention: Layers = NONE
    attention_rows: Layers = NONE
    projections: Layers = NONE
    linear_norms: Layers = NONE
    unbiased_values: Layers = NONE
    scores: Layers = NONE
    keys: Layers = NONE
    picture: bool = False
    plane: bool = False
    gradients_again: bool = False
    gradients: Mapping[Pass, GradientNeeds] = field(default_factory=dict)

    @property
    def uses_attention(self) -> bool:
        """Whether a model without attention cannot serve this."""
        return bool(self.attention | self.attention_rows | self.scores) or any(
            part.attention for part in self.gradients.values()
        )

    @property
    def biases(self) -> Layers:
        """Blocks whose biases' gradients are wanted."""
        return NONE.union(*(part.biases for part in self.gradients.values()))

    @property
    def rules(self) -> set[str]:
        """The rules that the backward passes follow."""
        return {backward.rule for backward in self.gradients}

    @property
    def reads_blocks_alone(self) -> bool:
        """Whether the head has to read the output of one block after the other."""
        return any(backward.reads_blocks_alone for backward in self.gradients)

    @property
    def by_rows(self) -> Needs:
        """The same where a few rows of each A are enough, which are cheaper rebuilt than kept."""
        return replace(self, attention=NONE, attention_rows=self.attention_rows | self.attention)

    def __or__(self, other: Needs) -> Needs:
        """What serves both."""
        gradients = dict(self.gradients)
        for backward, part in other.gradients.items():
            gradients[backward] = gradients.get(backward, GradientNeeds()) | part
        layers = (part.name for part in fields(self) if part.name != "gradients")
        return Needs(**{name: getattr(self, name) | getattr(other, name) for name in layers}, gradients=gradients)


def unite(needs: Iterable[Needs]) -> Needs:
    """What serves all of several methods."""
    united = Needs()
    for each in needs:
        united |= each
    return united


@dataclass(frozen=True)
class Intervention:
    """A stream put in the place of another, patches dropped, or attention scaled.

    Attributes:
        layer: the block whose input x_l is replaced; L stands for the input of what is after the last block.
        stream: what replaces it, (batch, tokens, channels). Its batch may be another than that of the images, of which
            one is then enough: blocks, pooling and head work on any batch size.
        attention_scale: by block, factors (batch,) on its attention matrix. Such a matrix is a constant: the gradient
            passes on through the values alone, under every rule.
        kept: the patches that stay, (batch, k), ascending in every row; the others are dropped at the input of the
            first block, so the run has k patches. ``None`` keeps all.
        patches: how many patches the whole picture has, where some are dropped.
        inserted: by block, one token of every row and what stands in its place at the input of that block, as numbers
            of tokens (batch,) and values (batch, channels).
    """

    layer: int = 0
    stream: Tensor | None = None
    attention_scale: Mapping[int, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None
    patches: int = 0
    inserted: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def replacement(self, layer: int) -> Tensor | None:
        """What stands in for x_l, if anything does."""
        return self.stream if layer == self.layer else None


@dataclass(frozen=True)
class Plan:
    """The needs of all methods together, in a recorder's terms, and what the run does differently from the model."""

    depth: int
    needs: Needs
    intervention: Intervention = field(default_factory=Intervention)

    @cached_property
    def rules(self) -> set[str]:
        """The rules that the backward passes follow."""
        return self.needs.rules

    @cached_property
    def tokens(self) -> Layers:
        """Block inputs to keep."""
        intermediate = (
            {layer + 1 for layer in part.attention}
            for backward, part in self.needs.gradients.items()
            if backward.reads_blocks_alone
        )
        return self.needs.tokens.union(*(part.tokens for part in self.needs.gradients.values()), *intermediate)

    @cached_property
    def norms(self) -> Layers:
        """First norms whose output is kept."""
        return self.needs.norms.union(*(part.norms for part in self.needs.gradients.values()))

    @cached_property
    def attention(self) -> Layers:
        """Attention calls to keep."""
        kept = self.needs.attention | self.needs.attention_rows | self.needs.scores
        return kept.union(*(part.attention for part in self.needs.gradients.values()))

    @cached_property
    def biases(self) -> Layers:
        """Blocks whose biases' gradients are wanted."""
        return self.needs.biases

    @cached_property
    def graph_start(self) -> int:
        """The first block that a backward pass has to reach; below it no graph is built.

        At least the head is always in the graph: where its gradient lands shows which tokens it reads.
        """
        lowest = (part.lowest for part in self.needs.gradients.values())
        return min((layer for layer in lowest if layer is not None), default=self.depth)
