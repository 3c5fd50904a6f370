"""Whether a model that lays all heads of a batch in one row, (batch x head, token, channel), lays images first.

Shapes do not tell: some put the first head of all images before the second. The same picture twice does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.anatomy import Anatomy
from vitreous.errors import UnsupportedModelError
from vitreous.tape import interception as heard
from vitreous.tape.first_block import SeenEnough, run_until_seen
from vitreous.tape.inputs import Inputs
from vitreous.tape.interception import Handler

_ROUNDING = 1e-3  # of the largest number: equal rows of one product may be summed in another order


class _FirstAttention:
    """Sees what the first attention with all heads in one row is given, and ends the run."""

    heads: Tensor | None = None
    _inside = False

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Attention in front of the blocks does not count."""
        del module, arguments
        self._inside = True
        return None

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Nothing to do."""
        del module, output

    def on_attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queries of a fused call, or scores on their way to a softmax."""
        if not self._inside or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            return func(*args, **kwargs)
        self.heads = args[0]
        raise SeenEnough


def check_head_order(anatomy: Anatomy, model: nn.Module, inputs: Inputs) -> None:
    """Refuse a model that lays heads before images; costs what leads to its first attention, of two images.

    Raises:
        UnsupportedModelError: it does.
    """
    first = _FirstAttention()
    handlers: dict[Callable[..., Any], Handler] = dict.fromkeys((*heard.ATTENTION, *heard.SOFTMAX), first.on_attention)
    twice = inputs[torch.zeros(2, dtype=torch.int64, device=inputs.device)]
    run_until_seen(first, handlers, anatomy, model, twice)
    if first.heads is not None:
        one, other = first.heads.chunk(2)
        if bool((one - other).abs().amax() <= _ROUNDING * one.abs().amax()):
            return
    raise UnsupportedModelError(
        f"{anatomy.name} lays the heads of its attention in one row with the images of a batch, not image by image, "
        "so that no head is known to be an image's; give one image at a time"
    )
