"""Localisation, faithfulness correlation, sensitivity, randomisation, complexity and text: closed forms and bounds."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitreous.metrics import MetricError, sanity, text
from vitreous.metrics import localisation as loc
from vitreous.metrics.metric import mean_of

ROUNDING = 1e-12
SHAPE = (6, 7)
MAPS = arrays(np.float64, SHAPE, elements=st.integers(-3, 3).map(float))
MASKS = arrays(np.int16, SHAPE, elements=st.integers(-1, 2))
steady = settings(max_examples=60, deadline=None, derandomize=True)


def point(row: int, column: int) -> np.ndarray:
    map_ = np.zeros((9, 9))
    map_[row, column] = 1.0
    return map_


SQUARE = np.zeros((9, 9), dtype=np.int16)
SQUARE[3:6, 3:6] = 1


class TestLocalisation:
    def test_the_maximum_hits_or_misses(self):
        assert loc.pointing_game(point(4, 4), SQUARE) == 1
        assert loc.pointing_game(point(2, 4), SQUARE) == 0

    def test_tolerance_is_a_disc(self):
        assert loc.pointing_game(point(2, 4), SQUARE, tolerance=1) == 1
        assert loc.pointing_game(point(2, 2), SQUARE, tolerance=1) == 0
        assert loc.pointing_game(point(2, 2), SQUARE, tolerance=2) == 1
        assert loc.pointing_game(point(0, 0), SQUARE, tolerance=50) == 1

    @steady
    @given(MASKS, st.integers(0, 9))
    def test_widening_is_the_distance_to_the_nearest_pixel(self, mask, radius):
        object_ = mask > 0
        places = np.argwhere(object_)
        grid = np.argwhere(np.ones(SHAPE, bool))
        distances = ((grid[:, None] - places[None]) ** 2).sum(axis=-1)
        near = (distances <= radius**2).any(axis=1).reshape(SHAPE)
        np.testing.assert_array_equal(loc._widened(object_, radius), near)

    def test_several_maxima_count_by_their_share(self):
        assert loc.pointing_game(point(4, 4) + point(0, 0), SQUARE) == 0.5
        assert loc.pointing_game(np.zeros((9, 9)), SQUARE) == pytest.approx(9 / 81)

    def test_an_ignored_maximum_is_not_looked_at(self):
        mask = SQUARE.copy()
        mask[0, 0] = -1
        assert loc.pointing_game(2 * point(0, 0) + point(4, 4), mask) == 1
        assert loc.energy_in_mask(2 * point(0, 0) + point(4, 4), mask) == 1

    def test_energy_is_the_positive_share(self):
        map_ = 3 * point(4, 4) + point(0, 0) - 5 * point(8, 8)
        assert loc.energy_in_mask(map_, SQUARE) == 0.75
        assert loc.energy_in_mask(-map_.clip(min=0), SQUARE) == 0

    def test_rank_accuracy_takes_as_many_pixels_as_the_object_has(self):
        assert loc.rank_accuracy(SQUARE.astype(float), SQUARE) == 1
        assert loc.rank_accuracy(-SQUARE.astype(float), SQUARE) == 0
        # Every pixel shares the cut, so each is in with 9 / 81.
        assert loc.rank_accuracy(np.zeros((9, 9)), SQUARE) == pytest.approx(9 / 81)

    @steady
    @given(MAPS, MASKS)
    def test_numbers_lie_in_their_range_and_need_an_object(self, map_, mask):
        for measure in (loc.pointing_game, loc.energy_in_mask, loc.rank_accuracy):
            found = measure(map_, mask)
            assert np.isnan(found) == (not (mask > 0).any())
            assert np.isnan(found) or 0 <= found <= 1 + ROUNDING

    @steady
    @given(MAPS, MASKS, st.randoms(use_true_random=False))
    def test_the_order_of_pixels_does_not_matter(self, map_, mask, random):
        order = random.sample(range(map_.size), map_.size)
        shuffled = map_.ravel()[order].reshape(SHAPE), mask.ravel()[order].reshape(SHAPE)
        for measure in (loc.pointing_game, loc.energy_in_mask, loc.rank_accuracy):
            np.testing.assert_allclose(measure(*shuffled), measure(map_, mask), atol=ROUNDING)

    @pytest.mark.parametrize("kind", [torch.as_tensor, np.ndarray.tolist, np.float32])
    def test_masks_of_any_kind_say_the_same(self, kind):
        """A mask of torch once gave other numbers: its comparison with numpy's was taken for positions."""
        random = np.random.default_rng(1)
        for _ in range(5):
            map_, mask = random.normal(size=SHAPE), random.integers(-1, 2, SHAPE)
            measures = [
                loc.energy_in_mask,
                loc.rank_accuracy,
                *(partial(loc.pointing_game, tolerance=t) for t in (0, 1)),
            ]
            assert [each(kind(map_), kind(mask)) for each in measures] == [
                each(np.asarray(kind(map_), dtype=float), mask) for each in measures
            ]

    def test_what_is_no_mask_or_tolerance_is_refused(self):
        with pytest.raises(MetricError, match="not whole"):
            loc.energy_in_mask(point(4, 4), SQUARE / 2)
        with pytest.raises(MetricError, match="cannot be read as numbers"):
            loc.energy_in_mask(point(4, 4), [["cat"]])
        with pytest.raises(MetricError, match="tolerance"):
            loc.pointing_game(point(4, 4), SQUARE, tolerance=-1)

    @pytest.mark.parametrize("measure", [loc.pointing_game, loc.energy_in_mask, loc.rank_accuracy])
    def test_several_maps_are_not_taken_for_one(self, measure):
        """Their common maximum, energy or order is not the mean of their own."""
        with pytest.raises(MetricError, match="one by one"):
            measure(np.stack([point(4, 4), point(0, 0)]), np.stack([SQUARE, SQUARE]))

    def test_a_map_that_is_not_finite_is_refused(self):
        with pytest.raises(MetricError, match="not finite"):
            loc.pointing_game(np.full((9, 9), np.nan), SQUARE)


class TestFaithfulnessCorrelation:
    def test_the_relevance_of_a_linear_model_is_perfect(self):
        random = np.random.default_rng(0)
        weights, image = random.normal(size=30), random.normal(size=30)
        subsets = sanity.random_subsets(30, 8, 50, seed=1)
        relevance = weights * image
        drops = np.array([(weights * image)[subset].sum() for subset in subsets])
        assert sanity.faithfulness_correlation(relevance[subsets].sum(axis=1), drops) == pytest.approx(1)
        assert sanity.faithfulness_correlation(-relevance[subsets].sum(axis=1), drops) == pytest.approx(-1)

    @pytest.mark.parametrize("scale", [1e200, 1e-200])
    def test_scale_does_not_matter(self, scale):
        first, second = np.random.default_rng(0).normal(size=(2, 9))
        plain = sanity.pearson(first, second)
        assert sanity.pearson(scale * first, second) == pytest.approx(plain, abs=ROUNDING)
        assert sanity.pearson(first, scale * second) == pytest.approx(plain, abs=ROUNDING)

    def test_a_batch_is_its_images(self):
        random = np.random.default_rng(0)
        sums, drops = random.normal(size=(2, 5, 20))
        expected = [np.corrcoef(one, other)[0, 1] for one, other in zip(sums, drops, strict=True)]
        np.testing.assert_allclose(sanity.faithfulness_correlation(sums, drops), expected, atol=ROUNDING)

    def test_a_constant_map_has_none_and_a_constant_score_tells_nothing(self):
        moving = np.arange(5.0)
        constant = np.array([0.3, 0.1 + 0.2, 0.3, 0.3, 0.3])
        assert sanity.faithfulness_correlation(constant, moving) == 0
        assert np.isnan(sanity.faithfulness_correlation(moving, np.zeros(5)))

    def test_subsets_have_no_feature_twice_and_follow_their_seed(self):
        subsets = sanity.random_subsets(10, 9, 40, seed=3)
        assert all(len(set(subset)) == 9 for subset in subsets.tolist())
        np.testing.assert_array_equal(subsets, sanity.random_subsets(10, 9, 40, seed=3))
        assert (subsets != sanity.random_subsets(10, 9, 40, seed=4)).any()
        with pytest.raises(MetricError, match="cannot be drawn"):
            sanity.random_subsets(10, 11, 1, seed=0)
        with pytest.raises(MetricError, match="at least one subset"):
            sanity.random_subsets(10, 5, 0, seed=0)


class TestSensitivity:
    def test_relative_change_in_closed_form(self):
        original = np.array([3.0, 4.0])
        disturbed = np.array([[3.0, 4.0], [3.0, 5.0], [0.0, 0.0]])
        np.testing.assert_allclose(sanity.relative_changes(original, disturbed), [0, 0.2, 1])
        assert sanity.max_sensitivity(original, disturbed) == 1
        assert sanity.average_sensitivity(original, disturbed) == pytest.approx(0.4)

    def test_a_zero_map_that_stays_zero_is_stable_and_one_that_does_not_is_unmeasurable(self):
        assert sanity.max_sensitivity(np.zeros(3), np.zeros((2, 3))) == 0
        assert np.isnan(sanity.max_sensitivity(np.zeros(3), np.eye(3)))

    def test_images_may_be_measured_together(self):
        random = np.random.default_rng(0)
        original, disturbed = random.normal(size=(4, 6)), random.normal(size=(5, 4, 6))
        expected = [sanity.max_sensitivity(original[k], disturbed[:, k]) for k in range(4)]
        np.testing.assert_array_equal(sanity.max_sensitivity(original, disturbed), expected)

    def test_shapes_must_fit(self):
        with pytest.raises(MetricError, match="not samples"):
            sanity.max_sensitivity(np.zeros(3), np.zeros((2, 4)))


class TestRandomisation:
    @steady
    @given(MAPS, MAPS)
    def test_spearman_is_scipys_with_ties(self, first, second):
        stats = pytest.importorskip("scipy.stats", reason="scipy comes with vitreous[peers]")
        found = sanity.spearman(first, second)
        assert -1 <= found <= 1
        if np.ptp(first) > 0 and np.ptp(second) > 0:
            assert found == pytest.approx(stats.spearmanr(first.ravel(), second.ravel()).statistic, abs=1e-10)

    def test_spearman_sees_order_only(self):
        map_ = np.random.default_rng(0).normal(size=SHAPE)
        assert sanity.spearman(map_, np.exp(map_)) == pytest.approx(1)
        assert sanity.spearman(map_, -map_) == pytest.approx(-1)

    def test_constant_maps_resemble_only_each_other(self):
        map_ = np.random.default_rng(0).normal(size=SHAPE)
        assert sanity.spearman(map_, np.zeros(SHAPE)) == 0
        assert sanity.spearman(np.ones(SHAPE), np.zeros(SHAPE)) == 1

    def test_maps_of_several_images_are_not_ranked_together(self):
        with pytest.raises(MetricError, match="one by one"):
            sanity.spearman(np.zeros((2, *SHAPE)), np.ones((2, *SHAPE)))

    def test_ssim_is_skimages(self):
        skimage = pytest.importorskip("skimage.metrics", reason="scikit-image comes with quantus")
        first, second = np.random.default_rng(0).random((2, 20, 25))
        second = second + first
        from vitreous.metrics.metric import min_max

        expected = skimage.structural_similarity(min_max(first), min_max(second), data_range=1.0)
        assert sanity.structural_similarity(first, second) == pytest.approx(expected, abs=1e-10)
        assert sanity.structural_similarity(first, 3 * first + 1) == pytest.approx(1)

    def test_ssim_needs_a_window(self):
        with pytest.raises(MetricError, match="at least 2 x 2"):
            sanity.structural_similarity(point(1, 1), point(2, 2), window=1)

    def test_ssim_needs_room_for_its_window(self):
        with pytest.raises(MetricError, match="no room"):
            sanity.structural_similarity(np.ones((6, 9)), np.ones((6, 9)))


class TestComplexity:
    def test_of_a_single_feature_and_of_a_constant_map(self):
        single, constant = np.eye(10)[3], np.full(10, -2.0)
        assert sanity.sparseness(single) == pytest.approx(0.9)
        assert sanity.complexity(single) == 0
        assert sanity.effective_complexity(single) == 1
        for map_ in (constant, np.zeros(10)):
            assert sanity.sparseness(map_) == pytest.approx(0, abs=ROUNDING)
            assert sanity.complexity(map_) == pytest.approx(np.log(10))
            assert sanity.effective_complexity(map_) == 10

    @steady
    @given(arrays(np.float64, (2, 12), elements=st.integers(-9, 9).map(float)), st.floats(1e-3, 1e3))
    def test_sign_scale_and_order_do_not_matter_and_bounds_hold(self, maps, scale):
        for measure, high in ((sanity.sparseness, 1), (sanity.complexity, np.log(12))):
            found = measure(maps)
            assert (found >= 0).all()
            assert (found <= high + ROUNDING).all()
            np.testing.assert_allclose(measure(-scale * maps[:, ::-1]), found, atol=1e-12)


class TestText:
    def test_a_word_has_the_score_of_its_best_piece_and_not_below_zero(self):
        found = text.word_scores([0.5, 0.2, 0.9, -1.0, 7.0], [0, 1, 1, 2, -1])
        np.testing.assert_array_equal(found, [0.5, 0.9, 0.0])

    def test_words_are_whole_numbers(self):
        with pytest.raises(MetricError, match="not whole"):
            text.word_scores([0.5, 0.2], [0, 1.7])

    def test_token_f1_by_hand(self):
        # Two of the three chosen are among the four wanted: P = 2/3, R = 1/2.
        found = text.token_f1([5, 4, 3, 0, 0, 0], [1, 1, 0, 1, 1, 0], top=3)
        assert found == pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))

    def test_a_short_text_is_taken_whole_and_an_empty_rationale_not_counted(self):
        assert text.token_f1([1, 2], [1, 1], top=10) == 1
        assert np.isnan(text.token_f1([1, 2], [0, 0], top=1))
        with pytest.raises(MetricError, match="at least one"):
            text.token_f1([1, 2], [0, 1], top=0)
        with pytest.raises(MetricError, match="whole number"):
            text.token_f1([1, 2], [0, 1], top=1.5)
        with pytest.raises(MetricError, match="a rationale is 1"):
            text.token_f1([1, 2], [-1, 1], top=1)
        with pytest.raises(MetricError, match="one row"):
            text.token_f1([[1, 2], [3, 4]], [[0, 1], [1, 1]], top=2)
        with pytest.raises(MetricError, match="at least one"):
            text.average_token_f1(())

    def test_equal_scores_are_taken_in_reading_order(self):
        assert text.token_f1([0, 0, 0], [1, 0, 0], top=1) == 1

    def test_comprehensiveness_and_sufficiency_average_over_shares(self):
        np.testing.assert_allclose(text.comprehensiveness([0.9], [[0.5, 0.1]]), [0.6])
        np.testing.assert_allclose(text.sufficiency([0.9], [[0.9, 1.0]]), [-0.05])
        assert text.mean_comprehensiveness().direction == "higher"
        assert text.mean_sufficiency().direction == "lower"


class TestFormat:
    """A metric says itself how a table writes it."""

    @pytest.mark.parametrize(
        ("bounds", "label", "text"),
        [
            ((0.0, 1.0), "x (%)", "12.35"),
            ((0.0, 90.0), "x", "0.12"),
            ((-1.0, 1.0), "x", "0.123"),
            ((0.0, np.inf), "x", "0.123"),
        ],
    )
    def test_by_its_range(self, bounds, label, text):
        metric = mean_of("column", "x", "higher", bounds, "A number.")
        assert (metric.label, metric.format(0.12345)) == (label, text)

    def test_a_row_has_the_names_of_its_columns(self):
        metric = mean_of("column", "x", "higher", (0.0, 1.0), "A number.")
        assert metric.row(0.5) == {"column": 0.5}
        with pytest.raises(MetricError, match="1 columns were named"):
            metric.row(0.5, 0.6)
