"""The examples of docs/contributing run, and the files that the pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evaluations import write_photos
from small_data import loaded, samples
from vitreous.evaluation.protocols import Protocol, find_protocol, list_protocols
from vitreous.evaluation.runner.measure import measure

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "contributing").glob("*.md"))}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_page(name: str) -> dict:
    """Run all code of a page, block after block, and give the names that it defines."""
    names: dict = {"__name__": f"contributing_{name}"}
    for code in BLOCK.findall(PAGES[name].read_text(encoding="utf-8")):
        exec(compile(code, str(PAGES[name]), "exec", dont_inherit=True), names)  # the page's own example
    return names


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder of its own, for paths that examples name."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_metric_is_measured_by_its_task():
    names = run_page("metric")
    task, metric = names["PositiveShare"](), names["mean_positive_share"]()
    protocol = Protocol("p", "Of the page", "", 1, (task,))
    rows = measure(loaded(), samples(2), protocol, ["ixg", "rollout"])
    assert protocol.metrics() == (metric,)
    shares = {row["method"]: row[metric.columns[0]] for row in rows}
    assert 0 < shares["ixg"] < 1 == shares["rollout"]  # attention is positive
    assert metric.format(shares["rollout"]) == "100.00"
    assert names["positive_share"]([[1, -1, 0, 2], [1, 1, 1, 1]]).tolist() == [0.5, 1.0]


def test_a_protocol_is_evaluated(here, capsys):
    write_photos(here / "photos", 2)
    names = run_page("protocol")
    assert names["results"].finished
    assert names["results"].methods == ("gae", "rollout")
    assert capsys.readouterr().out.count("max-sensitivity") == 2
    assert len(list((here / "runs").iterdir())) == 1


def test_a_data_set_is_opened_and_loaded(here):
    for folder in ("cats", "dogs"):
        (here / "animals" / folder).mkdir(parents=True)
        Image.fromarray(np.full((5, 8, 3), 100, dtype=np.uint8)).save(here / "animals" / folder / "one.png")
    names = run_page("dataset")
    data = names["data"]
    assert [(data.name(index), data.load(index).label) for index in range(2)] == [
        ("cats/one.png", 0),
        ("dogs/one.png", 1),
    ]
    assert data.classes == 2


@pytest.mark.parametrize("page", PAGES)
def test_files_and_names_in_the_text_exist(page):
    text = PAGES[page].read_text(encoding="utf-8")
    for file in re.findall(r"`((?:src|tests|docs|scripts)/[\w/*.]+)`", text):
        assert list(ROOT.glob(file)), file
    for script in re.findall(r"`python (scripts/\w+\.py)", text):
        assert (ROOT / script).is_file(), script


def test_the_smallest_protocols_are_the_smallest():
    sizes = {protocol.name: len(protocol.tasks) + len(protocol.notes) for protocol in list_protocols()}
    for name in ("chefer-2021-segmentation", "localisation"):
        assert find_protocol(name).name in PAGES["protocol"].read_text(encoding="utf-8")
        assert sizes[name] == min(sizes.values())
