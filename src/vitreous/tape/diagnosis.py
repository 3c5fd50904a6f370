"""What a model lacks that a method needs."""

from __future__ import annotations

from vitreous._utils.torch_state import at_least_float32
from vitreous.tape.recording.linear_maps import through_value_weight
from vitreous.tape.recording.plan import PIXELS, Needs
from vitreous.tape.rules import RULES
from vitreous.tape.tape import Tape

# What W_V makes of the difference of two tokens is the difference of their values: to rounding, which in half precision
# is about 1% of the largest value. A wrong part of the weights is off by as much as the values are large.
_ROUNDING = 0.05


def missing_part(tape: Tape, needs: Needs) -> str | None:
    """Why a method with these needs cannot read this run; ``None`` where it can."""
    if needs.picture and tape.reads_text:
        return "it reads texts, which have no pixels to paint or to scale"
    if needs.plane and len(tape.layout.grid) > 2:
        return "it reads volumes or clips, and the method turns or filters pictures in their plane"
    if needs.reads_blocks_alone and tape.reads_several_blocks:
        return "its head reads several blocks at once, so its output for one block alone is not defined"
    if _starts_below_stage(tape, needs):
        return (
            f"it reads stage {tape.architecture.stage} of its blocks, and between the pixels and that stage its rule "
            "would have to take hold of the blocks of earlier stages, which are not followed"
        )
    return (
        _missing_attention(tape, needs)
        or _unclear_attention(tape, needs)
        or tape.gradient_gap(needs)
        or _missing_norm(tape, needs)
        or tape.relevance_gap(needs)
        or missing_linear_part(tape, needs)
    )


def _starts_below_stage(tape: Tape, needs: Needs) -> bool:
    """Whether a rule has to reach the pixels through blocks of earlier stages."""
    if not any(stage.blocks[0].attention for stage in tape.architecture.stages[: tape.architecture.stage]):
        return False
    passes = ((backward.rule, part.tokens) for backward, part in needs.gradients.items())
    return any(rule != "plain" and PIXELS in layers for rule, layers in passes)


def _missing_attention(tape: Tape, needs: Needs) -> str | None:
    architecture, unseen = tape.architecture, tape.unseen_attention
    if needs.uses_attention and not architecture.has_attention:
        if tape.multiplied_tokens:
            return (
                f"in its block {min(tape.multiplied_tokens)} tokens are multiplied with each other in a way that is no "
                "attention as it is known (q kᵀ, softmax, A v; not a division behind the values), so A is not known"
            )
        without = [layer for layer, block in enumerate(architecture.blocks) if not block.attention]
        some = len(without) < architecture.depth
        return f"no attention was found in its block {without[0]}" if some else "its blocks do not attend"
    if needs.biases and unseen and not architecture.has_attention and not architecture.placements:
        return "its blocks do not attend, and biases may act across tokens and belong to none"
    # A rule other than the plain one has to treat the attention, also where nothing is read from it.
    takes_hold = needs.uses_attention or needs.rules - {"plain"}
    if takes_hold and unseen and architecture.has_attention:
        return (
            f"no attention was seen in its block {min(unseen)}, neither fused nor written as q kᵀ, softmax, A v, "
            "so A is not known"
        )
    if needs.keys & tape.unknown_keys:
        return (
            "its attention matrices are made of more than q and k (relative positions or gates that depend on the "
            "tokens, perhaps), so that q and k by themselves say only a part"
        )
    return None


def _unclear_attention(tape: Tape, needs: Needs) -> str | None:
    """What blocks have besides one attention."""
    other, unknown, unfollowed = tape.other_attention, tape.unknown_products, tape.unfollowed_attention
    whole = sorted(name for name in needs.rules if RULES[name].follows_scores and not RULES[name].treats_steps)
    if whole and unfollowed:
        return (
            f"attention in its block {min(unfollowed)} is more than softmax(scale q kᵀ + bias) v (heads are mixed, "
            f"scores are left out or changed, or something else is in the place of the softmax), for which the rule "
            f"{', '.join(whole)} says nothing"
        )
    if needs.uses_attention and other is not None:
        return other
    if needs.rules - {"plain"} and unknown:
        return (
            f"in its block {min(unknown)} tokens are multiplied with each other, or weighed by a softmax, in a way "
            "that is no attention as it is known, so that a rule does not know what to hold constant"
        )
    return None


def _missing_norm(tape: Tape, needs: Needs) -> str | None:
    if _norms_get_no_gradient(tape, needs):
        return (
            "the norms of its blocks stand behind their attention, and behind the last one only the class token gets a "
            "gradient (convention=skipplus reads the tokens in front of it)"
        )
    for layer in needs.norms:
        if layer in tape.unseen_norms:
            return f"the first norm of block {layer} was not found, or it does not see the tokens as they are"
    blocks = tape.architecture.blocks
    for layer in frozenset[int]().union(*(part.norms for part in needs.gradients.values())):
        norm = blocks[layer].first_norm
        if norm is not None and not norm.alone:
            return (
                f"attention in block {layer} normalises its tokens more than once, so that no norm's output is all "
                "that it reads (convention=skipplus reads the tokens in front of it)"
            )
    for layer in needs.linear_norms:
        if blocks[layer].first_norm is None or blocks[layer].second_norm is None:
            return (
                f"the norm between attention and feed-forward part of block {layer} was not found, or it is neither "
                "LayerNorm nor RMSNorm"
            )
    for layer in needs.residual:
        if blocks[layer].one_sum:
            return f"block {layer} adds attention and feed-forward part at once, so there is no stream between them"
    return None


def _norms_get_no_gradient(tape: Tape, needs: Needs) -> bool:
    """Whether gradients are wanted after the last attention, where no patch reaches the output any more."""
    last = tape.depth - 1
    wanted = any(last in part.norms for part in needs.gradients.values())
    return wanted and tape.layout.reads_prefix_only and tape.architecture.blocks[last].norm_place == "post"


def missing_linear_part(tape: Tape, needs: Needs) -> str | None:
    """What a model lacks of the linear maps that are needed."""
    blocks = tape.architecture.blocks
    for layer in sorted(needs.projections):
        if not _leads_to_stream(tape, layer):
            reason = blocks[layer].path_gap or "their channels are weighed token by token between two projections"
            return f"in block {layer} no linear map leads from the attention heads to the residual stream: {reason}"
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
        return bool(tape.architecture.blocks[layer].head_paths)
    projection = tape.head_projection(layer)
    if projection is None:
        return False
    attention = tape.attention(layer)
    return projection.weight.shape[1] == attention.heads * attention.value.shape[-1]


def _has_linear_values(tape: Tape, layer: int) -> bool:
    """Whether W_V is known, and in the run it does between the first and the last token what it should."""
    if layer not in tape.needs.unbiased_values:
        return bool(tape.architecture.blocks[layer].value_maps)
    weight = tape.value_weight(layer)
    if weight is None:
        return False
    value, normed = at_least_float32(tape.attention(layer).value), at_least_float32(tape.norm(layer))
    heads, _, width = value.shape[1:]
    if weight.shape[1] != normed.shape[2] or (heads * width) % len(weight) or len(weight) % width:
        return False
    expected = value[:, :, :1] - value[:, :, -1:]
    found = through_value_weight(tape, layer, normed[:, :1] - normed[:, -1:])
    return bool((found - expected).abs().amax() <= _ROUNDING * value.abs().amax())
