"""A rule by itself, with no other rule in the recording."""

import pytest

import vitreous
from small_models import largest_difference, random_images, small_vit

RULES = ["plain", "frozen", "libra", "attnlrp", "conservative", "residual"]


# Input x gradient is refused under the residual rule: no gradient would reach the patches.
@pytest.mark.parametrize("spelling", [f"{method}:rule={rule}" for method in ("gae", "ixg") for rule in RULES][:-1])
def test_a_rule_alone_treats_written_out_attention_as_the_fused_one(spelling):
    """With another rule in the recording, attention may be followed in another way."""
    fused, written_out = small_vit(), small_vit()
    for block in written_out.blocks:
        block.attn.fused_attn = False
    models = (fused, written_out)
    one, other = (vitreous.explain(model, random_images(), spelling, 1).scores[spelling] for model in models)
    # Float64; the two round q kᵀ in another order.
    assert largest_difference(one, other) < 1e-10
