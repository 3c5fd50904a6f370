"""Relevance propagation: the authors' numbers, literal transcriptions, conservation, and what is refused.

Tolerances. ``GOLDEN_TOLERANCE`` is absolute on values of order 0.01 to 1. Full LRP with the "orig" rules reaches 3e4
by dividing by numbers near 0, which magnifies rounding, so it is held to 1e-6 of each image's largest value.
Transcriptions do the same arithmetic in another order and are held to ``EXACT`` of the largest score.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import vitreous
from literal import abslrp as literal_abslrp
from literal import relevance as literal
from small_models import GOLDEN, golden_model, largest_difference, small_case
from vitreous.architecture import find_architecture
from vitreous.speed.timing import one_thread
from vitreous.tape import PIXELS, GradientNeeds, Needs, Pass, Plan, record

GOLDEN_TOLERANCE = 1e-8
EXACT = 1e-9
ALL = ["transattr", "plrp", "lrp_rollout", "lrp", "lrp:rules=ours", "abslrp", "abslrp:shortcut=share"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def stored(name: str):
    return np.load(GOLDEN.parent / f"{name}.npz")


@cache
def golden_targets() -> torch.Tensor:
    return torch.stack([torch.tensor(stored("model")[name]) for name in ("pred", "cls2")], dim=1)


def golden_scores(spelling: str) -> np.ndarray:
    """(class, image, map), as the goldens are."""
    model, images = golden_model()
    return vitreous.explain(model, images, spelling, golden_targets()).scores[spelling].transpose(0, 1).numpy()


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("transattr", "transformer_attribution_start0"),
        ("transattr:start=1", "transformer_attribution_start1"),
        ("lrp_rollout", "lrp_rollout_ours_start0"),
        ("lrp_rollout:start=1", "lrp_rollout_ours_start1"),
        ("plrp", "partial_lrp_orig"),
        ("plrp:rules=ours", "partial_lrp_ours"),
        ("plrp:weighed=gradient", "partial_lrp_orig_ablation_grad"),
        ("lrp:rules=ours,resolution=pixel", "full_lrp_ours_pixels"),
    ],
)
def test_chefer_2021(spelling, key):
    expected = stored("chefer21")[key].reshape(2, 3, -1)
    np.testing.assert_allclose(golden_scores(spelling), expected, rtol=0, atol=GOLDEN_TOLERANCE)


def test_full_lrp_with_the_original_rules():
    expected = stored("chefer21")["full_lrp_orig_pixels"].reshape(2, 3, -1)
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(golden_scores("lrp:resolution=pixel") - expected) < 1e-6 * largest).all()


@pytest.mark.parametrize("rules", ["orig", "ours"])
def test_patches_are_sums_of_their_pixels(rules):
    pixels = golden_scores(f"lrp:rules={rules},resolution=pixel").reshape(2, 3, 4, 8, 4, 8)
    patches = golden_scores(f"lrp:rules={rules}")
    np.testing.assert_allclose(patches, pixels.sum(axis=(3, 5)).reshape(2, 3, 16), rtol=1e-12)


def test_abslrp_of_its_authors_channel_by_channel():
    """Also divided by each image's largest value, as the authors publish it."""
    model, images = golden_model()
    passes = [Pass("abslrp", "logit"), Pass("abslrp", "others")]
    needs = Needs(gradients=dict.fromkeys(passes, GradientNeeds(tokens=frozenset({PIXELS}))))
    for number, target in enumerate(golden_targets().unbind(dim=1)):
        with record(model, find_architecture(model, images), images, Plan(4, needs)) as tape:
            positive, negative = (tape.backward(each, target, needs.gradients[each]).tokens[PIXELS] for each in passes)
        found = (positive - negative).numpy()
        expected = stored("abslrp")["abslrp_pixels_raw"][number]
        assert np.abs(found - expected).max() < GOLDEN_TOLERANCE * np.abs(expected).max()
        largest = np.abs(found).max(axis=(1, 2, 3), keepdims=True) + 1e-9
        scaled = stored("abslrp")["abslrp_pixels_maxnorm"][number]
        np.testing.assert_allclose(found / largest, scaled, rtol=0, atol=GOLDEN_TOLERANCE)


def test_abslrp_map_is_the_sum_over_channels():
    expected = stored("abslrp")["abslrp_pixels_raw"].sum(axis=2).reshape(2, 3, -1)
    difference = np.abs(golden_scores("abslrp:resolution=pixel") - expected)
    assert difference.max() < GOLDEN_TOLERANCE * np.abs(expected).max()


# Literal transcriptions ----------------------------------------------------------------------------------------------

MODELS = {
    "LayerScale": {"depth": 3, "seed": 1},
    "registers with positions": {"depth": 2, "seed": 2, "reg_tokens": 2, "init_values": None},
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def case(request):
    return small_case(**MODELS[request.param])


@pytest.mark.parametrize(
    ("spelling", "transcription"),
    [
        ("transattr", literal.transattr),
        ("transattr:start=1", lambda *given: literal.transattr(*given, start=1)),
        ("plrp", literal.plrp),
        ("plrp:rules=ours", lambda *given: literal.plrp(*given, ours=True)),
        ("lrp:rules=ours,resolution=pixel", lambda *given: literal.lrp(*given, ours=True)),
        ("abslrp:resolution=pixel", literal_abslrp.abslrp),
        ("abslrp:shortcut=share,resolution=pixel", lambda *given: literal_abslrp.abslrp(*given, program=False)),
    ],
)
def test_agrees_with_a_literal_transcription(case, spelling, transcription):
    model, images = case
    found = vitreous.explain(model, images, spelling, [[0, 3], [0, 3]]).scores[spelling]
    expected = torch.stack(
        [torch.stack([transcription(model, image, target) for target in (0, 3)]) for image in images]
    )
    assert largest_difference(found, expected) < EXACT


def test_lrp_with_the_original_rules_agrees_with_a_literal_transcription(case):
    """1e-6: it explodes, see above."""
    model, images = case
    spelling = "lrp:resolution=pixel"
    found = vitreous.explain(model, images, spelling, 3).scores[spelling]
    for one, image in zip(found, images, strict=True):
        assert largest_difference(one, literal.lrp(model, image, 3)) < 1e-6
