"""What a report makes of numbers: orders, curves, charts and pictures, on three images with numbers made up by hand."""

from __future__ import annotations

import html
import math
import re

import pytest

from invented_runs import invented_results
from vitreous.evaluation.report.images import Extreme, extremes_of
from vitreous.evaluation.report.page import leaders, radar_of, write_page
from vitreous.evaluation.report.results import summarise
from vitreous.evaluation.report.svg import Curves, curves_chart, curves_of, radar_chart, sweeps_of
from vitreous.evaluation.report.tables import ResultTable
from vitreous.evaluation.statistics import Estimate
from vitreous.metrics.metric import mean_of
from vitreous.metrics.perturbation import accuracy_auc

PRECISION = mean_of("precision", "precision", "higher", (0.0, 1.0), "Higher is better.")
ERROR = mean_of("error_left", "error", "lower", (0.0, 9.0), "Lower is better.")
SIZE = mean_of("size", "size", None, (0.0, 9.0), "Neither way is better.")

# The means are 0.5, 0.2 and 0.8; 2, 6 and 3; 1, 1 and 1.
NUMBERS = {
    "one": {"precision": (0.6, 0.0, 0.9), "error_left": (1, 2, 3), "size": (0, 1, 2)},
    "two": {"precision": (0.1, 0.2, 0.3), "error_left": (5, 9, 4), "size": (1, 1, 1)},
    "three": {"precision": (1.0, 0.8, 0.6), "error_left": (4, 3, 2), "size": (2, 1, 0)},
}
STARTS = [f"decompx.plus:start={layer}" for layer in (0, 1, 2)]


def points_of(chart: str, shape: str, name: str) -> list[tuple[float, float]]:
    """The corners of a line or shape in a drawing, by its title."""
    (points,) = re.findall(rf'<{shape} [^>]*points="([^"]+)"><title>{re.escape(name)}</title>', chart)
    return [tuple(map(float, pair.split(","))) for pair in points.split()]


def places_of_texts(chart: str) -> dict[str, tuple[float, float]]:
    return {text: (float(x), float(y)) for x, y, text in re.findall(r'<text x="(\S+)" y="(\S+)"[^>]*>([^<]+)<', chart)}


class TestRadar:
    def test_the_best_is_at_the_rim_whichever_way_is_better(self, tmp_path):
        table = summarise(invented_results(tmp_path, (PRECISION, ERROR, SIZE), NUMBERS))
        axes, shapes = radar_of(table, ["one", "two", "three"])
        assert axes == ["precision", "error"]  # no value of the size is the best
        assert shapes["one"] == pytest.approx([0.5, 1.0])  # (0.5 - 0.2) / (0.8 - 0.2); the lowest error
        assert shapes["two"] == pytest.approx([0.0, 0.0])
        assert shapes["three"] == pytest.approx([1.0, 0.75])  # 1 - (3 - 2) / (6 - 2)

    def test_axes_reach_over_all_methods_not_only_those_shown(self, tmp_path):
        table = summarise(invented_results(tmp_path, (PRECISION, ERROR), NUMBERS))
        assert radar_of(table, ["one"])[1] == {"one": pytest.approx([0.5, 1.0])}

    def test_shapes_reach_out_from_the_centre_the_first_axis_upwards(self):
        chart = radar_chart(["a", "b", "c", "d"], {"m": [1.0, 0.5, 0.0, 0.2]}, {})
        # The centre is (165, 165), the rim 125 away; axes go round as the hands of a clock.
        assert points_of(chart, "polygon", "m") == [(165, 40), (227.5, 165), (165, 165), (140, 165)]


class TestExtremes:
    def test_best_and_worst_follow_the_direction(self, tmp_path):
        results = invented_results(tmp_path, (ERROR, PRECISION), NUMBERS)
        higher, lower = (extremes_of(results, (metric,), ["one"], 3)[0] for metric in (PRECISION, ERROR))
        # Of three images no more than one can be the best without being among the worst.
        assert (higher.best, higher.worst) == ((Extreme(2, "2.png", 0.9),), (Extreme(1, "1.png", 0.0),))
        assert (lower.best, lower.worst) == ((Extreme(0, "0.png", 1.0),), (Extreme(2, "2.png", 3.0),))

    def test_the_metric_is_the_first_that_has_a_better_way(self, tmp_path):
        results = invented_results(tmp_path, (SIZE, ERROR, PRECISION), NUMBERS)
        (found,) = extremes_of(results, (SIZE, ERROR, PRECISION), ["two"], 1)
        assert found.metric == ERROR
        assert [image.name for image in (*found.best, *found.worst)] == ["2.png", "1.png"]

    def test_the_worst_of_all_comes_first_among_the_worst(self, tmp_path):
        values = {"m": {"precision": (0.3, 0.1, 0.9, 0.5)}}
        (found,) = extremes_of(invented_results(tmp_path, (PRECISION,), values), (PRECISION,), ["m"], 2)
        assert [image.value for image in found.best] == [0.9, 0.5]
        assert [image.value for image in found.worst] == [0.1, 0.3]


class TestLeaders:
    @staticmethod
    def table(ranks):
        estimates = [Estimate(method, "precision", 0.5, 0.4, 0.6, 3) for method in ("one", "two", "three")]
        return ResultTable("made up", (PRECISION, ERROR), estimates, ranks)

    def test_the_lowest_mean_rank_is_first(self):
        ranks = {"precision": {"one": 2, "two": 3, "three": 1}, "error": {"one": 1, "two": 3, "three": 3}}
        assert leaders(self.table(ranks)) == ["one", "three", "two"]  # mean ranks 1.5, 2 and 3

    def test_equal_ones_and_those_without_ranks_stay_in_their_order(self):
        assert leaders(self.table({})) == ["one", "two", "three"]
        ranks = {"precision": {"three": 1, "two": 2, "one": 1}}
        assert leaders(self.table(ranks)) == ["one", "three", "two"]

    def test_who_has_no_rank_is_last(self):
        assert leaders(self.table({"precision": {"two": 1, "three": 2}})) == ["two", "three", "one"]


class TestCurves:
    NAMES = ("precision", *(f"positive_hit_{step}" for step in (0, 50, 100)))  # as steps, not as text: 100 is last

    def results(self, tmp_path, **options):
        values = {
            "one": ((0, 0, 0), (1, 1, 1), (1, 0, 1), (0, 0, 1)),
            "two": ((0, 0, 0), (1, 1, 0), (0, 0, 1), (0, 0, 0)),
        }
        numbers = {method: dict(zip(self.NAMES, columns, strict=True)) for method, columns in values.items()}
        area = accuracy_auc("positive_", (0, 0.5, 1), direction="lower")
        return invented_results(tmp_path, (PRECISION, area), numbers, columns=self.NAMES, **options)

    def test_a_line_is_the_mean_over_images_at_every_step(self, tmp_path):
        (found,) = curves_of(self.results(tmp_path))
        assert (found.title, found.axis, found.steps) == ("positive, accuracy", "share erased (%)", (0, 50, 100))
        assert found.lines == {"one": pytest.approx((1, 2 / 3, 1 / 3)), "two": pytest.approx((2 / 3, 1 / 3, 0))}

    def test_an_image_that_one_method_could_not_be_measured_on_counts_for_none(self, tmp_path):
        (found,) = curves_of(self.results(tmp_path, failing={"two": [2]}))
        assert found.lines == {"one": pytest.approx((1, 1 / 2, 0)), "two": pytest.approx((1, 0, 0))}

    def test_of_two_metrics_of_one_curve_the_longer_one_is_drawn(self, tmp_path):
        names = [f"positive_hit_{step}" for step in (0, 10, 20, 30)]
        numbers = {"one": dict.fromkeys(names, (1, 0, 1))}
        metrics = [
            accuracy_auc("positive_", ratios, direction="lower") for ratios in ((0.1, 0.2, 0.3), (0, 0.1, 0.2, 0.3))
        ]
        (found,) = curves_of(invented_results(tmp_path, metrics, numbers, columns=tuple(names)))
        assert found.steps == (0, 10, 20, 30)


class TestSweeps:
    def test_a_metric_is_drawn_over_the_layers_that_methods_start_at(self):
        means = {"raw.plus:start=10": 0.6, "raw.plus:start=2": 0.4, "gae": 0.9, "raw.plus:start=0": 0.5}
        estimates = [Estimate(method, "precision", mean, 0, 1, 3) for method, mean in means.items()]
        (found,) = sweeps_of(estimates)
        assert found == Curves("precision", "start", (0, 2, 10), {"raw.plus:start=…": (0.5, 0.4, 0.6)})

    def test_ablations_of_depth_are_drawn(self):
        """GradToken's Fig. 11."""
        estimates = [Estimate(f"gradtoken:depth={depth}", "mIoU", depth / 10, 0, 1, 3) for depth in range(3)]
        (found,) = sweeps_of(estimates)
        assert found == Curves("mIoU", "depth", (0, 1, 2), {"gradtoken:depth=…": (0.0, 0.1, 0.2)})

    def test_two_layers_are_no_line(self):
        estimates = [Estimate(f"raw.plus:start={layer}", "precision", 0.5, 0, 1, 3) for layer in (0, 1)]
        assert sweeps_of(estimates) == []


class TestLineChart:
    def test_higher_numbers_stand_higher_and_beside_their_labels(self):
        chart = curves_chart(Curves("precision", "share", (0, 50, 100), {"m": (0.0, 1.0, 0.5)}), {})
        # From the lower left of the plot to its upper edge and half-way down at its right end.
        assert points_of(chart, "polyline", "m") == [(46, 208), (207, 12), (368, 110)]
        labels = places_of_texts(chart)
        assert labels["1"][1] < labels["0.5"][1]
        assert labels["1"][1] == pytest.approx(12, abs=5)  # letters stand a little below their line
        assert labels["0.5"][1] == pytest.approx(110, abs=5)

    def test_a_missing_height_leaves_a_gap_in_the_line(self):
        heights = (0.0, 0.5, math.nan, 0.5, 1.0)
        chart = curves_chart(Curves("precision", "share", (0, 1, 2, 3, 4), {"m": heights}), {})
        assert chart.count("<polyline") == 2
        assert "nan" not in chart


class TestPage:
    """The parts stand on the page, where readers find them."""

    def test_sweeps_and_images_are_shown(self, tmp_path):
        values = {method: NUMBERS[name] for method, name in zip(STARTS, NUMBERS, strict=True)}
        page = write_page([invented_results(tmp_path, (PRECISION, ERROR, SIZE), values)])
        sweeps = page.partition("Metrics over a number in the spelling")[2].partition("<h3>")[0]
        charts = dict(re.findall(r"<figcaption>(\w+)</figcaption>(<svg.*?</svg>)", sweeps, re.DOTALL))
        assert list(charts) == ["precision", "error", "size"]
        heights = [y for _, y in points_of(charts["precision"], "polyline", "decompx.plus:start=…")]
        assert heights[2] < heights[0] < heights[1]  # 0.8, 0.5 and 0.2, and the page's y goes down
        images = page.partition("<h3>Best and worst images")[2].partition("<details>")[0]
        shown = re.findall(r"<h4>(best|worst).*?</h4>.*?(\d\.png · \S+?)</div>", images)
        assert shown == [
            *(("best", "2.png · 0.9"), ("worst", "1.png · 0")),
            *(("best", "2.png · 0.3"), ("worst", "0.png · 0.1")),
            *(("best", "0.png · 1"), ("worst", "2.png · 0.6")),
        ]

    def test_curves_are_shown_and_a_radar_where_there_are_axes(self, tmp_path):
        columns = ("precision", "error_left", "hit_10", "hit_20", "hit_30")
        numbers = {
            method: {name: NUMBERS[method].get(name, (0, 1, 1)) for name in columns} for method in ("one", "two")
        }
        metrics = (PRECISION, ERROR, accuracy_auc("", (0.1, 0.2, 0.3), direction="lower"))
        page = write_page([invented_results(tmp_path, metrics, numbers)], pictures=0)
        curves = page.partition("<h3>Curves")[2].partition("<h3>")[0]
        assert curves.count("<polyline") == 2
        radar = page.partition("<h3>Radar")[2].partition("<h3>")[0]
        # With two methods the better one is at the rim of every axis that tells them apart.
        assert points_of(radar, "polygon", "one")[0] == (165, 40)
        assert points_of(radar, "polygon", "two")[0] == (165, 165)
        assert "Best and worst" not in page

    def test_names_of_methods_stay_text(self, tmp_path):
        hostile = "<script>alert(1)</script>&\"'"
        values = {hostile: NUMBERS["one"], "two": NUMBERS["two"]}
        page = write_page([invented_results(tmp_path, (PRECISION, ERROR, SIZE), values)], pictures=1)
        assert "<script" not in page
        assert html.unescape(page).count(hostile) == 3  # in both tables and above its images
