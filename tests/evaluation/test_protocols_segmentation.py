"""Segmentation and localisation: the golden numbers of Chefer's program, maps with known scores, and whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from small_data import arrays_in, as_tensor, finite, loaded, samples
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.evaluation.tasks.segmentation import AveragePrecision, Localisation, Segmentation
from vitreous.evaluation.tasks.task import Batch, Case, Picture, enlarged
from vitreous.tape.runner import ModelRunner

GOLDEN = Path(__file__).parents[1] / "golden"


def batch_of(maps: torch.Tensor, masks: np.ndarray, **known) -> tuple[Batch, list[Case]]:
    """Photos of which nothing is known but maps and masks; the model is not asked."""
    size = masks.shape[-1]
    pictures = tuple(Picture(f"{number}", 0, 1000, mask=mask, **known) for number, mask in enumerate(masks))
    cases = [Case(number, "given") for number in range(len(maps))]
    runner = ModelRunner(torch.nn.Identity(), torch.zeros(len(maps), 3, size, size))
    every_class = [dict.fromkeys(range(10), map_) for map_ in maps]
    return Batch(
        None, runner, pictures, torch.zeros(len(maps), 1000), dict(zip(cases, every_class, strict=True))
    ), cases


class TestGolden:
    """Numbers of Chefer's program for heat maps of 14 x 14 patches and masks of 224 x 224 pixels."""

    @pytest.fixture
    def found(self):
        golden = arrays_in(GOLDEN / "metrics_chefer_segmentation.npz")
        batch, cases = batch_of(as_tensor(golden["heat"][:, 0]), golden["mask"].astype(np.int16))
        task = find_protocol("chefer-2021-segmentation").tasks[0]
        return golden, task.metrics, task.measure(batch, cases)

    def test_every_image(self, found):
        golden, _, rows = found
        expected = golden["per_image_correct_labeled_inter0_inter1_union0_union1_ap"]
        for row, (correct, labelled, *rest, precision) in zip(rows, expected, strict=True):
            counts = [
                row[f"{kind}_{part}"] for kind in ("intersection", "union") for part in ("background", "foreground")
            ]
            assert counts == rest
            assert (counts[0] + counts[1], counts[0] + counts[3]) == (correct, labelled)
            # Average precision over 100,352 values, summed in another order.
            assert row["two_class_average_precision"] == pytest.approx(precision, abs=1e-9)

    def test_the_data_set(self, found):
        golden, metrics, rows = found
        for metric, name in zip(metrics, ("pixAcc", "mAP", "mIoU"), strict=True):
            means = np.array([[row[column] for column in metric.columns] for row in rows]).mean(axis=0)
            assert float(metric.combine(means)) == pytest.approx(float(golden[name]), abs=1e-9)


@pytest.mark.parametrize(
    ("grid", "size"), [((4, 4), (32, 32)), ((14, 14), (224, 224)), ((3, 5), (17, 20)), ((1, 2), (4, 4))]
)
def test_maps_are_enlarged_as_torch_does_but_equal_neighbours_stay_equal(grid, size):
    maps = torch.rand(2, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(maps[:, None], size=size, mode="bilinear")[:, 0]
    torch.testing.assert_close(enlarged(maps, size, "bilinear"), expected, rtol=0, atol=1e-14)  # float64, scale 1
    even = enlarged(torch.full((1, *grid), 0.1, dtype=torch.float32), size, "bilinear")
    assert (even == even[0, 0, 0]).all()


def test_nearest_repeats_every_patch():
    maps = torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = maps.repeat_interleave(5, dim=1).repeat_interleave(2, dim=2)
    assert torch.equal(enlarged(maps, (15, 8), "nearest"), expected)


def test_localisation_of_a_known_map():
    """The object is the upper row of 4 x 4 pixels; the four highest pixels are 5 and 1 on it, 3 and 2 beside it."""
    mask = np.zeros((2, 4, 4), np.int16)
    mask[:, 0] = 1
    map_ = np.array([[5.0, 1.0, -1.0, -2.0], [3.0, 2.0, 0.0, 0.0], [0.0] * 4, [-9.0] * 4])
    batch, cases = batch_of(as_tensor(np.stack([map_, map_[[1, 0, 2, 3]]])), mask)
    on, beside = Localisation().measure(batch, cases)
    assert on == {"pointing_game": 1.0, "energy_in_mask": pytest.approx(6 / 11), "rank_accuracy": 0.5}
    # The first two rows swapped: 3 and 2 are on the object, the maximum is not.
    assert beside == {"pointing_game": 0.0, "energy_in_mask": pytest.approx(5 / 11), "rank_accuracy": 0.5}


def test_a_perfect_map_has_the_best_scores():
    mask = np.zeros((1, 32, 32), np.int16)
    mask[0, 8:24, 8:16] = 1
    batch, cases = batch_of(as_tensor((mask > 0).astype(np.float64)), mask)
    (row,) = Segmentation().measure(batch, cases)
    for metric in Segmentation().metrics:
        assert float(metric.combine(np.array([row[column] for column in metric.columns]))) == 1.0
    (row,) = AveragePrecision("predicted").measure(batch, cases)
    assert row["average_precision"] == 1.0


def test_pixels_that_do_not_count_change_nothing():
    mask = np.zeros((2, 32, 32), np.int16)
    mask[:, 8:24, 8:16] = 1
    mask[:, :4] = -1
    maps = np.random.default_rng(0).random((2, 32, 32))
    maps[1] = maps[0]
    maps[1, 0, :8] = maps[0, 0, :8][::-1]  # the same values at other places that do not count
    batch, cases = batch_of(as_tensor(maps), mask)
    first, second = Segmentation().measure(batch, cases)
    assert first == second


def test_the_largest_class_is_explained_and_its_objects_are_the_foreground():
    mask = np.zeros((1, 32, 32), np.int16)
    mask[0, :8], mask[0, 8:14], mask[0, 14:24] = 1, 2, 3  # classes 5 and 7: 5 has 8 + 6 rows, 7 has 10
    maps = as_tensor((np.isin(mask, [1, 2])).astype(np.float64))
    batch, cases = batch_of(maps, mask, objects=(5, 5, 7))
    assert AveragePrecision().targets(batch.pictures[0]) == (5,)
    (row,) = AveragePrecision().measure(batch, cases)
    assert row["average_precision"] == 1.0


def test_a_run_from_photos_to_rows():
    protocol = find_protocol("chefer-2021-segmentation")
    rows = measure(loaded(), samples(3), protocol, ["gae", "ixg"])
    assert [(row["image"], row["method"]) for row in rows] == [
        (f"photo-{number}", method) for number in range(3) for method in ("gae", "ixg")
    ]
    assert all(finite(row, columns_of(protocol)) for row in rows)
    assert all(list(row) == ["image", "method", "error", *columns_of(protocol)] for row in rows)
