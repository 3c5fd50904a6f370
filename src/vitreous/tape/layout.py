"""How the tokens of one run are laid out: patch grid, prefix tokens, and which tokens the head reads.

Seen in the run itself rather than looked up in attributes, so it holds for any picture size and any model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitreous.errors import UnsupportedModelError
from vitreous.tape.inputs import Inputs, Texts

if TYPE_CHECKING:
    from vitreous.tape.recorder import Recorder

_NOTHING = 1e-6  # a token whose head gradient is below this part of the largest is not read


@dataclass(frozen=True)
class Layout:
    """The token layout of one run.

    Attributes:
        grid: (rows, columns) of patches; the tokens of a text behind its class token are one row of them.
        prefix: how many tokens (class, distillation, registers) come before the patches.
        read: the tokens that the head reads, each with equal weight: the class token, or all pooled tokens.
        pooling_queries: where attention behind the last block pools the tokens, those of its queries that the head
            reads; ``None`` elsewhere.
    """

    grid: tuple[int, int]
    prefix: int
    read: Tensor
    pooling_queries: Tensor | None = None

    @property
    def pooled_by_attention(self) -> bool:
        """Whether a learned query attends to the tokens behind the last block."""
        return self.pooling_queries is not None

    @property
    def patches(self) -> int:
        """How many patches the picture has."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return self.prefix + self.patches

    def cut(self, tokens: int) -> Layout:
        """The layout of the first ``tokens`` tokens of a text, without the padding behind them."""
        return replace(self, grid=(1, tokens - self.prefix), read=self.read[self.read < tokens])


def find_layout(recorder: Recorder, head_gradient: Tensor, pooling_gradient: Tensor | None, inputs: Inputs) -> Layout:
    """Work out the layout from what was recorded."""
    tokens = head_gradient.shape[1]
    grid = (1, tokens - 1) if isinstance(inputs, Texts) else _patch_grid(recorder, tokens, inputs.shape[-2:])
    prefix = tokens - grid[0] * grid[1]
    read = _tokens_read(head_gradient, prefix)
    if pooling_gradient is None:
        _check_order(recorder.anatomy.name, read, prefix, tokens)
        return Layout(grid, prefix, read)
    pooled = recorder.attention.records[recorder.anatomy.depth].key.shape[2]
    if pooled not in (tokens, tokens - prefix):
        raise UnsupportedModelError(
            f"{recorder.anatomy.name}: attention behind the last block pools {pooled} tokens where there are {tokens}, "
            f"{prefix} of them before the patches: it is not known which ones they are"
        )
    return Layout(grid, prefix, read, _queries_read(pooling_gradient))


def _patch_grid(recorder: Recorder, tokens: int, image_size: torch.Size) -> tuple[int, int]:
    """The patch embedding's own output if it was a convolution, else the finest grid of square patches that fits."""
    convolved = recorder.grid
    if convolved is not None and convolved[0] * convolved[1] <= tokens:
        return convolved
    height, width = image_size
    for patch in range(1, min(height, width) + 1):
        if height % patch == 0 and width % patch == 0 and (height // patch) * (width // patch) <= tokens:
            return height // patch, width // patch
    raise UnsupportedModelError(
        f"{recorder.anatomy.name}: {tokens} tokens do not fit a grid of patches over a picture of "
        f"{height} x {width} pixels"
    )


def _tokens_read(head_gradient: Tensor, prefix: int) -> Tensor:
    """The tokens in which the head's gradient lands.

    A head that reads the class token and, besides, the average of the patches (DINOv2's linear classifier) counts as
    reading the class token: each single patch weighs far less there. An average over all tokens weighs them alike.
    """
    size = head_gradient.double().norm(dim=-1).amax(dim=0)
    if not size.any():  # a head of zeros, as torchvision initialises it
        return torch.arange(1 if prefix else len(size), device=size.device)
    read = size > _NOTHING * size.max()
    in_prefix = read[:prefix]
    patches = size[prefix:]
    if in_prefix.any() and (not read[prefix:].any() or size[:prefix].max() > 2 * patches.mean()):
        read = torch.cat([in_prefix, torch.zeros_like(read[prefix:])])
    (indices,) = torch.where(read)
    return indices


def _check_order(name: str, read: Tensor, prefix: int, tokens: int) -> None:
    """A head that reads one or a few of the later tokens reads no average of patches: its class token stands behind."""
    if prefix and bool((read >= prefix).all()) and len(read) <= prefix and len(read) < tokens - prefix:
        raise UnsupportedModelError(
            f"the head of {name} reads token {int(read[0])} of {tokens}, counted from 0: a class token that stands "
            "behind the patches, or a decoder that reads the last word, is not supported, so no map can be laid out"
        )


def _queries_read(pooling_gradient: Tensor) -> Tensor:
    """The queries of a pooling attention in which the head's gradient lands; (batch, head, query, channel)."""
    size = pooling_gradient.double().norm(dim=-1).amax(dim=(0, 1))
    (indices,) = torch.where((size > _NOTHING * size.max()) | (size.max() == 0))
    return indices
