"""How many images one recorded run takes: a large batch is explained in parts, in bounded memory."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from vitreous.architecture import find_architecture

# Tokens of all images of one recorded run: 16 images of 224 x 224 pixels in patches of 16 x 16. Memory grows with the
# images of a run, time per image does not fall any more: see benchmarks/large_batches.py.
TOKENS_AT_ONCE = 16 * 200
_SMALL_PATCH = 8 * 8  # pixels; smaller patches are rare


def batch_parts(network: nn.Module, images: Tensor) -> list[slice]:
    """Divide a batch into parts of nearly equal size, each small enough for one recorded run."""
    count = len(images)
    if count * images[0, 0].numel() <= TOKENS_AT_ONCE * _SMALL_PATCH:
        return [slice(0, count)]
    most = max(1, TOKENS_AT_ONCE // _tokens_of_one(network, images))
    parts = -(-count // most)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def _tokens_of_one(network: nn.Module, images: Tensor) -> int:
    """The most tokens that one image has in any block."""
    return max(stage.tokens for stage in find_architecture(network, images).stages)
