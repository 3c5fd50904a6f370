"""The documentation holds together: links lead somewhere, code compiles, the example runs, the site builds."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import timm
import torch
import typer

import vitreous
from loading_scripts import load_script
from small_models import golden_model
from vitreous._utils.defaults import split_spellings
from vitreous.cli import app
from vitreous.errors import MethodError
from vitreous.evaluation.protocols import find_protocol
from vitreous.methods import list_methods
from vitreous.models.demo import PHOTO
from vitreous.plugin import load_plugin

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    # With the options of their own commands: vitreous models check.
    parts = {name: [command, *getattr(command, "commands", {}).values()] for name, command in commands.items()}
    options = {
        name: {option for one in several for given in one.params for option in given.opts}
        for name, several in parts.items()
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
    pages = "\n".join(file.read_text(encoding="utf-8") for file in RESULTS.glob("*.md"))
    for line in re.findall(r"^vitreous evaluate (.*../shared/.*)$", pages, re.MULTILINE):
        name, methods = (re.findall(rf"--{option} (\S+)", line) for option in ("protocol", "methods"))
        asked.add((name[0], tuple(find_protocol(name[0]).spellings(split_spellings(methods), depth=12))))
    assert asked == {(run["protocol"], tuple(run["methods"])) for run in kept}


def test_the_example_of_a_method_is_the_file_and_runs(registry):
    file = ROOT / "examples" / "my_method.py"
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    assert file.read_text(encoding="utf-8") in [code for language, code in BLOCK.findall(page) if language == "python"]
    load_plugin(file)
    model, images = golden_model()
    methods = ["value_length", "value_length:layer=1", "agreement", "agreement.propagate", "attention_gain"]
    scores = vitreous.explain(model, images, methods, topk=2).scores
    infos = {info.name: info for info in list_methods()}
    assert all(maps.isfinite().all() and maps.std() > 0 for maps in scores.values())
    assert not torch.equal(scores["value_length"], scores["value_length:layer=1"])
    # Values know nothing of the class, gradients do.
    assert torch.equal(scores["value_length"][:, 0], scores["value_length"][:, 1])
    assert not torch.allclose(scores["agreement"][:, 0], scores["agreement"][:, 1])
    assert (infos["agreement"].class_specific, infos["value_length"].class_specific) == (True, False)


def test_the_example_that_reads_attention_and_its_gradient_does_what_autograd_does(registry):
    """The whole matrix kept in torch's own graph, which the plugin never builds."""
    load_plugin(ROOT / "examples" / "my_method.py")
    model = timm.create_model("test_vit", num_classes=7).double().eval()
    images = torch.randn(2, 3, 160, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([2, 5])
    found = vitreous.explain(model, images, ["attention_gain", "attention_gain:layer=0"], target).scores
    for block, spelling in ((-1, "attention_gain"), (0, "attention_gain:layer=0")):
        kept: list[torch.Tensor] = []
        attention = model.blocks[block].attn
        attention.fused_attn = False
        handle = attention.attn_drop.register_forward_hook(lambda *call, kept=kept: kept.append(call[-1]))
        logit = model(images).gather(1, target[:, None]).sum()
        handle.remove()
        (gradient,) = torch.autograd.grad(logit, kept[0])
        wanted = (kept[0] * gradient)[:, :, :1].clamp(min=0).mean(dim=(1, 2))[:, 1:]
        # Sums of a few hundred products in float64, in another order.
        torch.testing.assert_close(found[spelling], wanted.detach(), rtol=1e-9, atol=1e-15)


def test_the_message_that_the_page_shows_is_the_one_that_comes(registry, tmp_path):
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(method attention_gain .*?)^```$", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "my_method.py"
    text = (ROOT / "examples" / "my_method.py").read_text(encoding="utf-8")
    file.write_text(
        text.replace('activations=("attention_rows",), gradients=("attention",)', 'activations=("attention_rows",)')
    )
    load_plugin(file)
    with pytest.raises(MethodError) as raised:
        vitreous.explain("timm/vit_tiny_patch16_224@random", PHOTO, "attention_gain")
    assert str(raised.value) == " ".join(shown.split())


class TestChoosingTable:
    """``scripts/write_choosing_table.py``: numbers come from stored results alone."""

    @pytest.fixture
    def script(self, monkeypatch):
        return load_script("write_choosing_table", monkeypatch)

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


class TestResultsPage:
    """``scripts/write_results_page.py``: tables come from the kept runs alone, and what they share has to agree."""

    PLACE = "<!-- results: chefer-2021-segmentation pets/seg -->\nold\n<!-- end -->"

    @pytest.fixture
    def script(self, monkeypatch):
        return load_script("write_results_page", monkeypatch)

    @staticmethod
    def keep(folder, name, numbers, **changed):
        run = {
            "protocol": "chefer-2021-segmentation",
            "settings": find_protocol("chefer-2021-segmentation").settings(),
            "model": {"name": "timm/some", "mean": None, "std": None},
            "preprocessing": {},
            "data": "pets:../shared/data/pets/seg",
            "images": 9,
            "limit": None,
            "seed": 0,
            "shuffled": False,
            "shard_size": 16,
            "threads": 1,
            "methods": list(numbers),
        } | changed
        rows = [
            {"method": method, "metric": metric, "mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 9}
            for method, mean in numbers.items()
            for metric in ("pixel accuracy", "mAP", "mIoU")
        ]
        (folder / f"{name}.json").write_text(json.dumps({"manifest": {"run": run}, "rows": rows}))

    def test_it_is_up_to_date(self, script):
        pages = sorted(RESULTS.glob("*.md"))
        assert pages
        for file in pages:
            page = file.read_text(encoding="utf-8")
            assert page == script.page(page, RESULTS), "run scripts/write_results_page.py"
            for name, chart in script.charts(page, RESULTS).items():
                assert (RESULTS / name).read_text(encoding="utf-8") == chart, "run scripts/write_results_page.py"

    def test_runs_on_the_same_photos_share_a_table(self, script, tmp_path):
        self.keep(tmp_path, "first", {"gae": 0.5, "rollout": 0.4})
        self.keep(tmp_path, "second", {"dix": 0.6, "gae": 0.5001}, shuffled=True)
        page = script.page(self.PLACE, tmp_path)
        assert "9 photos, 3 methods" in page
        methods = re.findall(r"^\| `(\w+)` \| \S*?(\d\d\.\d\d)", page, re.MULTILINE)
        assert methods == [("dix", "60.00"), ("gae", "50.00"), ("rollout", "40.00")]
        assert len(re.findall("^vitreous evaluate", page, re.MULTILINE)) == 2
        assert "old" not in page

    @pytest.mark.parametrize("changed", [{"limit": 4}, {"seed": 1}, {"preprocessing": {"mean": 0.5}}])
    def test_runs_on_others_have_a_table_of_their_own(self, script, tmp_path, changed):
        self.keep(tmp_path, "first", {"gae": 0.5})
        self.keep(tmp_path, "second", {"gae": 0.7}, **changed)
        assert script.page(self.PLACE, tmp_path).count("1 methods, 95%") == 2

    def test_the_demo_model_has_a_place_of_its_own(self, script, tmp_path):
        self.keep(tmp_path, "first", {"gae": 0.5})
        demo = {"name": "demo", "mean": None, "std": None}
        self.keep(tmp_path, "second", {"gae": 0.7, "dix": 0.6}, model=demo, stratified=True, limit=4)
        place = self.PLACE.replace(" -->", " demo -->", 1)
        assert "9 photos, 1 methods" in script.page(self.PLACE, tmp_path)
        assert "9 photos, a stratified sample, 2 methods" in script.page(place, tmp_path)
        assert "--model demo" not in script.page(self.PLACE, tmp_path)
        assert "--stratify --limit 4" in script.page(place, tmp_path)
        assert set(script.charts(self.PLACE + place, tmp_path)) == {
            *("chefer-2021-segmentation-pets.svg", "chefer-2021-segmentation-pets-demo.svg")
        }

    def test_controls_of_a_sample_stand_below_the_methods(self, script, tmp_path):
        self.keep(tmp_path, "a", {"random": 0.3, "edges": 0.4}, limit=4)
        self.keep(tmp_path, "b", {"gae": 0.5}, limit=3)
        page = script.page(self.PLACE, tmp_path)
        assert page.index("1 methods") < page.index("the controls alone, on a random sample of the same photos")

    def test_two_runs_that_disagree_about_a_method_are_not_merged(self, script, tmp_path):
        self.keep(tmp_path, "first", {"gae": 0.5, "rollout": 0.4})
        self.keep(tmp_path, "second", {"gae": 0.51})  # a twentieth of its interval away
        with pytest.raises(SystemExit, match=r"gae, pixel accuracy: 0\.5 in one run, 0\.51 in another"):
            script.page(self.PLACE, tmp_path)


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
    pages = sorted((tmp_path / "site").rglob("*.html"))
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
