"""Tables of results in every form: the best is marked, missing stays missing, published numbers stay apart."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from vitreous.evaluation.protocol import PUBLISHED, published_results
from vitreous.evaluation.report import tables
from vitreous.evaluation.report.page import as_csv
from vitreous.evaluation.report.tables import as_terminal
from vitreous.evaluation.statistics import Comparison, Estimate
from vitreous.metrics import list_metrics
from vitreous.metrics import perturbation as per
from vitreous.metrics import segmentation as seg
from vitreous.metrics.metric import mean_of

NAN = float("nan")
LOWER = per.accuracy_auc("positive_", direction="lower")
NEUTRAL = mean_of("x", "size", None, (0.0, 9.0), "Neither way better.")


@pytest.fixture
def table() -> tables.ResultTable:
    estimates = [
        Estimate("gae", "mIoU", 0.6, 0.58, 0.62, 500),
        Estimate("gae", "AUC positive", 20.0, 19.0, 21.0, 500),
        Estimate("gae", "size", 4.0, 3.0, 5.0, 500),
        Estimate("tokentm:a_b=50%,c|d", "mIoU", 0.5, 0.48, 0.52, 500),
        Estimate("tokentm:a_b=50%,c|d", "AUC positive", 15.0, 14.0, 16.0, 499),
        Estimate("raw", "mIoU", NAN, NAN, NAN, 0),
    ]
    published = published_results("chefer-2021-segmentation")
    return tables.ResultTable("pets & masks", [seg.mean_iou(), LOWER, NEUTRAL], estimates, published=published)


def terminal(table, width=200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(as_terminal(table, width))
    return console.export_text()


def test_the_best_follows_the_direction(table):
    assert table.best(seg.mean_iou()) == 0.6
    assert table.best(LOWER) == 15.0
    assert table.best(NEUTRAL) is None


def test_markdown_marks_the_best_and_escapes_cells(table):
    text = tables.as_markdown(table)
    assert "| method | mIoU (%) ↑ | AUC positive ↓ | size |" in text
    assert "| `gae` | **60.00 [58.00, 62.00]** | 20.00 [19.00, 21.00] | 4.000 [3.000, 5.000] |" in text
    assert r"| `tokentm:a_b=50%,c\|d` | 50.00 [48.00, 52.00] | **15.00 [14.00, 16.00]** | - |" in text
    assert "| `raw` | - | - | - |" in text


def test_latex_marks_the_best_and_escapes_names(table):
    text = tables.as_latex(table)
    assert r"\textbf{60.00 [58.00, 62.00]}" in text
    assert r"tokentm:a\_b=50\%,c\textbar{}d & 50.00" in text
    assert r"\caption{pets \& masks. Bold: best mean of its column;" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 2
    unescaped = re.findall(r"(?<!\\)[%#_]", text)
    assert not unescaped
    for line in text.splitlines():
        if line.startswith(("gae", "tokentm", "raw")):
            assert line.count("&") == 3


def test_latex_is_centred_and_every_table_has_a_label_of_its_own(table):
    text = tables.as_latex(compared(table), p_values=True)
    assert text.count(r"\begin{table}[t]" + "\n" + r"\centering" + "\n" + r"\caption{") == 3
    assert re.findall(r"\\label\{(.*)\}", text) == [
        "tab:pets-masks",
        "tab:pets-masks-p",
        "tab:pets-masks-published",
    ]
    for part in text.split("\n\n"):
        assert part.index(r"\caption") < part.index(r"\label") < part.index(r"\begin{tabular}")


def test_marks_are_explained_and_only_those_that_are_there(table, of_one_image):
    ranked = dataclasses.replace(table, tied={"mIoU": frozenset({"gae", "tokentm:a_b=50%,c|d"})})
    explained = (
        "Bold: best mean of its column; the arrow shows whether higher or lower is better. "
        "[low, high]: 95% bootstrap interval. "
        "≈: a paired test (p < 0.05) does not tell it apart from the best mean. Rows are sorted by mIoU. "
        "-: not measured."
    )
    assert tables.explain_marks(ranked) == explained
    assert f"\n\n{explained}\n" in tables.as_markdown(ranked)
    assert r"\approx" not in tables.as_latex(ranked)  # a table for print has no marks of ties
    assert "≈" not in tables.explain_marks(table)
    controlled = dataclasses.replace(
        table, estimates=[*table.estimates, Estimate("random", "mIoU", 0.3, 0.2, 0.4, 500)]
    )
    assert "Controls and ceilings stand below and are not compared." in tables.explain_marks(controlled)
    assert "95%" not in tables.explain_marks(of_one_image)
    assert "not measured" not in tables.explain_marks(of_one_image)
    neutral = tables.ResultTable("sizes", [NEUTRAL], [Estimate("gae", "size", 4.0, 3.0, 5.0, 500)])
    assert "Bold" not in tables.explain_marks(neutral)


def compared(table: tables.ResultTable) -> tables.ResultTable:
    other = Comparison("tokentm:a_b=50%,c|d", "gae", "mIoU", -0.1, -0.12, -0.08, 0.00123, 500)
    ranks = {"mIoU": {"gae": 1, other.first: 2}}
    return dataclasses.replace(table, ranks=ranks, against_best={"mIoU": {other.first: other}})


def test_p_values_are_a_table_of_their_own_on_request(table):
    given = compared(table)
    assert "paired bootstrap" not in tables.as_markdown(given) + tables.as_latex(given)
    markdown = tables.as_markdown(given, p_values=True)
    assert "p of a paired bootstrap against the method with the best mean" in markdown
    assert "| method | mIoU |\n| --- | ---: |\n| gae | best |\n" + r"| tokentm:a_b=50%,c\|d | 0.0012 |" in markdown
    assert "| raw | - |" in markdown
    latex = tables.as_latex(given, p_values=True)
    assert "gae & best \\\\\n" + r"tokentm:a\_b=50\%,c\textbar{}d & 0.0012 \\" in latex
    assert tables.as_markdown(table, p_values=True) == tables.as_markdown(table)  # nothing was tested


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_breaks_no_number(table, width):
    """Intervals go below their means, then metrics below each other; the longest method and a number take 38."""
    table = dataclasses.replace(table, published=(), tied={"mIoU": frozenset({"gae", "tokentm:a_b=50%,c|d"})})
    text = terminal(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for part in ("* 60.00", "≈", "[58.00, 62.00]", "[48.00, 52.00]", "* 15.00", "[14.00, 16.00]", "[3.000, 5.000]"):
        assert part in text
    assert text.count("tokentm:a_b=50%,c|d") == {40: 3, 60: 2, 80: 1, 120: 1}[width]
    assert ("60.00 [58.00" in text) == (width == 120)


def test_the_terminal_shows_the_best_without_colour(table):
    text = terminal(table)
    assert "* 60.00 [58.00, 62.00]" in text
    assert "* 15.00 [14.00, 16.00]" in text
    assert text.count("*") == 2


def test_json_rows_hold_the_numbers_as_they_are(table):
    rows = json.loads(json.dumps(tables.as_rows(table), allow_nan=False))
    shown = {"kind": "method", "metric": "mIoU"}
    assert rows[0] == {"method": "gae", **shown, "mean": 0.6, "low": 0.58, "high": 0.62, "n": 500}
    assert rows[-1] == {"method": "raw", **shown, "mean": None, "low": None, "high": None, "n": 0}
    assert len(rows) == 6


def test_csv_reads_back(table):
    lines = list(csv.DictReader(io.StringIO(as_csv([({}, table)]))))
    assert lines[3]["method"] == "tokentm:a_b=50%,c|d"
    assert (float(lines[3]["mean"]), lines[3]["n"]) == (0.5, "500")
    assert lines[-1]["mean"] == ""


def test_published_numbers_are_a_table_of_their_own(table):
    for text in (tables.as_markdown(table), tables.as_latex(table), terminal(table)):
        own, others = text.split("Published by others, not measured here (percent)")
        assert "81.79" in others
        assert "81.79" not in own
        assert "tokentm:" not in others
        assert "Wu et al." in others
        assert "ImageNet-Segmentation" in others  # whatever the own numbers were measured on
    assert "81.79" not in as_csv([({}, table)])
    assert "81.79" not in json.dumps(tables.as_rows(table))
    assert tables.published_as_rows(table)[0]["paper"].startswith("Wu et al.")
    assert tables.published_as_rows(table)[0]["data"] == "ImageNet-Segmentation"


def test_without_published_numbers_nothing_is_said_of_them(table):
    plain = tables.ResultTable(table.title, table.metrics, table.estimates)
    for text in (tables.as_markdown(plain), tables.as_latex(plain), terminal(plain)):
        assert "Published" not in text


def test_ranks_and_ties_are_in_the_rows_where_they_are_given(table):
    tied = {"mIoU": frozenset({"gae"})}
    ranked = tables.ResultTable(table.title, table.metrics, table.estimates, {"mIoU": {"gae": 1}}, tied=tied)
    assert "**60.00 [58.00, 62.00]**" in tables.as_markdown(ranked)  # the best is not marked as tied with itself
    assert (tables.as_rows(ranked)[0]["rank"], tables.as_rows(ranked)[0]["tied"]) == (1, True)
    assert "rank" not in tables.as_rows(ranked)[1]


class TestTheOrderOfRows:
    """A worse mean never stands above a better one, however wide its interval is."""

    @staticmethod
    def table(metric, means):
        estimates = [Estimate(method, metric.name, mean, mean - 0.1, mean + 0.1, 9) for method, mean in means.items()]
        return tables.ResultTable("order", [NEUTRAL, metric], estimates)

    def test_rows_go_by_the_first_metric_that_has_a_better_way(self):
        means = {"worst": 0.1, "best": 0.9, "none": NAN, "middle": 0.5}
        assert self.table(seg.mean_iou(), means).methods == ["best", "middle", "worst", "none"]
        assert self.table(LOWER, means).methods == ["worst", "middle", "best", "none"]

    def test_controls_and_ceilings_stand_below_whatever_they_are_worth(self):
        means = {"oracle:steps=4": 0.99, "random": 0.2, "gae": 0.5, "centre": 0.7}
        table = self.table(seg.mean_iou(), means)
        assert table.methods == ["gae", "centre", "random", "oracle:steps=4"]
        assert table.best(seg.mean_iou()) == 0.5
        text = tables.as_markdown(table)
        assert "| `gae` | - | **50.00" in text
        assert "| `centre` (control) | - | 70.00" in text
        assert "| `oracle:steps=4` (ceiling) | - | 99.00" in text
        assert [row["kind"] for row in tables.as_rows(table)] == ["method", "control", "control", "ceiling"]


def test_the_test_against_the_best_is_in_the_rows(table):
    compared = Comparison("tokentm:a_b=50%,c|d", "gae", "mIoU", -0.1, -0.12, -0.08, 0.001, 500)
    given = dataclasses.replace(table, against_best={"mIoU": {compared.first: compared}})
    rows = {(row["method"], row["metric"]): row for row in tables.as_rows(given)}
    found = rows[compared.first, "mIoU"]
    names = ("best", "difference", "difference_low", "difference_high", "p")
    assert [found[name] for name in names] == ["gae", -0.1, -0.12, -0.08, 0.001]
    assert not any(name in rows["gae", "mIoU"] for name in names)
    lines = {(line["method"], line["metric"]): line for line in csv.DictReader(io.StringIO(as_csv([({}, given)])))}
    assert (lines[compared.first, "mIoU"]["p"], lines["gae", "mIoU"]["p"]) == ("0.001", "")
    # A share is shown in percent, and so is a difference of shares.
    assert tables.difference_parts(compared, seg.mean_iou()) == ("-10.00", ("-12.00", "-8.00"))


@pytest.fixture
def of_one_image() -> tables.ResultTable:
    """A single image has a mean and no interval."""
    estimates = [Estimate("gae", "mIoU", 0.6, NAN, NAN, 1), Estimate("rollout", "mIoU", 0.5, NAN, NAN, 1)]
    tied = {"mIoU": frozenset({"gae", "rollout"})}
    return tables.ResultTable("one", [seg.mean_iou()], estimates, {"mIoU": {"gae": 1, "rollout": 2}}, tied=tied)


@pytest.mark.parametrize("width", [30, 200])
def test_a_number_without_an_interval_stands_alone(of_one_image, width):
    assert "| `gae` | **60.00** |\n| `rollout` | 50.00 ≈ |" in tables.as_markdown(of_one_image)
    assert "gae & \\textbf{60.00} \\\\\nrollout & 50.00 \\\\" in tables.as_latex(of_one_image)
    shown = [line.split() for line in terminal(of_one_image, width).splitlines() if "0.00" in line]
    assert shown == [["gae", "*", "60.00"], ["rollout", "50.00", "≈"]]


def test_an_interval_that_does_not_exist_is_null_and_empty(of_one_image):
    rows = json.loads(json.dumps(tables.as_rows(of_one_image), allow_nan=False))
    known = {"method": "gae", "kind": "method", "metric": "mIoU", "mean": 0.6, "low": None, "high": None, "n": 1}
    assert rows[0] == {**known, "rank": 1, "tied": True}
    (line, _) = csv.DictReader(io.StringIO(as_csv([({}, of_one_image)])))
    assert (line["mean"], line["low"], line["high"]) == ("0.6", "", "")


@pytest.mark.parametrize("other", [0.5, np.nextafter(0.5, 0)])
def test_equal_values_are_all_best(other):
    """Also where their sums went another way: 0.1 + 0.2 is not 0.3."""
    estimates = [Estimate(name, "mIoU", mean, 0.4, 0.6, 9) for name, mean in (("a", 0.5), ("b", other), ("c", 0.4999))]
    table = tables.ResultTable("tie", [seg.mean_iou()], estimates)
    assert [table.is_best(estimate, seg.mean_iou()) for estimate in estimates] == [True, True, False]
    assert tables.as_markdown(table).count("**50.00") == 2


def test_published_numbers_name_metrics_that_exist():
    assert {result.metric for result in PUBLISHED} <= set(list_metrics())
    assert published_results("nothing known") == ()
    auc = {(one.method, one.metric): one.value for one in published_results("chefer-2021-perturbation")}
    assert auc["TokenTM", "AUC positive"] == 15.75
    assert len(auc) == 12
    best = [one.value for one in published_results("gradtoken-segmentation")]
    assert best == [84.51, 86.10, 68.24]
