"""What a report makes of numbers: orders, curves, charts and pictures, on three images with numbers made up by hand."""

from __future__ import annotations

import html
import math
import re
from typing import ClassVar

import numpy as np
import pytest

from invented_runs import invented_results
from vitreous.evaluation.report.figures import (
    Curves,
    Extreme,
    curves_chart,
    curves_of,
    dots_chart,
    extremes_of,
    sweeps_of,
)
from vitreous.evaluation.report.overall import agreement_grid, overall_results, pareto_front
from vitreous.evaluation.report.page import MethodStyles, write_page
from vitreous.evaluation.report.results import summarise
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


class TestDots:
    @staticmethod
    def rows_of(chart):
        """The label, the place of the dot and the written mean of every row, from the top down."""
        return [
            (name, None if not x else float(x), text)
            for name, x, text in re.findall(
                r"<g class=.*?<text [^>]*>([^<]+)</text>.*?(?:<circle cx=\"(\S+?)\".*?)?<text [^>]*>([^<]+)</text></g>",
                chart,
                re.DOTALL,
            )
        ]

    def test_every_method_has_its_row_from_the_best_to_the_worst(self, tmp_path):
        table = summarise(invented_results(tmp_path, (PRECISION, ERROR, SIZE), NUMBERS))
        rows = self.rows_of(dots_chart(table, PRECISION, {}))
        assert [(name, text) for name, _, text in rows] == [("three", "80.00"), ("one", "50.00"), ("two", "20.00")]
        places = [x for _, x, _ in rows]
        assert places[0] - places[1] == pytest.approx(places[1] - places[2], abs=0.11)  # rounded to a tenth of a pixel
        assert [name for name, _, _ in self.rows_of(dots_chart(table, ERROR, {}))] == ["one", "three", "two"]

    def test_none_of_many_methods_vanishes_and_random_is_a_line(self):
        means = {f"method {number}": number / 100 for number in range(60)} | {"random": 0.2}
        estimates = [Estimate(name, "precision", mean, mean - 0.05, mean + 0.05, 9) for name, mean in means.items()]
        estimates.append(Estimate("broken", "precision", math.nan, math.nan, math.nan, 0))
        chart = dots_chart(ResultTable("many", (PRECISION,), estimates), PRECISION, MethodStyles())
        rows = self.rows_of(chart)
        assert {name for name, _, _ in rows} == {f"method {number}" for number in range(60)} | {
            "random (control)",
            "broken",
        }
        assert rows[-1] == ("broken", None, "not measured")
        (reference,) = re.findall(r'class="reference" x1="(\S+?)"', chart)
        assert float(reference) == {name: x for name, x, _ in rows}["random (control)"]
        assert "nan" not in chart


class TestMethodStyles:
    def test_a_method_has_one_style_and_no_other_has_it(self):
        styles = MethodStyles()
        names = [f"m{number}" for number in range(24)]
        first = [styles[name] for name in names]
        assert len(set(first)) == 24
        assert [styles[name] for name in reversed(names)] == first[::-1]
        assert styles["m24"] == "other"
        assert (styles["random"], styles["oracle:steps=4"]) == ("control", "control")

    def test_it_is_the_same_in_all_runs_of_a_report(self, tmp_path):
        area = accuracy_auc("", (0.1, 0.2, 0.3), direction="lower")

        def run(folder, better, worse):
            heights = {better: (0, 0, 0), worse: (1, 1, 1)}
            numbers = {m: {f"hit_{step}": heights[m] for step in (10, 20, 30)} for m in ("one", "two")}
            return invented_results(tmp_path / folder, (area,), numbers)

        page = write_page([run("first", "one", "two"), run("second", "two", "one")], pictures=0)
        for name in ("one", "two"):
            drawn = re.findall(rf'<polyline [^>]*class="line ([^"]+)"[^>]*><title>{name}</title>', page)
            assert len(drawn) == 2
            assert len(set(drawn)) == 1


class TestOverall:
    ONE: ClassVar = {"a": {"x": (3, 3)}, "b": {"x": (2, 2)}, "c": {"x": (1, 1)}, "random": {"x": (0, 0)}}
    OTHER: ClassVar = {"a": {"y": (5, 5)}, "b": {"y": (1, 1)}, "c": {"y": (3, 3)}, "random": {"y": (9, 9)}}
    X = mean_of("x", "x", "higher", (0.0, 9.0), "Higher is better.")
    Y = mean_of("y", "y", "lower", (0.0, 9.0), "Lower is better.")

    def found(self, tmp_path):
        where = invented_results(tmp_path / "1", (self.X,), self.ONE, protocol="where", purpose="localisation")
        what = invented_results(tmp_path / "2", (self.Y,), self.OTHER, protocol="what", purpose="faithfulness")
        return [(results, summarise(results)) for results in (where, what)]

    def test_ranks_are_averaged_and_their_spread_is_the_disagreement(self, tmp_path):
        (overall,) = overall_results(self.found(tmp_path))
        rows = {row.method: row for row in overall.rows}
        assert [row.method for row in overall.rows] == ["b", "a", "c"]  # mean ranks 1.5, 2 and 2.5; no control
        assert (rows["b"].rank, rows["b"].disagreement) == (1.5, 0.5)
        assert (rows["a"].rank, rows["a"].disagreement) == (2.0, 1.0)
        assert rows["a"].of_protocol == {"where": 1.0, "what": 3.0}

    def test_the_front_has_what_no_other_beats_in_both(self, tmp_path):
        (overall,) = overall_results(self.found(tmp_path))
        assert {row.method for row in overall.rows if row.on_front} == {"a", "b"}

    def test_it_is_on_the_page_and_alone_a_run_has_none(self, tmp_path):
        found = self.found(tmp_path)
        assert "Overall, timm/some" in write_page([results for results, _ in found], pictures=0)
        assert overall_results(found[:1]) == []

    def test_a_point_is_dominated_by_one_that_is_better_somewhere_and_worse_nowhere(self):
        points = np.array([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [0.0, 3.0]])
        assert pareto_front(points).tolist() == [False, True, True, True, True]
        assert not pareto_front(np.array([[1.0, np.nan], [2.0, 1.0]])).any()

    def test_columns_are_compared_by_how_they_rank_methods(self, tmp_path):
        numbers = {name: {**self.ONE[name], **self.OTHER[name]} for name in ("a", "b", "c")}
        table = summarise(invented_results(tmp_path, (self.X, self.Y), numbers))
        headings, rows = agreement_grid(table)
        assert headings == ["", "x", "y"]
        # By x: a, b, c; by y, of which lower is better: b, c, a. Spearman: 1 - 6 (4 + 1 + 1) / (3 (9 - 1)).
        assert rows == [["x", "1.00", "-0.50"], ["y", "-0.50", "1.00"]]


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
        (found,) = curves_of(self.results(tmp_path), percent=False)
        assert (found.title, found.axis, found.steps) == ("positive, accuracy", "share erased (%)", (0, 50, 100))
        assert found.lines == {"one": pytest.approx((1, 2 / 3, 1 / 3)), "two": pytest.approx((2 / 3, 1 / 3, 0))}

    def test_an_image_that_one_method_could_not_be_measured_on_counts_for_none(self, tmp_path):
        (found,) = curves_of(self.results(tmp_path, failing={"two": [2]}), percent=False)
        assert found.lines == {"one": pytest.approx((1, 1 / 2, 0)), "two": pytest.approx((1, 0, 0))}

    def test_of_two_metrics_of_one_curve_the_longer_one_is_drawn(self, tmp_path):
        names = [f"positive_hit_{step}" for step in (0, 10, 20, 30)]
        numbers = {"one": dict.fromkeys(names, (1, 0, 1))}
        metrics = [
            accuracy_auc("positive_", ratios, direction="lower") for ratios in ((0.1, 0.2, 0.3), (0, 0.1, 0.2, 0.3))
        ]
        (found,) = curves_of(invented_results(tmp_path, metrics, numbers, columns=tuple(names)))
        assert found.steps == (0, 10, 20, 30)

    def test_random_has_a_band_around_its_mean(self, tmp_path):
        columns = self.NAMES[1:]
        numbers = {m: dict.fromkeys(columns, (0, 1, 1, 0, 1)) for m in ("one", "random")}
        area = accuracy_auc("positive_", (0, 0.5, 1), direction="lower")
        results = invented_results(tmp_path, (area,), numbers, columns=columns)
        (found,) = curves_of(results)
        assert list(curves_of(results, ["one"])[0].bands) == ["one", "random"]
        assert list(found.bands) == ["random"]
        low, high = found.bands["random"]
        assert all(one <= mean <= other for one, mean, other in zip(low, found.lines["random"], high, strict=True))
        assert low[0] < 60 < high[0]  # in percent, as the metric
        assert found.title.endswith("(%)")
        chart = curves_chart(found, {})
        assert len(points_of(chart, "polygon", "random, 95% interval")) == 2 * len(found.steps)


class TestSweeps:
    def test_a_metric_is_drawn_over_the_layers_that_methods_start_at(self):
        means = {"raw.plus:start=10": 0.6, "raw.plus:start=2": 0.4, "gae": 0.9, "raw.plus:start=0": 0.5}
        estimates = [Estimate(method, "precision", mean, 0, 1, 3) for method, mean in means.items()]
        (found,) = sweeps_of(estimates)
        assert found == Curves("precision", "start", (0, 2, 10), {"raw.plus, start varies": (0.5, 0.4, 0.6)})

    def test_ablations_of_depth_are_drawn(self):
        """GradToken's Fig. 11."""
        estimates = [Estimate(f"gradtoken:depth={depth}", "mIoU", depth / 10, 0, 1, 3) for depth in range(3)]
        (found,) = sweeps_of(estimates)
        assert found == Curves("mIoU", "depth", (0, 1, 2), {"gradtoken, depth varies": (0.0, 0.1, 0.2)})

    def test_other_options_stay_in_the_name(self):
        for spelling in ("gae:start={},rule=libra", "gae:rule=libra,start={}"):
            estimates = [Estimate(spelling.format(layer), "mIoU", 0.5, 0, 1, 3) for layer in range(3)]
            assert list(sweeps_of(estimates)[0].lines) == ["gae:rule=libra, start varies"]

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
        sweeps = page.partition(">Metrics over a number in the spelling</h3>")[2].partition("<h3")[0]
        charts = dict(re.findall(r"<figcaption>([^<]+)</figcaption>(<svg.*?</svg>)", sweeps, re.DOTALL))
        assert list(charts) == ["precision (%)", "error", "size"]
        heights = [y for _, y in points_of(charts["precision (%)"], "polyline", "decompx.plus, start varies")]
        assert heights[2] < heights[0] < heights[1]  # 0.8, 0.5 and 0.2, and the page's y goes down
        images = page.partition(">Best and worst images</h3>")[2].partition("<details>")[0]
        shown = re.findall(r"<h4>(best|worst).*?</h4>.*?(\d\.png · \S+?)</div>", images)
        assert shown == [  # methods as in the table: three, one, two
            *(("best", "0.png · 100.00%"), ("worst", "2.png · 60.00%")),
            *(("best", "2.png · 90.00%"), ("worst", "1.png · 0.00%")),
            *(("best", "2.png · 30.00%"), ("worst", "0.png · 10.00%")),
        ]

    def test_curves_and_dots_are_shown(self, tmp_path):
        columns = ("precision", "error_left", "hit_10", "hit_20", "hit_30")
        numbers = {
            method: {name: NUMBERS[method].get(name, (0, 1, 1)) for name in columns} for method in ("one", "two")
        }
        metrics = (PRECISION, ERROR, accuracy_auc("", (0.1, 0.2, 0.3), direction="lower"))
        page = write_page([invented_results(tmp_path, metrics, numbers)], pictures=0)
        curves = page.partition(">Curves</h3>")[2].partition("<h3")[0]
        assert curves.count("<polyline") == 2
        dots = page.partition(">Means and intervals</h3>")[2].partition("<h3")[0]
        assert dots.count("<circle") == 2 * len(metrics)
        assert "Best and worst" not in page

    def test_a_page_begins_with_what_was_found_and_its_contents(self, tmp_path):
        page = write_page([invented_results(tmp_path, (PRECISION, ERROR, SIZE), NUMBERS)], pictures=0)
        (summary,) = re.findall(r'<p class="summary">(.*?)</p>', page)
        assert summary.startswith("3 methods on 3 images: three has the best precision, 80.00% (95% interval")
        links = re.findall(r'<a href="#([^"]+)">', page)
        assert links
        assert all(f'id="{link}"' in page for link in links)
        assert page.index('class="summary"') < page.index('class="contents"') < page.index("<table")

    def test_a_page_can_be_printed(self, tmp_path):
        page = write_page([invented_results(tmp_path, (PRECISION, ERROR, SIZE), NUMBERS)], pictures=0)
        assert "@media print" in page
        assert page.count("<thead>") == page.count("<table") > 1  # so that headings are repeated on every sheet

    def test_names_of_methods_stay_text(self, tmp_path):
        hostile = "<script>alert(1)</script>&\"'"
        values = {hostile: NUMBERS["one"], "two": NUMBERS["two"]}
        page = write_page([invented_results(tmp_path, (PRECISION, ERROR, SIZE), values)], pictures=1)
        assert "<script" not in page
        # In the summary, in both tables, above its images, and twice in each of two charts.
        assert html.unescape(page).count(hostile) == 4 + 4
