"""What a recording has to hold: the union of what the requested methods need, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Layers = frozenset[int]
NONE: Layers = frozenset()


class Pass(NamedTuple):
    """One backward pass: under which rule, and of what (``logit`` or ``probability`` of the target class)."""

    rule: str
    objective: str


@dataclass(frozen=True)
class Needs:
    """What one method reads, by layer.

    Attributes:
        tokens: residual stream x_l at the block's input.
        halves: the stream between attention and feed-forward part, and the feed-forward part's contribution.
        attention: attention matrices, all rows.
        attention_rows: q, k and v, from which a few rows of A are rebuilt.
        token_gradients: dy/dx_l.
        attention_gradients: dy/dO_l, from which dy/dA_l follows.
        backward: the pass that gives the gradients; ``None`` if there are none.
    """

    tokens: Layers = NONE
    halves: Layers = NONE
    attention: Layers = NONE
    attention_rows: Layers = NONE
    token_gradients: Layers = NONE
    attention_gradients: Layers = NONE
    backward: Pass | None = None

    @property
    def uses_attention(self) -> bool:
        """Whether a model without attention cannot serve this."""
        return bool(self.attention | self.attention_rows | self.attention_gradients)

    def __or__(self, other: Needs) -> Needs:
        """What serves both; they must share the backward pass."""
        assert self.backward == other.backward or not (self.backward and other.backward)
        return Needs(
            self.tokens | other.tokens,
            self.halves | other.halves,
            self.attention | other.attention,
            self.attention_rows | other.attention_rows,
            self.token_gradients | other.token_gradients,
            self.attention_gradients | other.attention_gradients,
            self.backward or other.backward,
        )


@dataclass
class Plan:
    """The union of several methods' needs, ready for a recorder."""

    depth: int
    tokens: set[int] = field(default_factory=set)
    halves: set[int] = field(default_factory=set)
    matrices: set[int] = field(default_factory=set)
    attention: set[int] = field(default_factory=set)
    passes: dict[Pass, Needs] = field(default_factory=dict)

    @classmethod
    def of(cls, depth: int, needs: Iterable[Needs]) -> Plan:
        """Unite the needs of several methods."""
        plan = cls(depth)
        for need in needs:
            plan.tokens |= need.tokens | need.token_gradients
            plan.halves |= need.halves
            plan.matrices |= need.attention
            plan.attention |= need.attention | need.attention_rows | need.attention_gradients
            if need.backward is not None:
                plan.passes[need.backward] = plan.passes.get(need.backward, Needs()) | need
        return plan

    @property
    def rules(self) -> set[str]:
        """The rules that the backward passes follow."""
        return {backward.rule for backward in self.passes}

    @property
    def graph_start(self) -> int:
        """The first block that a backward pass has to reach; below it no graph is built.

        At least the head is always in the graph: where its gradient lands shows which tokens it reads.
        """
        gradients = (needs.token_gradients | needs.attention_gradients for needs in self.passes.values())
        return min((layer for layers in gradients for layer in layers), default=self.depth)
