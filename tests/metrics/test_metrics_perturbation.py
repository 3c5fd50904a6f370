"""Perturbation metrics: closed forms of areas in every convention, signs, directions and ranges."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from areas import trapezoid
from vitreous.metrics import MetricError, list_metrics, row
from vitreous.metrics import perturbation as per
from vitreous.metrics.text import average_token_f1

ROUNDING = 1e-12
steady = settings(max_examples=60, deadline=None, derandomize=True)


class TestAreas:
    def test_nine_points_and_their_mean(self):
        metric = per.accuracy_auc("positive_", per.NINE, "mean", direction="lower")
        assert metric.columns[0] == "positive_hit_10"
        assert metric.columns[-1] == "positive_hit_90"
        assert metric.range == (0, 100)
        assert metric.combine(np.arange(1, 10) / 10) == pytest.approx(50, abs=ROUNDING)

    def test_a_trapezoid_with_the_point_at_zero(self):
        metric = per.accuracy_auc("positive_", direction="lower")
        assert metric.columns[:2] == ("positive_hit_0", "positive_hit_10")
        assert metric.range == (0, 90)
        falling = 1 - np.arange(10) / 10
        # The area under 1 - x from 0 to 0.9 is 0.9 - 0.405.
        assert metric.combine(falling) == pytest.approx(49.5, abs=ROUNDING)

    @steady
    @given(arrays(np.float64, (3, 11), elements=st.floats(0, 1)))
    def test_areas_are_trapezoids_and_means(self, curves):
        np.testing.assert_allclose(per.curve_area(curves, per.ELEVEN), trapezoid(curves, per.ELEVEN), atol=ROUNDING)
        np.testing.assert_allclose(per.curve_area(curves, per.ELEVEN, "mean"), curves.mean(axis=-1), atol=ROUNDING)

    def test_uneven_ratios_weigh_their_neighbours(self):
        assert per.curve_area([1.0, 3.0, 2.0], [0, 0.1, 1]) == pytest.approx(0.2 + 0.9 * 2.5, abs=ROUNDING)

    def test_the_mean_of_areas_is_the_area_of_the_mean_curve(self):
        hits = np.random.default_rng(0).integers(0, 2, (40, 10)).astype(float)
        metric = per.accuracy_auc("x_", direction="lower")
        each = 100 * per.curve_area(hits, per.FROM_ZERO)
        assert metric.combine(hits.mean(axis=0)) == pytest.approx(each.mean(), abs=1e-10)

    @pytest.mark.parametrize("ratios", [[0.5], [0.2, 0.1], [0.1, 0.1]])
    def test_a_trapezoid_needs_rising_ratios(self, ratios):
        with pytest.raises(MetricError, match="rising"):
            per.curve_area([0.0] * len(ratios), ratios)

    @pytest.mark.parametrize("values", [[0.5], 0.5, np.ones((9, 1)), np.ones(10)])
    def test_a_curve_has_a_value_for_every_ratio(self, values):
        with pytest.raises(MetricError, match="one value for each of 9 ratios"):
            per.curve_area(values, per.NINE)

    def test_an_area_by_another_name_is_refused(self):
        with pytest.raises(MetricError, match="trapezoid or mean, not as 'Mean'"):
            per.curve_area(np.ones(9), per.NINE, "Mean")

    def test_a_mean_of_nothing_is_refused(self):
        with pytest.raises(MetricError, match="at least one ratio"):
            per.accuracy_auc("", (), "mean", direction="lower")

    def test_columns_are_named_in_percent(self):
        assert per.curve_columns("a_", "probability", [0.025, 0.3, 1]) == (
            "a_probability_2.5",
            "a_probability_30",
            "a_probability_100",
        )


class TestAbpc:
    def test_is_negative_minus_positive_over_eleven_points(self):
        metric = per.area_between_curves()
        negative, positive = np.linspace(1, 0.2, 11), np.linspace(0.9, 0.0, 11)
        found = metric.combine(np.concatenate([negative, positive]))
        assert found == pytest.approx(100 * (negative.mean() - positive.mean()), abs=ROUNDING)
        assert metric.range == (-100, 100)
        assert metric.columns[0] == "negative_probability_0"
        assert metric.columns[11] == "positive_probability_0"

    def test_is_the_difference_of_agcams_two_means(self):
        curves = np.random.default_rng(0).random((2, 11))
        areas = [
            per.probability_auc(prefix, direction="higher").combine(curve)
            for prefix, curve in zip(("negative_", "positive_"), curves, strict=True)
        ]
        found = per.area_between_curves().combine(curves.ravel())
        assert found == pytest.approx(areas[0] - areas[1], abs=1e-10)
        assert areas[0] == pytest.approx(100 * curves[0].mean(), abs=1e-10)


class TestInsertionAndDeletion:
    def test_a_perfect_insertion_has_90(self):
        metric = per.insertion_accuracy()
        assert metric.columns == per.curve_columns("insertion_", "hit", (*per.NINE, 1.0))
        assert metric.combine(np.ones(10)) == pytest.approx(90, abs=1e-10)
        assert (metric.direction, metric.range) == ("higher", (0, 90))

    def test_deletion_is_shown_as_100_minus_x(self):
        metric, plain = per.deletion_accuracy(), per.deletion_accuracy(complement=False)
        curve = np.linspace(1, 0, 10)
        assert metric.combine(curve) == pytest.approx(100 - plain.combine(curve), abs=1e-10)
        assert (metric.direction, plain.direction) == ("higher", "lower")
        assert metric.range == (10, 100)

    def test_falls_of_the_probability_count_both_ways(self):
        falls = np.linspace(0.4, 0, 10)
        area = 100 * trapezoid(falls, np.linspace(0.1, 1, 10))
        assert per.insertion_aopc().combine(falls) == pytest.approx(100 - area, abs=1e-10)
        assert per.deletion_aopc().combine(falls[::-1]) == pytest.approx(area, abs=1e-10)
        assert per.deletion_aopc().range == (-90, 90)
        assert per.insertion_aopc().range == (10, 190)

    def test_most_and_least_influential_first_are_opposite(self):
        assert (per.mif().direction, per.lif().direction) == ("lower", "higher")
        assert per.mif().columns[0] == "mif_hit_0"


class TestProbabilities:
    def test_softmax_of_large_logits(self):
        np.testing.assert_allclose(per.probabilities([1000.0, 1000.0, 0.0]), [0.5, 0.5, 0.0], atol=ROUNDING)

    def test_the_class_is_taken_from_every_step(self):
        values = np.arange(24.0).reshape(2, 3, 4)
        np.testing.assert_array_equal(per.of_class(values, [0, 3, 1]), [[0, 7, 9], [12, 19, 21]])

    @pytest.mark.parametrize("labels", [[-1, 0], [0, 3], [[0], [1]], [0, 1, 2], [0.5, 1]])
    def test_labels_that_do_not_fit_are_refused(self, labels):
        """Numpy would take the last class for -1, and compare every image with every label for a column of them."""
        for measured in (per.hits, per.of_class):
            with pytest.raises(MetricError, match="label"):
                measured(np.zeros((5, 2, 3)), labels)

    def test_log_odds_have_both_signs(self):
        found = per.log_odds([0.8], [[0.4, 0.2]])
        assert found[0] == pytest.approx(-(np.log(2) + np.log(4)) / 2, abs=ROUNDING)
        assert per.log_odds([0.8], [[0.4, 0.2]], inverted=True)[0] == -found[0]

    def test_log_odds_of_nothing_are_refused(self):
        with pytest.raises(MetricError, match="above 0"):
            per.log_odds([0.5], [[0.0]])

    def test_directions_follow_the_order_of_erasing(self):
        assert per.mean_aopc().direction == "higher"
        assert per.mean_aopc(most_relevant_first=False).direction == "lower"
        assert per.mean_log_odds().direction == "lower"
        assert per.mean_log_odds(inverted=True).direction == "higher"
        assert per.mean_log_odds(most_relevant_first=False, inverted=True).direction == "lower"

    def test_logits_that_are_not_finite_are_refused(self):
        with pytest.raises(MetricError, match="not finite"):
            per.hits([[np.nan, 1.0]], [0])


class TestRegistry:
    def test_every_metric_says_what_it_is(self):
        for name, metric in list_metrics().items():
            assert name == metric.name
            assert metric.direction in {"higher", "lower", None}
            assert metric.range[0] < metric.range[1]
            assert metric.description.endswith(".")
            assert len(set(metric.columns)) == len(metric.columns) > 0

    def test_metrics_can_be_sent_to_other_processes_and_compared(self):
        for metric in list_metrics().values():
            assert pickle.loads(pickle.dumps(metric)) == metric

    @pytest.mark.parametrize("name", list(list_metrics()))
    def test_means_of_many_resamples_are_combined_one_by_one(self, name):
        metric = list_metrics()[name]
        means = np.random.default_rng(0).random((4, len(metric.columns)))
        found = metric.combine(means)
        assert found.shape == (4,)
        np.testing.assert_array_equal(found, [metric.combine(one) for one in means])

    def test_a_row_names_the_values_of_an_image(self):
        assert row(("a", "b"), [1, 2]) == {"a": 1.0, "b": 2.0}
        with pytest.raises(MetricError, match="2 columns"):
            row(("a", "b"), [1])

    def test_token_f1_is_averaged_over_its_sizes(self):
        assert average_token_f1((10, 20)).combine(np.array([0.2, 0.4])) == pytest.approx(0.3)


@pytest.mark.parametrize("measure", [per.drops, per.aopc, per.log_odds])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0.9, 0.8, 0.7], [0.5, 0.4, 0.3]),  # one step without its axis: numpy would take all pairs of images
        ([0.9, 0.8, 0.7], np.full((4, 3), 0.5)),  # steps first
        ([0.9, 0.8], np.full((3, 4), 0.5)),
        (0.9, 0.5),
    ],
)
def test_every_image_has_its_own_steps(measure, before, after):
    with pytest.raises(MetricError, match="every step"):
        measure(before, after)
