"""Runs on texts: stored, killed and resumed, reported, and the same by name as in memory."""

from __future__ import annotations

import json
import re
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from typer.testing import CliRunner

import vitreous
from evaluations import everything, only_run, start, wait_for, write_photos
from loading_scripts import load_script
from small_reviews import reviews, save_text_model, write_movies
from vitreous.cli import app
from vitreous.datasets import DataError, open_dataset
from vitreous.errors import InputError
from vitreous.evaluation.engines import compute_by_name
from vitreous.evaluation.run import RunError
from vitreous.evaluation.runner.measure import open_context
from vitreous.models import LoadedTextModel
from vitreous.speed.timing import one_thread

TEXTS = 40
METHODS = ("gae", "decompx")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_movies(tmp_path_factory.mktemp("movies") / "movies.tar.gz", reviews(TEXTS, words=4))


def options(model, data, out, *more):
    given = ["--protocol", "eraser-movies", "--model", model, "--data", data, "--methods", ",".join(METHODS)]
    given += ["--out", str(out), "--threads", "1", "--shard-size", "1", *map(str, more)]
    return [sys.executable, "-m", "vitreous", "evaluate", *given]


@pytest.fixture(scope="module")
def unbroken(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    with one_thread():
        return vitreous.evaluate(model, data, "eraser-movies", METHODS, out=out, threads=1, shard_size=1)


def test_killed_it_resumes_to_the_same_results(model, data, unbroken, tmp_path):
    process = start(options(model, data, tmp_path))
    wait_for(lambda: len(list(tmp_path.glob("*/*.parquet"))) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    there = len(list(tmp_path.glob("*/*.parquet")))
    assert 2 <= there < TEXTS
    process = start(options(model, data, tmp_path, "--json"))
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert f"resumed: {there} of {TEXTS} shards are there, {there} texts" in errors
    assert json.loads(output) == unbroken.rows()
    assert everything(only_run(tmp_path)).equals(everything(unbroken.stores[0]))


def test_a_pair_of_model_and_tokenizer_gives_what_its_name_gives(model, data, unbroken, tmp_path):
    loaded = vitreous.load_text_model(model)
    assert isinstance(loaded, LoadedTextModel)
    pair = (loaded.model, loaded.tokenizer)
    settings = {"threads": 1, "shard_size": 1, "limit": 2}
    found = vitreous.evaluate(pair, data, "eraser-movies", METHODS, out=tmp_path, **settings)
    expected = everything(unbroken.stores[0]).slice(0, 2 * (len(METHODS) + 1))  # random is a row, too
    assert everything(found.stores[0]).equals(expected)
    with pytest.raises(InputError, match=r"the preprocessing of a model is a .* not .*Token"):
        vitreous.evaluate(pair, write_photos(tmp_path / "photos", 1), "libra-mif", METHODS, out=tmp_path)
    with pytest.raises(InputError, match=r"comes with its tokenizer.*not a model alone"):
        vitreous.evaluate(loaded.model, data, "eraser-movies", METHODS, out=tmp_path)


def test_rows_have_every_metric(unbroken):
    rows = unbroken.rows()
    assert {row["metric"] for row in rows} == {metric.name for metric in unbroken.protocol.metrics()}
    assert {row["n"] for row in rows} == {TEXTS}


def test_a_worker_that_opens_everything_by_name_gives_the_same_shard(unbroken, tmp_path):
    """What the Ray engine runs on its nodes."""
    store = unbroken.stores[0]
    shard = store.run.shards()[3]
    stored = store.read([shard], ["image", "method", *store.run.columns])
    with one_thread():
        computed = compute_by_name(store.run, shard, str(tmp_path))
    assert computed.select(stored.column_names).replace_schema_metadata(None).equals(stored)


def test_a_review_that_is_listed_twice_is_refused(tmp_path):
    """Its rows are known by its name, so one of the two would have the numbers of the other."""
    first, second = reviews(2, words=4)
    with pytest.raises(DataError, match=rf"{first.name} is listed twice in test\.jsonl"):
        open_dataset(write_movies(tmp_path / "movies.tar.gz", [first, second, first]))


def test_another_tokenizer_is_another_run(model, data, unbroken, tmp_path):
    """The weights are the same, but the texts are cut after fewer pieces."""
    run = unbroken.run
    other = replace(run, preprocessing={**run.preprocessing, "pieces": 5})
    assert other.key != run.key
    with pytest.raises(RunError, match="preprocessing"):
        open_context(other)


def test_the_report_shows_words(unbroken):
    out = unbroken.stores[0].folder
    result = CliRunner().invoke(app, ["report", str(out), "--pictures", "1"])
    assert result.exit_code == 0, result.output
    page = (out / "report.html").read_text()
    assert "Best and worst texts" in page
    assert "<img" not in page
    assert re.search(r"<u><span[^>]*>\w+</span></u>", page)  # a word that people marked, in its colour
    assert "words taken, the highest first" in page  # the curve of token-F1
    assert "22 word pieces" in page
    assert f"{TEXTS} of {TEXTS}" in page


def test_the_page_of_results_has_the_curve_of_token_f1(unbroken, tmp_path, monkeypatch):
    keeping, writing = (load_script(name, monkeypatch) for name in ("keep_results", "write_results_page"))
    keeping.keep(unbroken, tmp_path)
    data = writing.ending_of(unbroken.run.data)
    page = writing.page(f"<!-- results: eraser-movies {data} -->\n<!-- end -->\n", tmp_path)
    curve = page.partition("words taken, the highest first")[2]
    points = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+)", curve, re.MULTILINE))
    assert {name: float(points[name]) for name in METHODS} == {
        name: pytest.approx(100 * np.nanmean(unbroken.values(["token_f1_10"])[name]), abs=0.05) for name in METHODS
    }  # the page shows one digit
