"""The registry is the one place that knows a method: paper, address, bibliography entry, cost and bf16 fitness."""

import re
from pathlib import Path

import pytest
import torch

import forked
import vitreous
from small_models import golden_model
from vitreous.methods import list_methods, method_info
from vitreous.methods.spelling import cost_of, parse

ROOT = Path(__file__).parents[2]
METHODS = list_methods()
BIBLIOGRAPHY = (ROOT / "docs" / "bibliography.md").read_text(encoding="utf-8")
CITATION = re.compile(r"\[(\w+\d{4}\w+)\]\[\]")


@pytest.mark.parametrize("info", METHODS, ids=lambda info: info.name)
def test_a_paper_is_authors_and_title_and_has_one_address(info):
    assert re.match(r"\w+( et al\.| and \w+), [A-Z“]", info.paper), info.paper
    assert 1990 < info.year < 2100
    assert sum(map(bool, (info.arxiv, info.doi, info.url))) <= 1
    assert info.arxiv is None or re.fullmatch(r"\d{4}\.\d{4,5}", info.arxiv)
    assert info.doi is None or info.doi.startswith("10.")
    assert info.link.startswith("https://")


@pytest.mark.parametrize("info", METHODS, ids=lambda info: info.name)
def test_every_paper_is_in_the_bibliography(info):
    (entry,) = re.findall(rf"^### {info.citation_key}\n\n(.*)$", BIBLIOGRAPHY, re.MULTILINE)
    assert info.paper.partition(", ")[2] in entry
    assert info.link in entry
    assert f"methods.md#{info.name})" in entry


def test_the_bibliography_is_up_to_date():
    script = ROOT / "scripts" / "write_bibliography_page.py"
    result = forked.run([str(script), "--check"])
    assert result.returncode == 0, result.stderr


def test_every_citation_is_in_the_bibliography():
    cited = {
        (file.name, key)
        for file in (*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"))
        for key in CITATION.findall(file.read_text(encoding="utf-8"))
    }
    assert cited
    assert not [each for each in cited if f"### {each[1]}\n" not in BIBLIOGRAPHY]


def test_the_example_of_the_contributing_page_is_a_method(registry):
    page = (ROOT / "docs" / "contributing" / "method.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "method.md", "exec"), {"__name__": "vitreous.methods.example"})
    model, images = golden_model()
    found = vitreous.explain(model, images, ["my_method", "ixg.plus"]).scores
    assert torch.equal(found["my_method"], found["ixg.plus"])
    info = method_info("my_method")
    assert (info.link, info.citation_key) == ("https://arxiv.org/abs/2601.00001", "author2026title")
    assert info.cost.label == "forward + backward"


def test_spellings_fit_for_bf16_are_of_the_method_that_declares_them():
    for info in METHODS:
        for spelling in info.bf16:
            assert parse(spelling).info.name == info.name
            assert parse(spelling).spelling == spelling


def test_the_cost_follows_from_what_a_method_reads():
    assert all(info.cost == cost_of(info.name) for info in METHODS)
    assert {info.name: info.cost.label for info in METHODS if info.name in {"rollout", "gae", "rise"}} == {
        "rollout": "forward",
        "gae": "forward + backward",
        "rise": "many runs",
    }
