"""Runs read back together: only what compares, and only images that all methods were measured on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evaluations import PROTOCOL
from invented_runs import invented_results, invented_store
from vitreous.cli.evaluate import _main_cause
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.report.results import Failure, Results, discover_runs, summarise, title_of
from vitreous.evaluation.report.tables import as_rows
from vitreous.evaluation.run import RunError
from vitreous.evaluation.runner.measure import columns_of
from vitreous.metrics.metric import mean_of

PRECISION = mean_of("precision", "precision", "higher", (0.0, 1.0), "Higher is better.")
OTHERS = [
    {"weights": "other"},
    {"data_fingerprint": "other"},
    {"preprocessing": {"mean": (0.4, 0.5, 0.5)}},
    {"versions": {"vitreous": "2"}},
]


class TestTogether:
    @staticmethod
    def stores(folder, change):
        """A run of two methods and one of a third, with what was changed about it."""
        protocol = find_protocol(PROTOCOL)
        numbers = dict.fromkeys(columns_of(protocol), (1, 2, 3))
        same = {"protocol": PROTOCOL, "settings": protocol.settings()}
        first = invented_store(folder, {"one": numbers, "two": numbers}, **same)
        second = invented_store(folder, {"three": numbers}, **{**same, **change})
        return protocol, (first, second)

    @pytest.mark.parametrize("change", [*OTHERS, {"settings": {"version": 2}}])
    def test_runs_that_do_not_compare_are_refused(self, tmp_path, change):
        protocol, stores = self.stores(tmp_path, change)
        with pytest.raises(RunError, match="their numbers do not compare"):
            Results(stores, protocol)

    @pytest.mark.parametrize("change", OTHERS)
    def test_a_folder_of_such_runs_has_a_table_for_each(self, tmp_path, change):
        self.stores(tmp_path, change)
        assert sorted(results.methods for results in discover_runs(tmp_path, pytest.fail)) == [
            ("one", "two"),
            ("three",),
        ]

    def test_what_another_version_of_a_protocol_measured_is_left_out(self, tmp_path):
        self.stores(tmp_path, {"settings": {**find_protocol(PROTOCOL).settings(), "version": 0}})
        told = []
        (results,) = discover_runs(tmp_path, told.append)
        assert results.methods == ("one", "two")
        assert f"it was measured by another version of {PROTOCOL}" in " ".join(told)

    def test_methods_of_runs_that_compare_are_one_table(self, tmp_path):
        protocol, stores = self.stores(tmp_path, {"shard_size": 2, "data": "masks:/moved"})
        assert Results(stores, protocol).methods == ("one", "two", "three")
        (together,) = discover_runs(tmp_path, pytest.fail)
        assert sorted(together.methods) == ["one", "three", "two"]


NUMBERS = {name: {"precision": (0.1, 0.2, 0.6, 0.8)} for name in ("whole", "first", "second", "never")}
FAILING = {"first": [1], "second": [2], "never": [0, 1, 2, 3]}


class TestCounted:
    """An image that one method fails on counts for none; a method that fails on all images is left out."""

    def test_an_image_counts_where_all_measured_methods_were(self, tmp_path):
        results = invented_results(tmp_path, (PRECISION,), NUMBERS, FAILING)
        assert results.measured_methods == ("whole", "first", "second")
        assert results.counted.tolist() == [True, False, False, True]
        rows = {row["method"]: (row["n"], row["mean"]) for row in results.rows()}
        assert rows == dict.fromkeys(("whole", "first", "second"), (2, pytest.approx(0.45)))

    def test_the_title_says_how_many_could_not_be_measured(self, tmp_path):
        assert "2 images (2 could not be measured)" in title_of(
            invented_results(tmp_path / "some", (PRECISION,), NUMBERS, FAILING)
        )
        assert title_of(invented_results(tmp_path / "none", (PRECISION,), NUMBERS)).endswith(", 4 images")

    def test_a_method_that_takes_most_images_from_the_others_is_named(self, tmp_path):
        blamed = invented_results(tmp_path / "one", (PRECISION,), NUMBERS, {"first": [1], "second": [0, 1, 2]})
        assert _main_cause(blamed) == "; 2 of them fail only for second and would count without it"
        shared = invented_results(tmp_path / "two", (PRECISION,), NUMBERS, FAILING)
        assert _main_cause(shared) == ""

    def test_each_failure_is_told_of_its_method(self, tmp_path):
        results = invented_results(tmp_path, (PRECISION,), NUMBERS, FAILING)
        assert {method: np.flatnonzero(flags).tolist() for method, flags in results.failed.items()} == {
            "whole": [],
            **FAILING,
        }
        told = {(failure.image, failure.method) for failure in results.failures()}
        assert told == {(f"{image}.png", method) for method, images in FAILING.items() for image in images}

    def test_an_image_that_fails_with_all_methods_is_one_failure(self, tmp_path):
        results = invented_results(tmp_path, (PRECISION,), NUMBERS, {method: [2] for method in NUMBERS})
        assert results.failures() == [Failure("2.png", None, "broken")]

    def test_where_nothing_could_be_measured_nothing_counts(self, tmp_path):
        results = invented_results(tmp_path, (PRECISION,), NUMBERS, dict.fromkeys(NUMBERS, range(4)))
        assert not results.counted.any()
        assert results.rows() == []


class TestARunOfAnEarlierVersion:
    """tests/golden/earlier_run was computed and stored by the version before the package evaluation."""

    FOLDER = Path(__file__).parents[1] / "golden" / "earlier_run"

    def test_its_table_is_the_one_that_version_printed(self):
        (results,) = discover_runs(self.FOLDER, pytest.fail)
        assert results.finished
        expected = json.loads((self.FOLDER / "rows.json").read_text())
        places = {(row["method"], row["metric"]): place for place, row in enumerate(expected)}
        # That version kept the order of the methods, and ranked by tests.
        found = sorted(as_rows(summarise(results)), key=lambda row: places[row["method"], row["metric"]])
        assert [(row["method"], row["metric"], row["n"]) for row in found] == [
            (row["method"], row["metric"], row["n"]) for row in expected
        ]
        for row, known in zip(found, expected, strict=True):
            assert row.keys() - {"kind", "tied"} == known.keys()
            for name, value in known.items():
                if name == "rank":
                    continue
                # The same float64 numbers; another BLAS may add up the resamples in another order.
                assert row[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)

    def test_every_shard_is_whole(self):
        (results,) = discover_runs(self.FOLDER, pytest.fail)
        assert results.stores[0].missing(pytest.fail) == []
