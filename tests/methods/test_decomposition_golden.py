"""GlobEnc and ALTI against numbers that their authors' programs produced on one small trained ViT, in float64.

What is left between the two sides are the last digits of another order of summing: some 1e-15 of values up to 1e5.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from torch import Tensor

import vitreous
from recorded import Recorded, whole_matrix
from small_models import GOLDEN, golden_model
from vitreous.methods.contributions import contributions
from vitreous.speed.timing import one_thread

DEPTH = 4
TOLERANCE = 1e-8


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def authors(key: str) -> np.ndarray:
    """Of the SkipPLUS authors: GlobEnc and ALTI in their setting for ViTs."""
    return np.load(GOLDEN.parent / "globenc_alti_vit_skipplus_authors.npz")[key]


def official(key: str) -> np.ndarray:
    """Of ALTI's own program, for pre-norm blocks."""
    return np.load(GOLDEN.parent / "alti_official_preLN_branch.npz")[key]


LAYER_MATRICES = [
    *[(f"globenc:layer={layer}", authors("globenc_norm2_layers")[layer]) for layer in range(DEPTH)],
    *[(f"alti:layer={layer}", authors("ALTI_layers")[layer]) for layer in range(DEPTH)],
    *[(f"alti:setting=original,layer={k}", official("contrib_layers_resultantnorm")[:, k]) for k in range(DEPTH)],
    *[
        (f"alti:setting=original,zero=farthest,layer={k}", official("contrib_layers_min_sum")[:, k])
        for k in range(DEPTH)
    ],
    *[(f"attin_residual:layer={layer}", official("transformed_norm_l2")[:, layer]) for layer in range(DEPTH)],
]
AGGREGATED = [
    *[
        (f"{name}{spelling}", authors(f"{key}_{aggregation}"))
        for name, key in (("globenc", "globenc_norm2"), ("alti", "ALTI"))
        for spelling, aggregation in (
            ("", "rollout_res0"),
            (".rollout:residual=none", "rollout_res0"),
            (":residual=half", "rollout_res0.5"),
            (".plus", "plus"),
            (".skipplus", "skipplus"),
        )
    ],
    *[(f"alti:setting=original,depth={layer + 1}", official("alti_rollout")[:, layer]) for layer in range(DEPTH)],
    ("alti:setting=original", official("alti_rollout")[:, -1]),
]


@cache
def golden_scores() -> dict[str, Tensor]:
    """All of them in one run."""
    return vitreous.explain(*golden_model(), [spelling for spelling, _ in (*LAYER_MATRICES, *AGGREGATED)]).scores


@pytest.mark.parametrize(("spelling", "expected"), [*LAYER_MATRICES, *AGGREGATED], ids=lambda value: str(value)[:60])
def test_class_tokens_row_is_the_authors(spelling, expected):
    np.testing.assert_allclose(golden_scores()[spelling].numpy(), expected[:, 0, 1:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("at_once", [False, True], ids=["each row alone", "rows together"])
@pytest.mark.parametrize(("spelling", "expected"), LAYER_MATRICES, ids=lambda value: str(value)[:60])
def test_whole_matrix_is_the_authors(spelling, expected, at_once):
    with Recorded(*golden_model(), spelling) as view:
        np.testing.assert_allclose(whole_matrix(view, spelling, at_once=at_once), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", range(DEPTH))
def test_distances_are_the_authors(layer):
    with Recorded(*golden_model(), f"alti:setting=original,layer={layer}") as view:
        parts = contributions(view, layer, biases=True, residual=True)
        distances = parts.distances(slice(None), view.middle(layer), 1e-6)
    np.testing.assert_allclose(-distances, official("neg_l1_dist")[:, layer], rtol=0, atol=TOLERANCE)
