"""What a run may do differently from the model's own forward pass. The model itself is never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Intervention:
    """A stream put in the place of another, or attention scaled.

    Attributes:
        layer: the block whose input x_l is replaced; L stands for the input of what is behind the last block.
        stream: what replaces it, (batch, tokens, channels). Its batch may be another than that of the images, of which
            one is then enough: blocks, pooling and head work on any batch size.
        attention_scale: by block, factors (batch,) on its attention matrix. Such a matrix is a constant: the gradient
            passes on through the values alone, under every rule.
    """

    layer: int = 0
    stream: Tensor | None = None
    attention_scale: Mapping[int, Tensor] = field(default_factory=dict)

    def replacement(self, layer: int) -> Tensor | None:
        """What stands in for x_l, if anything does."""
        return self.stream if layer == self.layer else None
