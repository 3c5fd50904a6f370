"""Segmentation metrics: closed forms, ignored pixels, degenerate maps, and what must not change a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitreous.metrics import MetricError, localisation
from vitreous.metrics import segmentation as seg

SHAPE = (5, 6)
# A few levels make ties, which is where programs for average precision differ.
MAPS = arrays(np.float64, SHAPE, elements=st.integers(0, 6).map(float))
MASKS = arrays(np.int16, SHAPE, elements=st.integers(-1, 2))
ROUNDING = 1e-12
# A shared machine may be slow at any example; the same examples everywhere.
steady = settings(max_examples=60, deadline=None, derandomize=True)


def map_and_mask(seed: int = 0, shape=(20, 30)):
    random = np.random.default_rng(seed)
    return random.normal(size=shape), random.integers(-1, 3, shape).astype(np.int16)


@pytest.mark.parametrize("kind", [torch.as_tensor, np.ndarray.tolist])
def test_masks_of_any_kind_say_the_same(kind):
    map_, mask = map_and_mask()
    assert np.array_equal(seg.count_pixels(kind(map_ > 0), kind(mask)), seg.count_pixels(map_ > 0, mask))
    levels = seg.GRADTOKEN_THRESHOLDS
    at_levels = seg.count_at_thresholds(kind(map_), kind(mask), levels)
    assert np.array_equal(at_levels, seg.count_at_thresholds(map_, mask, levels))
    assert np.array_equal(seg.count_classes(kind(abs(mask)), kind(mask), 3), seg.count_classes(abs(mask), mask, 3))
    for precision in (seg.mask_average_precision, seg.two_class_average_precision):
        assert precision(kind(map_), kind(mask)) == precision(map_, mask)


@pytest.mark.parametrize("precision", [seg.mask_average_precision, seg.two_class_average_precision])
def test_several_maps_are_not_taken_for_one(precision):
    """Their pixels ranked together have another precision than the mean of each map's."""
    map_, mask = map_and_mask(shape=(2, 20, 30))
    with pytest.raises(MetricError, match="one by one"):
        precision(map_, mask)


def test_pixels_that_do_not_count_are_not_taken_for_relevant():
    with pytest.raises(MetricError, match="what is relevant is 1"):
        seg.average_precision([0.9, 0.8, 0.1], [-1, 1, 0])


class TestAveragePrecision:
    def test_of_a_hand_made_list(self):
        # Found at places 1 and 3 of 4: (1/1 + 2/3) / 2.
        assert seg.average_precision([4, 3, 2, 1], [1, 0, 1, 0]) == pytest.approx(5 / 6, abs=ROUNDING)

    def test_equal_scores_have_the_share_of_the_relevant(self):
        assert seg.average_precision(np.ones(8), [1, 0, 0, 0, 0, 0, 1, 0]) == pytest.approx(1 / 4, abs=ROUNDING)

    @steady
    @given(MAPS, MASKS)
    def test_is_sklearns_with_ties_and_ignored_pixels(self, map_, mask):
        sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn comes with vitreous[peers]")
        counted = mask >= 0
        found = seg.mask_average_precision(map_, mask)
        if (mask > 0).any():
            expected = sklearn.average_precision_score(mask[counted] > 0, map_[counted])
            assert found == pytest.approx(expected, abs=ROUNDING)
        else:
            assert np.isnan(found)

    @steady
    @given(MAPS, MASKS)
    def test_does_not_change_under_rising_functions(self, map_, mask):
        expected = seg.mask_average_precision(map_, mask)
        for rising in (np.exp, lambda values: 3 * values - 7, np.arctan):
            np.testing.assert_equal(seg.mask_average_precision(rising(map_), mask), expected)

    @steady
    @given(MAPS, MASKS, st.randoms(use_true_random=False))
    def test_does_not_depend_on_the_order_of_pixels(self, map_, mask, random):
        order = random.sample(range(map_.size), map_.size)
        shuffled = map_.ravel()[order].reshape(SHAPE), mask.ravel()[order].reshape(SHAPE)
        for measure in (seg.mask_average_precision, seg.two_class_average_precision):
            np.testing.assert_allclose(measure(*shuffled), measure(map_, mask), atol=ROUNDING)

    @steady
    @given(MAPS, MASKS)
    def test_lies_in_its_range_and_is_one_for_the_mask_itself(self, map_, mask):
        for measure in (seg.mask_average_precision, seg.two_class_average_precision):
            found = measure(map_, mask)
            assert np.isnan(found) or 0 < found <= 1 + ROUNDING
        if (mask > 0).any():
            assert seg.mask_average_precision(mask > 0, mask) == pytest.approx(1)

    def test_two_classes_count_the_background_as_a_class(self):
        map_, mask = map_and_mask()
        scaled, counted = seg.min_max(map_), mask >= 0
        scores = np.concatenate([1 - scaled[counted], scaled[counted]])
        truth = np.concatenate([mask[counted] == 0, mask[counted] > 0])
        expected = seg.average_precision(scores, truth)
        assert seg.two_class_average_precision(map_, mask) == pytest.approx(expected, abs=ROUNDING)


class TestCounts:
    def test_of_a_hand_made_image(self):
        foreground = np.array([[True, True, False], [False, False, True]])
        mask = np.array([[1, 0, 0], [2, -1, -1]])
        # Background: 1 of the union {2 true, 1 wrongly predicted}; foreground: 1 of {2 true, 1 wrongly predicted}.
        np.testing.assert_array_equal(seg.count_pixels(foreground, mask), [1, 1, 3, 3])
        counts = seg.count_pixels(foreground, mask)
        assert seg.pixel_accuracy().combine(counts) == 0.5
        assert seg.mean_iou().combine(counts) == pytest.approx(1 / 3)

    @steady
    @given(MAPS, MASKS)
    def test_numbers_lie_in_their_range(self, map_, mask):
        counts = seg.count_pixels(seg.above_mean(map_), mask)
        for metric in (seg.pixel_accuracy(), seg.mean_iou(), seg.foreground_iou()):
            found = metric.combine(counts)
            assert np.isnan(found) or metric.range[0] <= found <= metric.range[1]

    @steady
    @given(MAPS, MASKS)
    def test_an_ignored_pixel_may_be_predicted_anything(self, map_, mask):
        foreground = seg.above_mean(map_)
        turned = np.where(mask == -1, ~foreground, foreground)
        np.testing.assert_array_equal(seg.count_pixels(turned, mask), seg.count_pixels(foreground, mask))

    def test_a_batch_is_its_images(self):
        pairs = [map_and_mask(seed) for seed in range(3)]
        maps, masks = (np.stack(parts) for parts in zip(*pairs, strict=True))
        one_by_one = [seg.count_pixels(seg.above_mean(map_), mask) for map_, mask in pairs]
        np.testing.assert_array_equal(seg.count_pixels(seg.above_mean(maps), masks), one_by_one)

    def test_two_classes_are_the_multi_class_form(self):
        map_, mask = map_and_mask()
        foreground, truth = seg.above_mean(map_), np.minimum(mask, 1)
        two = seg.count_pixels(foreground, mask)
        several = seg.count_classes(foreground.astype(np.int16), truth, classes=2)
        np.testing.assert_array_equal(several[:4], two)
        assert seg.classes_mean_iou(2).combine(several) == seg.mean_iou().combine(two)
        assert seg.classes_pixel_accuracy(2).combine(several) == seg.pixel_accuracy().combine(two)

    def test_numbers_accumulate_over_the_data_set(self):
        # Image 1: 1 of 1 pixels right, image 2: 0 of 3; the mean of their accuracies would be 1/2.
        first = seg.count_classes(np.array([[0]]), np.array([[0]]), 3)
        second = seg.count_classes(np.array([[1, 1, 1]]), np.array([[0, 2, 2]]), 3)
        means = (first + second) / 2
        assert seg.classes_pixel_accuracy(3).combine(means) == 1 / 4
        assert seg.classes_mean_iou(3).combine(means) == pytest.approx((1 / 2 + 0 + 0) / 3)

    def test_a_class_that_never_occurs_does_not_count(self):
        counts = seg.count_classes(np.array([[0, 1]]), np.array([[0, 1]]), 21)
        assert seg.classes_mean_iou(21).combine(counts) == 1

    def test_a_class_that_does_not_exist_is_refused(self):
        with pytest.raises(MetricError, match=r"outside 0\.\.2"):
            seg.count_classes(np.array([[3]]), np.array([[0]]), 3)


class TestDegenerate:
    @pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
    def test_a_constant_map_ranks_nothing_for_chefers_precision(self, value):
        """The authors' program divides by zero and sets both halves to 0: all 2HW scores are equal, half are right."""
        _, mask = map_and_mask(shape=SHAPE)
        assert seg.two_class_average_precision(np.full(SHAPE, value), mask) == 0.5

    @pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
    def test_a_constant_map_has_no_foreground(self, value):
        constant = np.full(SHAPE, value)
        assert not seg.above_mean(constant).any()
        assert not seg.above_threshold(constant, 0.0).any()
        assert not seg.min_max(constant).any()

    def test_a_mask_that_counts_no_pixel_is_left_out(self):
        map_, mask = np.arange(30.0).reshape(SHAPE), np.full(SHAPE, -1)
        assert np.isnan(seg.count_pixels(seg.above_mean(map_), mask)).all()
        assert np.isnan(seg.count_classes(mask, mask, 3)).all()
        assert np.isnan(seg.mask_average_precision(map_, mask))
        assert np.isnan(seg.two_class_average_precision(map_, mask))

    def test_a_mask_without_foreground_has_no_average_precision_but_a_pixel_accuracy(self):
        map_, mask = np.arange(30.0).reshape(SHAPE), np.zeros(SHAPE, dtype=int)
        assert np.isnan(seg.mask_average_precision(map_, mask))
        assert seg.pixel_accuracy().combine(seg.count_pixels(seg.above_mean(map_), mask)) == 0.5

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_map_that_is_not_finite_is_refused(self, bad):
        map_, mask = np.ones(SHAPE), np.ones(SHAPE, dtype=int)
        map_[2, 2] = bad
        for measure in (seg.mask_average_precision, seg.two_class_average_precision):
            with pytest.raises(MetricError, match="not finite"):
                measure(map_, mask)
        with pytest.raises(MetricError, match="not finite"):
            seg.above_mean(map_)

    def test_shapes_must_agree(self):
        with pytest.raises(MetricError, match="differ in shape"):
            seg.count_pixels(np.ones((2, 2), bool), np.ones((2, 3), int))

    def test_a_row_of_pixels_is_no_map(self):
        row, mask = np.arange(4.0), np.array([0, 1, 1, 0])
        for measure in (seg.count_pixels, seg.two_class_average_precision, localisation.pointing_game):
            with pytest.raises(MetricError, match="rows and columns"):
                measure(row > 1, mask)
        with pytest.raises(MetricError, match="rows and columns"):
            seg.above_mean(row)


class TestThresholds:
    NAMES = tuple(f"image-{index}" for index in range(40))

    def columns(self):
        """Counts of 40 images at ten thresholds, as rows; and the counts themselves (images, thresholds, 4)."""
        rows, counts = [], []
        for seed, name in enumerate(self.NAMES):
            map_, mask = map_and_mask(seed)
            map_ = map_ + (mask > 0)
            at = [seg.count_pixels(seg.above_threshold(map_, t), mask) for t in seg.GRADTOKEN_THRESHOLDS]
            counts.append(at)
            row = {}
            for threshold, values in zip(seg.GRADTOKEN_THRESHOLDS, at, strict=True):
                row |= dict(zip(seg.prefixed(seg.threshold_prefix(threshold), seg.COUNTS), values, strict=True))
            rows.append(seg.in_its_half(name, row))
        return rows, np.array(counts)

    def means(self, metric, rows):
        return np.array([[row[name] for name in metric.columns] for row in rows]).mean(axis=0)

    def test_the_best_threshold_is_the_best_of_all(self):
        rows, counts = self.columns()
        metric = seg.best_threshold_miou()
        each = seg.mean_iou().combine(counts.mean(axis=0))
        assert metric.combine(self.means(metric, rows)) == pytest.approx(each.max(), abs=ROUNDING)

    def test_pixel_accuracy_is_read_at_the_threshold_of_the_best_miou(self):
        rows, counts = self.columns()
        metric = seg.best_threshold(seg.pixel_accuracy)
        chosen = seg.mean_iou().combine(counts.mean(axis=0)).argmax()
        expected = seg.pixel_accuracy().combine(counts.mean(axis=0))[chosen]
        assert metric.combine(self.means(metric, rows)) == pytest.approx(expected, abs=ROUNDING)

    def test_the_held_out_threshold_comes_from_the_other_half(self):
        rows, counts = self.columns()
        second = np.array([seg.half_of(name) for name in self.NAMES], dtype=bool)
        on_first = seg.mean_iou().combine(counts[~second].mean(axis=0))
        on_second = seg.mean_iou().combine(counts[second].mean(axis=0))
        expected = (on_second[on_first.argmax()] + on_first[on_second.argmax()]) / 2
        held_out, best = seg.held_out_threshold_miou(), seg.best_threshold_miou()
        found = held_out.combine(self.means(held_out, rows))
        assert found == pytest.approx(expected, abs=ROUNDING)
        assert found != best.combine(self.means(best, rows))

    def test_many_means_at_once_are_searched_one_by_one(self):
        rows, _ = self.columns()
        for metric in (seg.best_threshold_miou(), seg.held_out_threshold_miou()):
            several = np.stack([self.means(metric, rows[: 20 + k]) for k in range(3)])
            one_by_one = [metric.combine(means) for means in several]
            np.testing.assert_array_equal(metric.combine(several), one_by_one)

    def test_columns_without_halves_serve_the_best_threshold(self):
        _, counts = self.columns()
        metric = seg.best_threshold_miou(parts=("",))
        assert metric.columns[:2] == ("threshold_0_intersection_background", "threshold_0_intersection_foreground")
        found = metric.combine(counts.mean(axis=0).ravel())
        assert found == seg.mean_iou().combine(counts.mean(axis=0)).max()

    def test_several_classes_are_searched_the_same_way(self):
        metric = seg.best_threshold(
            lambda prefix: seg.classes_mean_iou(3, prefix),
            (0.1, 0.2),
            chosen_by=lambda prefix: seg.classes_mean_iou(3, prefix),
            parts=("",),
        )
        truth = np.array([[0, 1, 2]])
        counts = [seg.count_classes(guess, truth, 3) for guess in (np.array([[0, 0, 0]]), truth)]
        assert metric.combine(np.concatenate(counts)) == 1
        assert len(metric.columns) == 2 * 7

    @steady
    @given(MAPS, MASKS)
    def test_all_thresholds_at_once_are_one_by_one(self, map_, mask):
        # Maps of 0..6 in steps of 1 lie exactly on some of the thresholds after scaling.
        thresholds = (0.0, 1 / 6, 0.25, 0.5, 1.0)
        one_by_one = [seg.count_pixels(seg.above_threshold(map_, threshold), mask) for threshold in thresholds]
        np.testing.assert_array_equal(seg.count_at_thresholds(map_, mask, thresholds), one_by_one)

    def test_thresholds_must_rise(self):
        with pytest.raises(MetricError, match="rising"):
            seg.count_at_thresholds(np.ones(SHAPE), np.ones(SHAPE, dtype=int), (0.2, 0.1))

    def test_a_half_is_decided_by_the_name_alone_and_about_even(self):
        halves = [seg.half_of(f"ILSVRC2012_val_{index:08d}") for index in range(2000)]
        # 2,000 fair coins: 1,000 with a standard deviation of 22; these names never change.
        assert 900 < sum(halves) < 1100

    def test_an_image_that_cannot_be_measured_stays_so_in_both_halves(self):
        row = seg.in_its_half("a", {"x": float("nan")})
        assert set(row) == {"first_half_x", "second_half_x"}
        assert all(np.isnan(value) for value in row.values())


def test_data_sets_mark_pixels_that_do_not_count_as_metrics_read_them():
    """Neither package imports the other, so each has the number."""
    from vitreous.datasets.dataset import IGNORED as STORED
    from vitreous.metrics.metric import IGNORED as READ

    assert STORED == READ == -1
