"""Bootstrap intervals, paired tests and ranks: coverage of known truths, pairing, missing images, bounded memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitreous.evaluation.statistics import Resamples, estimates, paired, standings, two_sided
from vitreous.metrics import MetricError
from vitreous.metrics import segmentation as seg
from vitreous.metrics.metric import mean_of
from vitreous.metrics.perturbation import NINE, accuracy_auc

SCORE = mean_of("score", "score", "higher", (-np.inf, np.inf), "A score.")
LOSS = mean_of("score", "loss", "lower", (-np.inf, np.inf), "A loss.")
COLUMNS = ("score",)


def column(values) -> np.ndarray:
    return np.asarray(values, dtype=float)[:, None]


class TestEstimates:
    def test_the_mean_is_the_metric_of_all_images(self):
        counts = np.random.default_rng(0).integers(1, 50, (30, 4)).astype(float)
        (found,) = estimates({"a": counts}, seg.COUNTS, [seg.mean_iou()])
        assert found.mean == pytest.approx(float(seg.mean_iou().combine(counts.mean(axis=0))), abs=1e-12)
        assert found.low < found.mean < found.high
        assert (found.method, found.metric, found.n) == ("a", "mIoU", 30)

    @pytest.mark.parametrize("kind", ["mean", "ratio"])
    def test_a_95_percent_interval_covers_the_truth_about_that_often(self, kind):
        # 300 data sets of 80 images. Their coverage has a standard deviation of 1.3%, and a percentile interval of 80
        # skewed values is known to cover some 1% less than it promises: 90% to 98.5% is three of those away.
        random = np.random.default_rng(1)
        metric, truth = (SCORE, 1.0) if kind == "mean" else (seg.pixel_accuracy(), None)
        covered = 0
        for seed in range(300):
            if kind == "mean":
                values = column(random.exponential(size=80))
                columns = COLUMNS
            else:
                # Background pixels right with 0.7, and images of very different sizes: pixel accuracy is a ratio.
                pixels = random.integers(10, 1000, 80)
                right = random.binomial(pixels, 0.7)
                values = np.stack([right, 0 * right, pixels, pixels - right], axis=1).astype(float)
                columns, truth = seg.COUNTS, 0.7
            (found,) = estimates({"a": values}, columns, [metric], resamples=400, seed=seed)
            covered += found.low <= truth <= found.high
        assert 0.90 < covered / 300 < 0.985

    def test_the_interval_is_that_of_the_plain_bootstrap(self):
        values = np.random.default_rng(0).normal(size=50)
        (found,) = estimates({"a": column(values)}, COLUMNS, [SCORE], resamples=500, seed=7)
        random = np.random.default_rng(7)
        means = [values[random.integers(0, 50, 50)].mean() for _ in range(500)]
        np.testing.assert_allclose((found.low, found.high), np.quantile(means, [0.025, 0.975]), atol=1e-12)

    def test_the_same_seed_gives_the_same_numbers_and_methods_share_resamples(self):
        values = column(np.random.default_rng(0).normal(size=40))
        both = estimates({"a": values, "b": values}, COLUMNS, [SCORE])
        assert both[0].low == both[1].low
        assert both == estimates({"a": values, "b": values}, COLUMNS, [SCORE])
        assert both != estimates({"a": values, "b": values}, COLUMNS, [SCORE], seed=1)

    def test_an_image_with_a_missing_number_does_not_count(self):
        values = column([1.0, 2.0, np.nan, 3.0, np.inf])
        (found,) = estimates({"a": values}, COLUMNS, [SCORE])
        assert (found.mean, found.n) == (2.0, 3)

    def test_one_missing_column_takes_the_image_out_of_that_metric_only(self):
        other = mean_of("other", "other", "higher", (0, 9), "Another.")
        table = np.array([[1.0, np.nan], [3.0, 5.0]])
        found = estimates({"a": table}, ("score", "other"), [SCORE, other])
        assert [(one.mean, one.n) for one in found] == [(2.0, 2), (5.0, 1)]

    def test_one_image_has_a_mean_and_no_interval(self):
        (found,) = estimates({"a": column([np.nan, 0.5, np.nan])}, COLUMNS, [SCORE])
        assert (found.mean, found.n) == (0.5, 1)
        assert np.isnan([found.low, found.high]).all()
        (two,) = estimates({"a": column([0.25, 0.5, np.nan])}, COLUMNS, [SCORE])
        assert (two.low, two.high) == (0.25, 0.5)

    def test_nothing_measured_is_no_number(self):
        (found,) = estimates({"a": column([np.nan, np.nan])}, COLUMNS, [SCORE])
        assert np.isnan([found.mean, found.low, found.high]).all()
        assert found.n == 0

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(MetricError, match="needs the column"):
            estimates({"a": np.ones((3, 4))}, seg.COUNTS, [SCORE])
        with pytest.raises(MetricError, match="cannot be compared"):
            estimates({"a": np.ones((3, 1)), "b": np.ones((2, 1))}, COLUMNS, [SCORE])
        with pytest.raises(MetricError, match=r"not \(images, 1\)"):
            estimates({"a": np.ones(3)}, COLUMNS, [SCORE])
        with pytest.raises(MetricError, match="needs images"):
            estimates({"a": np.ones((0, 1))}, COLUMNS, [SCORE])


class TestResamples:
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(st.integers(1, 300), st.integers(0, 5))
    def test_every_resample_draws_as_many_images_as_there_are(self, images, seed):
        drawn = Resamples(images, 20, seed)
        np.testing.assert_array_equal(drawn.sums(np.ones((images, 1))), np.full((20, 1), float(images)))

    def test_memory_for_50000_images_is_bounded(self):
        # 200 resamples of 50,000 images would be 80 MB as float64; kept are 10 MB, and 34 MB are converted at once.
        values = np.ones((50_000, 4))
        tracemalloc.start()
        try:
            Resamples(50_000, 200).sums(values)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 60e6


class TestPaired:
    def test_a_small_constant_difference_is_seen_though_the_images_vary_much(self):
        random = np.random.default_rng(0)
        base = random.normal(scale=10, size=100)
        values = {"a": column(base + 0.5 + random.normal(scale=0.1, size=100)), "b": column(base)}
        found = paired(values, COLUMNS, SCORE, "a", "b")
        assert found.difference == pytest.approx(0.5, abs=0.05)
        assert 0.4 < found.low < found.high < 0.6
        assert found.p < 0.01
        alone = estimates(values, COLUMNS, [SCORE])
        assert alone[0].low < alone[1].mean, "without pairing the intervals overlap"

    def test_the_other_way_round_is_the_negative(self):
        values = {name: column(np.random.default_rng(seed).normal(size=60)) for seed, name in enumerate("ab")}
        one, other = paired(values, COLUMNS, SCORE, "a", "b"), paired(values, COLUMNS, SCORE, "b", "a")
        assert one.difference == -other.difference
        np.testing.assert_allclose((one.low, one.high), (-other.high, -other.low), atol=1e-12)
        assert one.p == other.p

    def test_equal_methods_have_p_1(self):
        values = column(np.random.default_rng(0).normal(size=30))
        assert paired({"a": values, "b": values}, COLUMNS, SCORE, "a", "b").p == 1

    def test_only_images_that_count_for_both_are_compared(self):
        values = {"a": column([1.0, 2.0, np.nan, 4.0]), "b": column([0.0, 1.0, 50.0, np.nan])}
        found = paired(values, COLUMNS, SCORE, "a", "b")
        assert (found.difference, found.n) == (1.0, 2)

    def test_without_a_difference_p_is_spread_evenly(self):
        random = np.random.default_rng(5)
        small = 0
        for seed in range(200):
            values = {name: column(random.normal(size=60)) for name in "ab"}
            small += paired(values, COLUMNS, SCORE, "a", "b", resamples=300, seed=seed).p < 0.1
        # 10% of 200 is 20, with a standard deviation of 4.2; three of those to either side.
        assert 8 <= small <= 33

    def test_exact_ties_of_resamples_count_on_both_sides(self):
        """Accuracies of nine steps lie on a lattice, on which integers tell ties exactly."""
        random = np.random.default_rng(3)
        columns = tuple(f"hit_{step}" for step in range(10, 100, 10))
        one, other = random.integers(0, 2, (2, 40, 9)).astype(float)
        area = accuracy_auc("", NINE, "mean", direction="higher")
        exact = Resamples(40).sums((one.sum(axis=1) - other.sum(axis=1))[:, None])[:, 0]
        assert (exact == 0).mean() > 0.01  # there are ties to lose
        found = paired({"one": one, "other": other}, columns, area, "one", "other")
        assert found.p == two_sided(exact, 40)

    def test_p_is_never_zero(self):
        assert two_sided(np.ones(999), 50_000) == pytest.approx(2 / 1000)
        assert two_sided(np.full(3, np.nan), 9) == 1

    @pytest.mark.parametrize("images", range(1, 9))
    def test_few_images_prove_no_more_than_their_signs(self, images):
        """Differences that all have one sign: a test that flips signs has p = 2 / 2^n, the same at every seed."""
        values = {"a": column(np.linspace(0.51, 0.9, images)), "b": column(np.linspace(0.5, 0.8, images))}
        # An image that one of the two lacks does not make the sample larger.
        values = {name: np.concatenate([some, column([np.nan] * 20)]) for name, some in values.items()}
        found = paired(values, COLUMNS, SCORE, "a", "b")
        assert found.n == images
        assert found.p == pytest.approx(2 / 2**images)
        assert np.isnan([found.low, found.high]).all() == (images == 1)


def ranking(values, metric=SCORE) -> dict[str, int]:
    return {name: standing.rank for name, standing in standings(values, COLUMNS, metric).items()}


class TestStandings:
    def values(self):
        random = np.random.default_rng(0)
        base = random.normal(size=200)
        noise = lambda: random.normal(scale=0.1, size=200)  # noqa: E731
        return {
            "worst": column(base - 2 + noise()),
            "good": column(base + 1 + noise()),
            "as good": column(base + 1 + noise()),
            "middle": column(base + noise()),
        }

    def test_ranks_go_by_means_and_what_nothing_tells_apart_is_tied_with_the_best(self):
        found = standings(self.values(), COLUMNS, SCORE)
        assert {name: one.rank for name, one in found.items()} == {"good": 1, "as good": 2, "middle": 3, "worst": 4}
        assert {name for name, one in found.items() if one.tied} == {"good", "as good"}
        assert list(found) == ["good", "as good", "middle", "worst"]

    def test_lower_may_be_better(self):
        assert ranking(self.values(), LOSS) == {"worst": 1, "middle": 2, "as good": 3, "good": 4}

    def test_high_variance_is_not_rewarded(self):
        """A worse mean that nothing tells apart from the best does not pass a better one that is told apart."""
        base = np.zeros(50)
        wild = np.where(np.arange(50) % 2 == 0, 5.0, -5.2)
        found = standings({"best": column(base), "close": column(base - 0.01), "wild": column(wild)}, COLUMNS, SCORE)
        assert [(name, one.rank, one.tied) for name, one in found.items()] == [
            ("best", 1, True),
            ("close", 2, False),
            ("wild", 3, True),
        ]

    def test_equal_means_share_a_rank(self):
        values = {"a": column([0.1, 0.3]), "b": column([0.3, 0.1]), "c": column([0.0, 0.1])}
        assert ranking(values) == {"a": 1, "b": 1, "c": 3}

    @pytest.mark.parametrize(("images", "tied"), [(1, True), (2, True), (5, True), (6, False)])
    def test_few_images_tell_nothing_apart(self, images, tied):
        """Of n paired images that all say the same, p is 2 / 2^n: below 0.05 from six images on."""
        base = np.linspace(0.0, 1.0, images)
        found = standings({"better": column(base + 0.01), "worse": column(base)}, COLUMNS, SCORE)
        assert {name: one.rank for name, one in found.items()} == {"better": 1, "worse": 2}
        assert (found["better"].tied, found["worse"].tied) == (True, tied)

    def test_a_method_without_numbers_is_not_ranked(self):
        assert ranking({"a": column([np.nan])}) == {}
        assert ranking(self.values() | {"nothing": column([np.nan] * 200)}) == ranking(self.values())

    def test_a_metric_without_a_direction_does_not_rank(self):
        neutral = mean_of("score", "x", None, (0, 1), "Neither.")
        with pytest.raises(MetricError, match="no better direction"):
            ranking(self.values(), neutral)

    @pytest.mark.parametrize("metric", [SCORE, LOSS])
    def test_every_method_is_compared_with_the_best_by_the_paired_test(self, metric):
        values = self.values()
        found = standings(values, COLUMNS, metric)
        best = next(name for name, standing in found.items() if standing.against_best is None)
        means = {name: float(table.mean()) for name, table in values.items()}
        assert best == (max if metric is SCORE else min)(means, key=means.get)
        for name in values.keys() - {best}:
            assert found[name].against_best == paired(values, COLUMNS, metric, name, best)
            assert found[name].tied == (found[name].against_best.p >= 0.05)

    @pytest.mark.parametrize("images", [2, 5, 6, 8])
    def test_a_constant_difference_has_a_closed_form(self, images):
        """Every image, so every resample, says the same: the interval is a point, and p that of n equal signs."""
        base = np.arange(images) / 4  # exact, so that no rounding stands between the two
        compared = standings({"a": column(base - 0.25), "b": column(base)}, COLUMNS, SCORE)["a"].against_best
        assert (compared.first, compared.second, compared.n) == ("a", "b", images)
        # Means over resamples are rounded where the number of images is no power of two.
        assert (compared.difference, compared.low, compared.high) == pytest.approx([-0.25] * 3, abs=1e-12)
        assert compared.p == pytest.approx(2 / 2**images)
