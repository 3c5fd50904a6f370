"""The documentation holds together: links lead somewhere, code compiles, the example runs, the site builds."""

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer

import vitreous
from small_models import golden_model
from vitreous.cli.app import app
from vitreous.cli.spellings import split_spellings
from vitreous.methods import list_methods
from vitreous.plugin import load_plugin
from vitreous.protocols import find_protocol

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (language, code) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
    if language == "python"
]


def links_of(page: Path) -> list[str]:
    """Targets of links and pictures, code left out: a method's subscript is no link."""
    prose = re.sub(r"`[^`\n]*`", "code", BLOCK.sub("", page.read_text(encoding="utf-8")))
    return LINK.findall(prose)


def headings_of(page: Path) -> set[str]:
    """Anchors of a page's headings, made as the site and code hosts make them."""
    lines = BLOCK.sub("", page.read_text(encoding="utf-8")).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title)) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_and_picture_exists(page):
    for link in links_of(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in headings_of(target), f"{page.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("code", PYTHON)
def test_python_in_the_pages_compiles(code):
    compile(code, "page", "exec")


def test_every_public_name_in_the_pages_exists():
    """What a page imports, or takes from vitreous, is there under that name."""
    for page in PAGES:
        for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "python":
                for name in re.findall(r"\bvitreous\.(\w+)\(", code):
                    assert hasattr(vitreous, name), f"{page.name}: vitreous.{name}"


def test_commands_in_the_pages_exist_with_their_options():
    commands = typer.main.get_command(app).commands
    options = {
        name: {option for given in command.params for option in given.opts} for name, command in commands.items()
    }
    seen = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for command, rest in re.findall(r"^(?:    |RAY_ADDRESS=auto )?vitreous ([a-z-]+)(.*)$", text, re.MULTILINE):
            assert command in commands, f"{page.name}: vitreous {command}"
            seen.add(command)
            for option in re.findall(r"\s(--[a-z-]+)", rest.partition(" #")[0]):
                assert option in options[command], f"{page.name}: vitreous {command} has no {option}"
    assert seen >= {"explain", "explain-text", "figure", "evaluate", "report", "methods", "models"}


def test_commands_of_results_measure_the_methods_of_their_tables():
    """What a command asks for, on twelve blocks like those of the models measured, is what a kept manifest has."""
    kept = [json.loads(file.read_text(encoding="utf-8"))["manifest"]["run"] for file in RESULTS.glob("*.json")]
    asked = set()
    for line in re.findall(
        r"^vitreous evaluate (.*../shared/.*)$", RESULTS.with_suffix(".md").read_text(), re.MULTILINE
    ):
        name, methods = (re.findall(rf"--{option} (\S+)", line) for option in ("protocol", "methods"))
        asked.add((name[0], tuple(find_protocol(name[0]).spellings(split_spellings(methods), depth=12))))
    assert asked == {(run["protocol"], tuple(run["methods"])) for run in kept}


def test_the_example_of_a_method_is_the_file_and_runs(registry):
    file = ROOT / "examples" / "my_method.py"
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    assert file.read_text(encoding="utf-8") in [code for language, code in BLOCK.findall(page) if language == "python"]
    load_plugin(file)
    model, images = golden_model()
    methods = ["value_length", "value_length:layer=1", "agreement", "agreement.propagate"]
    scores = vitreous.explain(model, images, methods, topk=2).scores
    infos = {info.name: info for info in list_methods()}
    assert all(maps.isfinite().all() and maps.std() > 0 for maps in scores.values())
    assert not torch.equal(scores["value_length"], scores["value_length:layer=1"])
    # Values know nothing of the class, gradients do.
    assert torch.equal(scores["value_length"][:, 0], scores["value_length"][:, 1])
    assert not torch.allclose(scores["agreement"][:, 0], scores["agreement"][:, 1])
    assert (infos["agreement"].class_specific, infos["value_length"].class_specific) == (True, False)


class TestChoosingTable:
    """``scripts/write_choosing_table.py``: numbers come from stored results alone."""

    @pytest.fixture
    def script(self, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "scripts")  # where the script finds what it shares with the others
        spec = importlib.util.spec_from_file_location("choosing", ROOT / "scripts" / "write_choosing_table.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["choosing"] = module
        spec.loader.exec_module(module)
        yield module
        del sys.modules["choosing"]

    def test_it_is_up_to_date(self, script):
        page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
        assert page == script.page(page, ROOT / "docs" / "results"), "run scripts/write_choosing_table.py"

    def test_without_results_there_are_no_numbers(self, script, tmp_path):
        page = script.page("<!-- choosing -->\nold\n<!-- end -->", tmp_path)
        assert "| [`gae`](methods.md#gae) | forward + backward | yes | no |\n" in page
        assert "Not measured" in page
        assert "old" not in page

    def test_numbers_are_those_of_the_stored_runs(self, script, tmp_path):
        rows = [
            {"method": "gae", "metric": "mIoU", "mean": 0.5, "low": 0.4, "high": 0.6, "n": 9},
            {"method": "gae.plus", "metric": "mIoU", "mean": 0.625, "low": 0.5, "high": 0.7, "n": 9},
            {"method": "a_plugin_of_somebody", "metric": "mIoU", "mean": 0.1, "low": 0.1, "high": 0.1, "n": 9},
        ]
        for name, data in (("here", "pets:/x/data/pets/seg"), ("elsewhere", "masks:/x/others")):
            run = {"protocol": "chefer-2021-segmentation", "data": data}
            scaled = [{**row, "mean": row["mean"] if name == "here" else 0.99} for row in rows]
            (tmp_path / f"{name}.json").write_text(json.dumps({"manifest": {"run": run}, "rows": scaled}))
        page = script.page("<!-- choosing -->\n<!-- end -->", tmp_path)
        assert "| [`gae`](methods.md#gae) | forward + backward | yes | no | 50.00 |" in page
        assert "| [`gae.plus`](methods.md#gae) | forward + backward | yes | no | **62.50** |" in page
        assert "| [`rollout`](methods.md#rollout) | forward | no | no | - |" in page
        assert "99.00" not in page


class _Loaded(HTMLParser):
    """Addresses that a browser loads when it opens a page; links that one may follow are not among them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in {"script", "img", "iframe", "source", "audio", "video", "embed"} and given.get("src"):
            self.found.append(given["src"])
        if tag == "link" and given.get("rel") in {"stylesheet", "icon", "preconnect", "preload", "dns-prefetch"}:
            self.found.append(given["href"])


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("material", reason='needs mkdocs-material: pip install "vitreous[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    pages = sorted((tmp_path / "site").glob("*.html"))
    assert {page.stem for page in pages} >= {page.stem for page in PAGES if page.name != "README.md"}
    for page in pages:
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found
        foreign = [address for address in parser.found if address.startswith(("http:", "https:", "//"))]
        assert not foreign, f"{page.name} loads {foreign}"
    styles = [file.read_text(encoding="utf-8") for file in (tmp_path / "site").rglob("*.css")]
    assert styles
    assert not any(re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style) for style in styles)
