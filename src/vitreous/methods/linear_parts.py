"""The parts of a block that decompositions take as linear maps, and whether a model's are what they are taken for."""

from __future__ import annotations

from torch import Tensor

from vitreous.architecture.norms import LinearNorm
from vitreous.methods.view import View
from vitreous.tape import Needs, Tape
from vitreous.tape.half import exact

# What W_V makes of the difference of two tokens is the difference of their values: to rounding, which in half precision
# is about 1% of the largest value. A wrong part of the weights is off by as much as the values are large.
_ROUNDING = 0.05


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
    return _through_value_weight(view.tape, layer, from_token)


def missing_linear_part(tape: Tape, needs: Needs) -> str | None:
    """What a model lacks of the linear parts that are needed, in words."""
    blocks = tape.architecture.blocks
    for layer in sorted(needs.projections):
        if not _leads_to_stream(tape, layer):
            return (
                f"in block {layer} no linear projection leads from the attention heads to the residual stream, or what "
                "it gives is changed before it is added"
            )
    for layer in sorted(needs.linear_norms):
        recorded = layer in tape.needs.linear_norms
        block = blocks[layer]
        for norm, linear in zip((block.first_norm, block.second_norm), tape.linear_norms(layer), strict=True):
            if norm is not None and linear is None and (recorded or norm.step is None):
                kind = "the norm" if norm.module is None else type(norm.module).__name__
                return f"{kind} in block {layer} is neither LayerNorm nor RMSNorm, so it is not linear"
    for layer in sorted(needs.unbiased_values):
        if blocks[layer].norm_place == "pre" and not _has_linear_values(tape, layer):
            return (
                f"in block {layer} no weights were found that lead from the first norm to the values, "
                "so the biases in them are not known"
            )
    return None


def _leads_to_stream(tape: Tape, layer: int) -> bool:
    """Whether W_O is known; of a run that was recorded for other methods, whether it would be."""
    if layer not in tape.needs.projections:
        return bool(tape.architecture.blocks[layer].output_projections)
    weight = tape.output_projection(layer)
    if weight is None:
        return False
    attention = tape.attention(layer)
    return weight.shape[1] == attention.heads * attention.value.shape[-1]


def _has_linear_values(tape: Tape, layer: int) -> bool:
    """Whether W_V is known, and in the run it does between the first and the last token what it should."""
    if layer not in tape.needs.unbiased_values:
        return bool(tape.architecture.blocks[layer].value_maps)
    weight = tape.value_weight(layer)
    if weight is None:
        return False
    value, normed = exact(tape.attention(layer).value), exact(tape.norm(layer))
    heads, _, width = value.shape[1:]
    if weight.shape[1] != normed.shape[2] or (heads * width) % len(weight) or len(weight) % width:
        return False
    expected = value[:, :, :1] - value[:, :, -1:]
    found = _through_value_weight(tape, layer, normed[:, :1] - normed[:, -1:])
    return bool((found - expected).abs().amax() <= _ROUNDING * value.abs().amax())


def _through_value_weight(tape: Tape, layer: int, tokens: Tensor) -> Tensor:
    """(batch, tokens, channels) -> (batch, head, tokens, head's channels); several heads may share one value."""
    value_weight = tape.value_weight(layer)
    assert value_weight is not None
    heads, _, width = tape.attention(layer).value.shape[1:]
    value = (tokens @ exact(value_weight).T).reshape(*tokens.shape[:2], -1, width).transpose(1, 2)
    return value.repeat_interleave(heads // value.shape[1], dim=1)
