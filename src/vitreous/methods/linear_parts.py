"""The parts of a block that decompositions take as linear maps."""

from __future__ import annotations

from torch import Tensor

from vitreous.architecture.norms import LinearNorm
from vitreous.methods.view import View
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
