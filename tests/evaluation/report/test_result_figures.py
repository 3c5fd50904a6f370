"""Figures of stored results: the numbers in them are those of the table."""

import pytest
from typer.testing import CliRunner

from invented_runs import invented_results
from vitreous.cli import app
from vitreous.errors import InputError, MethodError
from vitreous.evaluation.report.figures import metric_values
from vitreous.evaluation.report.results import summarise
from vitreous.metrics.metric import mean_of

METRICS = (
    mean_of("precision", "precision", "higher", (0.0, 1.0), "Higher is better."),
    mean_of("error_left", "error", "lower", (0.0, 9.0), "Lower is better."),
    mean_of("share", "share", "higher", (0.0, 1.0), "Higher is better."),
    mean_of("size", "size", None, (0.0, 9.0), "Neither way is better."),
)
NUMBERS = {
    "gae": {"precision": (0.6, 0.0, 0.9), "error_left": (1, 2, 3), "share": (0.1, 0.2, 0.3), "size": (0, 1, 2)},
    "ixg": {"precision": (0.1, 0.2, 0.3), "error_left": (5, 9, 4), "share": (0.3, 0.2, 0.4), "size": (1, 1, 1)},
    "random": {"precision": (0.1, 0.1, 0.1), "error_left": (8, 8, 8), "share": (0, 0.1, 0.1), "size": (2, 1, 0)},
}


@pytest.fixture
def results(tmp_path):
    return invented_results(tmp_path, METRICS, NUMBERS)


def test_shares_are_in_percent_and_others_as_they_are(results):
    precision, error, _ = metric_values(summarise(results))
    assert precision.name.endswith("(%)")
    assert precision.values["gae"][0] == pytest.approx(50)
    assert error.values["ixg"][0] == pytest.approx(6)
    assert precision.controls == {"random"}
    (size,) = metric_values(summarise(results), metrics=["size"])
    assert size.direction is None


def test_results_draw_themselves(results, tmp_path):
    for name in ("dots", "radar"):
        file = results.figure(name, methods=["gae", "ixg"], width="3.25in").save(tmp_path / f"{name}.pdf")
        assert file.stat().st_size > 5000
    written = [text.get_text() for text in results.figure("dots", methods=["gae"]).figure.texts]
    assert "gae" in written
    assert "ixg" not in written


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("dot", {}, InputError, "did you mean dots"),
        ("dots", {"methods": ["rollout"]}, MethodError, "rollout was not measured"),
        ("dots", {"metrics": ["precisio"]}, InputError, "did you mean precision"),
        ("radar", {"metrics": ["precision"]}, InputError, "at least three"),
        ("layer-curve", {}, InputError, "several start layers"),
        ("curves", {}, InputError, "no curve"),
        ("dots", {"widht": "3in"}, InputError, "did you mean width"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(results, name, options, error, message):
    with pytest.raises(error, match=message):
        results.figure(name, **options)


def test_start_layers_are_a_curve(tmp_path):
    numbers = {f"ixg.plus:start={n}": {"precision": (0.1 * n, 0.2, 0.3)} for n in range(4)}
    results = invented_results(tmp_path, METRICS[:1], numbers)
    (axes,) = [axes for axes in results.figure("layer-curve").figure.axes if axes.get_xlabel()]
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2, 3]


def test_a_folder_that_holds_no_results_is_one_line(tmp_path):
    result = CliRunner().invoke(app, ["figure", "dots", str(tmp_path), "--out", str(tmp_path / "dots.pdf")])
    assert result.exit_code == 2
    assert "holds no results" in result.stderr
