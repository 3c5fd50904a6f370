"""What every model family is described by: where its blocks are and which parts a block has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from vitreous.outputs import Scale

# Where a block normalises: x + f(norm(x)), norm(x + f(x)), or x + norm(f(x)).
NormPlace = Literal["pre", "post", "branch"]


@dataclass(frozen=True)
class Block:
    """One transformer block.

    Attributes:
        module: the block itself; its first argument is the residual stream x_l.
        attention: the module inside which the attention call happens; ``None`` for blocks that have none.
        heads_to_stream: gives W_O with rows for the stream and columns for the heads' channels, LayerScale included;
            ``None`` where values do not reach the stream by a linear map (a norm or gate in between).
        projection: the module that holds W_O.
        value_weight: gives W_V with rows for the heads' channels and columns for what the attention module is given;
            ``None`` where it was not found.
        first_norm: the norm that belongs to the attention branch.
        second_norm: the norm that belongs to the feed-forward branch.
        norm_place: where the norms stand.
    """

    module: nn.Module
    attention: nn.Module | None
    heads_to_stream: Callable[[], Tensor] | None
    projection: nn.Module | None
    value_weight: Callable[[], Tensor] | None
    first_norm: nn.Module | None
    second_norm: nn.Module | None
    norm_place: NormPlace


@dataclass(frozen=True)
class Anatomy:
    """A model's blocks, in the order they run.

    What depends on the picture (patch grid, number of prefix tokens, which tokens the head reads) is not guessed from
    attributes but seen during the forward pass; see ``vitreous.tape``.

    Attributes:
        name: the model's class.
        blocks: its blocks.
        batch_first: whether the stream is (batch, token, channel); where it is not, by its names, a run tells.
        scale: what its outputs are, where its configuration says so.
        alike_outside: modules of the blocks' own class that stand elsewhere; one that runs on the same tokens is a
            block that was not found.
    """

    name: str
    blocks: tuple[Block, ...]
    batch_first: bool
    scale: Scale | None = None
    alike_outside: tuple[nn.Module, ...] = ()

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    @property
    def has_attention(self) -> bool:
        """Whether every block has an attention part."""
        return all(block.attention is not None for block in self.blocks)
