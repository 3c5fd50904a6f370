"""GradToken's segmentation: thresholds that are searched or held out, and several classes in one photo."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from small_data import as_tensor, finite, loaded, samples
from small_models import CLASSES, small_vit
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.evaluation.tasks.segmentation import ClassSegmentation, ThresholdSearch
from vitreous.evaluation.tasks.task import Batch, Case, MissingAnnotationError, Picture
from vitreous.metrics.segmentation import half_of
from vitreous.tape.runner import ModelRunner


def value(metric, rows) -> float:
    """A metric over rows."""
    return float(metric.combine(np.array([[row[column] for column in metric.columns] for row in rows]).mean(axis=0)))


def batch_of(pictures: list[Picture], maps: list[dict[int, np.ndarray]]) -> tuple[Batch, list[Case]]:
    cases = [Case(number, "given") for number in range(len(pictures))]
    runner = ModelRunner(torch.nn.Identity(), torch.zeros(len(pictures), 3, 32, 32))
    tensors = [{known: as_tensor(map_) for known, map_ in each.items()} for each in maps]
    logits = torch.zeros(len(pictures), pictures[0].classes)
    return Batch(None, runner, tuple(pictures), logits, dict(zip(cases, tensors, strict=True))), cases


class TestThresholds:
    """Maps whose foreground is right at one threshold only: 0.35 is background, 0.45 foreground."""

    @pytest.fixture
    def rows(self):
        random = np.random.default_rng(0)
        pictures, maps = [], []
        for number in range(8):
            mask = (random.random((32, 32)) < 0.4).astype(np.int16)
            map_ = np.where(mask > 0, 0.45, 0.35)
            map_[0, 0], map_[0, 1] = 0.0, 1.0
            mask[0, :2] = -1
            pictures.append(Picture(f"photo-{number}", 0, 5, mask=mask))
            maps.append({0: map_})
        assert {half_of(picture.name) for picture in pictures} == {0, 1}
        return ThresholdSearch().measure(*batch_of(pictures, maps))

    def test_the_best_and_the_held_out_threshold_are_perfect(self, rows):
        for metric in ThresholdSearch().metrics:
            if "threshold" in metric.name:
                assert value(metric, rows) == 1.0

    def test_other_thresholds_are_not(self, rows):
        task = ThresholdSearch(thresholds=(0.1, 0.3))
        best = next(metric for metric in task.metrics if metric.name == "mIoU (best threshold)")
        assert value(best, rows) < 0.5

    def test_a_photo_counts_in_its_half_only(self, rows):
        for number, row in enumerate(rows):
            own = ("first_half_", "second_half_")[half_of(f"photo-{number}")]
            assert all(not row[name] for name in row if "half" in name and not name.startswith(own))
            assert any(row[name] for name in row if name.startswith(own))


def test_the_held_out_threshold_is_not_chosen_on_the_photos_it_serves():
    """Photos of one half want 0.4, those of the other 0.8: both do badly with the other half's threshold."""
    pictures, maps = [], []
    for number in range(8):
        half = half_of(f"photo-{number}")
        low, high = ((0.35, 0.45), (0.75, 0.85))[half]
        mask = np.zeros((32, 32), np.int16)
        mask[:16] = 1
        map_ = np.where(mask > 0, high, low)
        map_[0, 0], map_[0, 1] = 0.0, 1.0
        mask[0, :2] = -1
        pictures.append(Picture(f"photo-{number}", 0, 5, mask=mask))
        maps.append({0: map_})
    rows = ThresholdSearch().measure(*batch_of(pictures, maps))
    found = {metric.name: value(metric, rows) for metric in ThresholdSearch().metrics}
    assert found["mIoU (best threshold)"] > 0.5
    # Everything is taken for foreground in one half, for background in the other; half of the pixels are right.
    assert found["mIoU (held-out threshold)"] == pytest.approx(0.25, abs=0.01)
    assert found["pixel accuracy (held-out threshold)"] == pytest.approx(0.5, abs=0.01)


class TestClasses:
    def picture(self, **changes) -> Picture:
        mask = np.zeros((32, 32), np.int16)
        mask[:8], mask[8:16], mask[16] = 1, 2, -1
        return replace(Picture("photo", 0, 4, mask=mask, objects=(2, 0)), **changes)

    def maps(self, shift: int = 0) -> dict[int, np.ndarray]:
        """Class 2 in the upper quarter, class 0 below it, and a little of class 2 everywhere."""
        upper, lower = np.full((32, 32), 0.3), np.zeros((32, 32))
        upper[:8], lower[8:16] = 1.0, 1.0
        upper[31, 31] = 0.0
        return {2 + shift: upper, 0 + shift: lower}

    @pytest.mark.parametrize(("outputs", "shift"), [(4, 0), (5, 1)])
    def test_the_highest_map_above_the_threshold_is_the_class(self, outputs, shift):
        task = ClassSegmentation(classes=5)
        picture = self.picture(classes=outputs)
        assert task.targets(picture) == (0 + shift, 2 + shift)
        rows = task.measure(*batch_of([picture], [self.maps(shift)]))
        by_name = {metric.name: metric for metric in task.metrics}
        assert value(by_name["pixel accuracy (best threshold)"], rows) == 1.0
        assert value(by_name["mIoU (best threshold)"], rows) == 1.0
        own = ("first_half_", "second_half_")[half_of("photo")]
        # At 0.1 the background is taken for class 2 but for one pixel; one row does not count.
        assert rows[0][f"{own}threshold_10_labelled"] == 31 * 32
        assert rows[0][f"{own}threshold_10_union_3"] == 8 * 32 + 15 * 32 - 1
        assert rows[0][f"{own}threshold_10_intersection_0"] == 1

    def test_a_model_with_other_outputs_is_refused(self):
        with pytest.raises(MissingAnnotationError, match="the model has 1000 outputs; 20 or 21 are needed"):
            ClassSegmentation().targets(self.picture(classes=1000))

    def test_a_mask_without_known_classes_is_refused(self):
        with pytest.raises(MissingAnnotationError, match="no object whose class is known"):
            ClassSegmentation(classes=5).targets(self.picture(objects=(None, None)))


@pytest.mark.parametrize("outputs", [20, 21])
def test_a_run_of_voc_from_photos_to_rows(outputs):
    protocol = find_protocol("gradtoken-voc")
    rows = measure(loaded(small_vit(num_classes=outputs)), samples(3, classes=20), protocol, ["gradtoken", "gae"])
    assert len(rows) == 6
    assert all(finite(row, columns_of(protocol)) for row in rows)


def test_a_run_with_searched_thresholds_from_photos_to_rows():
    protocol = find_protocol("gradtoken-segmentation")
    rows = measure(loaded(), samples(3, classes=CLASSES), protocol, ["gradtoken", "gae"])
    assert all(finite(row, columns_of(protocol)) for row in rows)
