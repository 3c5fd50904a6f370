"""Agreement with numbers that the authors' own programs produced, in float64; ``golden_numbers`` says how near."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitreous
from golden_numbers import DEPTH, PATCHES, TOLERANCE, assert_agrees, family, golden, model_images_targets, ours


def test_predicted_class_is_the_authors():
    model, images, targets = model_images_targets()
    explanation = vitreous.explain(model, images, "rollout")
    assert torch.equal(explanation.target, targets[:, 0])
    assert explanation.grid == (4, 4)


def test_gae():
    assert_agrees("gae", golden("gae")["gae"])


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("rollout", "rollout_start0"),
        ("rollout:start=1", "rollout_start1"),
        ("raw_attention", "raw_attention_last"),
    ],
)
def test_attention_of_chefer_2021(spelling, key):
    assert_agrees(spelling, golden("chefer21")[key])


def test_attcam_scaled_as_the_authors_do_and_zero_where_they_have_nan():
    expected = golden("chefer21")["gradcam_attn"]
    scores = ours("attcam")
    low, high = scores.min(-1, keepdims=True), scores.max(-1, keepdims=True)
    scaled = np.divide(scores - low, high - low, out=np.zeros_like(scores), where=high > low)
    np.testing.assert_allclose(scaled, np.nan_to_num(expected), rtol=0, atol=TOLERANCE)
    assert np.isfinite(scores).all()


def decompx(key: str) -> np.ndarray:
    stored, (_, _, targets) = golden("decompx_vit_skipplus_authors")[key], model_images_targets()
    return np.stack([[stored[image, PATCHES, targets[image, k]] for image in range(3)] for k in range(2)])


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("decompx", "decompx_vector"),
        *[(f"decompx:layer={layer}", f"decompx_vector_f{layer}") for layer in range(DEPTH)],
        ("decompx.plus", "plus"),
        ("decompx.skipplus", "skipplus"),
        ("decompx.skipplus:half=floor", "skipplus"),
    ],
)
def test_decompx_of_the_skipplus_authors(spelling, key):
    assert_agrees(spelling, decompx(key))


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("ixg", "CAT_s:sum_layers"),
        ("cat", "CAT_s:sum_layers"),
        ("gradient", "PatchGrad_s:L2_layers"),
        ("decompx", "IxG_LX1_layers"),
        ("ixg:rule=frozen", "IxG_LX1_layers"),
    ],
)
def test_token_scores_of_every_layer(method, key, layer):
    spelling = f"{method}{',' if ':' in method else ':'}layer={layer}"
    assert_agrees(spelling, family(key)[:, layer, :, PATCHES])


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize(
    ("method", "key"),
    [("raw_attention", "MeanAttn_layers"), ("gae", "MeanReLU__AttnGrad_Attn_layers")],
)
def test_class_token_row_of_every_layers_matrix(method, key, layer):
    assert_agrees(f"{method}:layer={layer}", family(key)[:, layer, :, 0, PATCHES])


@pytest.mark.parametrize("layer", range(DEPTH - 1))
def test_attixg_of_every_layer_as_the_skipplus_authors_pair_it(layer):
    assert_agrees(f"attixg:pairing=next,layer={layer}", family("CAT_s:sum_AttnFrom_layers")[:, layer, :, PATCHES])


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("ixg.plus", "IxG_plus"),
        ("cat", "IxG_plus"),
        ("ixg.skipplus", "IxG_skipplus"),
        ("attixg.plus:pairing=next", "AttIxG_plus"),
        ("attcat:pairing=next", "AttIxG_plus"),
        ("attixg.skipplus:pairing=next", "AttIxG_skipplus"),
    ],
)
def test_token_scores_aggregated(spelling, key):
    assert_agrees(spelling, family(key)[..., PATCHES])


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("raw_attention.rollout:residual=none", "MeanAttn_rollout_res0"),
        ("rollout", "MeanAttn_rollout_res0.5"),
        ("gae:residual=none", "MeanReLU__AttnGrad_Attn_rollout_res0"),
        ("gae:residual=half", "MeanReLU__AttnGrad_Attn_rollout_res0.5"),
        ("gradsam", "GradSAM_sum"),
        ("gae.plus", "GradSAM_sum"),
        ("tokentm:variant=third_party", "TokenTM_full"),
    ],
)
def test_matrices_aggregated(spelling, key):
    assert_agrees(spelling, family(key)[..., 0, PATCHES])


@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_third_party_tokentm_up_to_every_depth(depth):
    """The product of the stored layer matrices, applied to the lengths of the input tokens."""
    model, images, _ = model_images_targets()
    stored = family("TokenTM_layers")
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(images)).norm(dim=-1).numpy()
    product = stored[:, 0]
    for layer in range(1, depth):
        product = stored[:, layer] @ product
    expected = (product * tokens[None, :, None])[..., 0, PATCHES]
    assert_agrees(f"tokentm:variant=third_party,depth={depth}", expected)


def test_attcat_of_its_authors():
    assert_agrees("attcat", golden("attcat_official_function")["attcat_all_tokens_incl_cls"][..., PATCHES])
