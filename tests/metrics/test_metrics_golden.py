"""Metrics against numbers that the authors' own programs produced, in float64.

Both sides sum the same float64 numbers in another order, so they differ by some 1e-15; 1e-9 is the promise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import interpolate

from vitreous.metrics import perturbation as per
from vitreous.metrics import segmentation as seg
from vitreous.speed.timing import one_thread

FOLDER = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-9


def close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


class TestCheferSegmentation:
    @pytest.fixture
    def golden(self):
        return np.load(FOLDER / "metrics_chefer_segmentation.npz")

    @pytest.fixture
    def maps(self, golden):
        return interpolate(torch.from_numpy(golden["heat"]), scale_factor=16, mode="bilinear").numpy()[:, 0]

    @pytest.fixture
    def expected(self, golden):
        return golden["per_image_correct_labeled_inter0_inter1_union0_union1_ap"]

    def test_counts_of_every_image_are_the_programs(self, golden, maps, expected):
        assert (golden["mask"] == -1).any(), "the golden masks are meant to have ignored pixels"
        counts = seg.count_pixels(seg.above_mean(maps), golden["mask"])
        np.testing.assert_array_equal(counts, expected[:, 2:6])
        np.testing.assert_array_equal(np.stack(seg.correct_and_labelled(counts), axis=-1), expected[:, :2])

    def test_average_precision_of_every_image_is_the_programs(self, golden, maps, expected):
        found = [seg.two_class_average_precision(*pair) for pair in zip(maps, golden["mask"], strict=True)]
        close(found, expected[:, 6])
        close(seg.two_class_map().combine(np.array([np.mean(found)])), golden["mAP"])

    def test_numbers_over_the_data_set_are_the_programs(self, golden, maps):
        means = seg.count_pixels(seg.above_mean(maps), golden["mask"]).mean(axis=0)
        close(seg.pixel_accuracy().combine(means), golden["pixAcc"])
        close(seg.mean_iou().combine(means), golden["mIoU"])
        close(seg.foreground_iou().combine(means), golden["IoU"][1])


class TestCheferPerturbation:
    """The program's own model, rebuilt here, sees images with their top pixels black before normalisation."""

    @pytest.fixture
    def golden(self):
        return np.load(FOLDER / "metrics_chefer_perturbation.npz")

    @pytest.fixture
    def model(self, golden):
        model = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=10)
        model.load_state_dict({key[3:]: torch.from_numpy(golden[key]) for key in golden.files if key[:3] == "sd/"})
        model.double().eval()

        def logits(images: np.ndarray) -> np.ndarray:
            with torch.no_grad(), one_thread():
                return model(2 * (torch.from_numpy(images) - 0.5) / 0.5).numpy()

        return logits

    @pytest.mark.parametrize(("name", "sign"), [("pos", 1), ("neg", -1)])
    def test_hits_and_differences_at_every_step_are_the_programs(self, golden, model, name, sign):
        original = model(golden["data"])
        np.testing.assert_array_equal(per.hits(original, golden["target"]), golden[f"{name}_model_hits"])
        ranked = np.argsort(-sign * golden["vis"].reshape(48, 1, -1), axis=-1)
        curve = []
        for ratio in per.NINE:
            erased = golden["data"].copy().reshape(48, 3, -1)
            np.put_along_axis(erased, ranked[..., : int(1024 * ratio)], 0.0, axis=-1)
            curve.append(model(erased.reshape(golden["data"].shape)))
        logits = np.stack(curve)
        np.testing.assert_array_equal(per.hits(logits, golden["target"]), golden[f"{name}_perturbations_hits"])
        close(per.change_of_highest(original, logits), golden[f"{name}_perturbations_logit_diff"])
        found = per.change_of_highest(per.probabilities(original), per.probabilities(logits))
        close(found, golden[f"{name}_perturbations_prob_diff"])


class TestAopcAndLogOdds:
    @pytest.fixture
    def golden(self):
        return np.load(FOLDER / "metrics_aopc_logodds.npz")

    def test_attcats_program_takes_the_absolute_fall(self, golden):
        found = per.aopc(golden["orig"], golden["degraded"], absolute=True).mean()
        close(found, golden["attcat_aopc"])
        assert abs(found - per.aopc(golden["orig"], golden["degraded"]).mean()) > 0.01

    def test_attcats_log_odds(self, golden):
        close(per.log_odds(golden["orig"], golden["degraded"]).mean(), golden["attcat_logodds"])

    def test_the_skipplus_program_keeps_the_sign_of_the_fall_and_inverts_the_log_odds(self, golden):
        first = golden["degraded"][:, :1]
        close(per.aopc(golden["orig"], first).mean(), golden["pynight_aopc_mean_col0"])
        close(per.log_odds(golden["orig"], first, inverted=True).mean(), golden["pynight_lodds_mean_col0"])


class TestSkipplusCurves:
    """Accuracy and fall of the label's probability while the top patches are put in and while they are dropped."""

    @pytest.fixture
    def golden(self):
        return np.load(FOLDER / "metrics_skipplus_curves.npz")

    @pytest.mark.parametrize("kind", ["topratio", "nratio"])
    def test_both_curves_are_the_programs(self, golden, kind):
        logits = np.stack([golden[f"{kind}_{percent}_logits"] for percent in range(10, 100, 10)])
        close(per.hits(logits, golden["labels"]).mean(axis=1), golden[f"acc_{kind}"])
        before = per.of_class(per.probabilities(golden["logits"]), golden["labels"])
        after = per.of_class(per.probabilities(logits), golden["labels"])
        close(per.drops(before, after.T).mean(axis=0), golden[f"aopc_{kind}"])
