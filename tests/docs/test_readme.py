"""Every command and every block of Python in the README runs as it is written, but for what no machine offline has."""

import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

import forked
import vitreous
from running_server import serving
from segmentation_file import write_segmentation
from small_text_models import save_classifier
from vitreous.explanation.explanation import Explanation
from vitreous.methods.spelling import parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)

SMALL = "timm/test_vit@random"
# `recommend` randomises the model block by block, so that its time grows with the square of the depth.
ONE_BLOCK = """
import timm

def build():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, num_heads=3, depth=1)
    model.image_size, model.mean, model.std = 32, 0.5, 0.5
    return model
"""
# Weights that would have to be downloaded, and random ones: the same command with a small random model.
REPLACED = {
    r"timm/vit_base_patch16_224[.\w]*": SMALL,
    r"timm/vit_tiny_patch16_224@random": SMALL,
    r"(?<=vitreous recommend )demo": "py/one_block.py:build",
}
# What would take many minutes, and is the same with less of it; `make demo` has the demo model at its own size.
FEW_PATCHES = ["--image-size", "56"]  # 4 x 4 patches
SHORTER = {
    "vitreous explain demo-two": FEW_PATCHES,
    "vitreous explain cat.jpg --model demo": FEW_PATCHES,
    "vitreous explain cat.jpg photos/ --model demo": FEW_PATCHES,
    "vitreous similar": FEW_PATCHES,
    "vitreous recommend": ["--limit", "2", "--methods", "gae"],
    "vitreous figure": FEW_PATCHES,
    "vitreous figure curves": ["--steps", "3", *FEW_PATCHES],
    "vitreous speed": ["--repeats", "1", *FEW_PATCHES],
    "vitreous speed --peers": ["--repeats", "1", "--batch-size", "1", "--model", SMALL],
}
ELSEWHERE = {"mkdocs build", "make package"}  # test_docs.py builds the site, .ci/run the packages


def written_commands() -> list[str]:
    """Commands on lines of their own, continued lines joined, and those inside of sentences; comments left out."""
    lines = re.findall(r"^    ((?:vitreous|make) .*)$", PROSE.replace("\\\n", " "), re.MULTILINE)
    inside = re.findall(r"`((?:vitreous|make|mkdocs|python) [^`]+)`", PROSE)
    commands = [" ".join(line.partition(" #")[0].split()) for line in [*lines, *inside]]
    return list(dict.fromkeys(commands))


COMMANDS = written_commands()
VITREOUS = [command for command in COMMANDS if command.startswith("vitreous ")]
MAKE = [command for command in COMMANDS if command.startswith("make ") and command not in ELSEWHERE]


class Workshop:
    """A folder with all that the README's commands name, and what they have done in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[str, subprocess.CompletedProcess[str]] = {}
        random = np.random.default_rng(0)
        (folder / "photos").mkdir()
        for name in ("cat.jpg", "photos/one.jpg", "photos/two.png"):
            Image.fromarray(random.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(folder / name)
        (folder / "one_block.py").write_text(ONE_BLOCK)
        model = timm.create_model("vit_tiny_patch16_224")
        save_file(model.state_dict(), folder / "weights.safetensors")
        save_classifier(folder / "FOLDER", ("negative", "neutral", "positive"))
        write_segmentation(folder / "gtsegs_ijcv.mat")

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command once, with what the one before it in the README leaves."""
        if command not in self.done:
            if command.startswith("vitreous report"):
                self.run(next(one for one in VITREOUS if one.startswith("vitreous evaluate")))
            self.done[command] = forked.run(
                ["-m", *arguments_of(command)],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            )
        return self.done[command]


def arguments_of(command: str) -> list[str]:
    """The words of a command, with what stands in for what is not there."""
    for pattern, small in REPLACED.items():
        command = re.sub(pattern, small, command)
    longest = max((start for start in SHORTER if command.startswith(start)), key=len, default=None)
    return [*shlex.split(command), *(SHORTER[longest] if longest else [])]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("readme"))


def test_all_commands_are_known():
    """What is looked for is found, and nothing is of a kind that is not run below."""
    assert set(COMMANDS) == {*VITREOUS, *MAKE, *ELSEWHERE}
    assert len(VITREOUS) >= 15
    assert {command.split()[1] for command in VITREOUS} >= {"explain", "figure", "evaluate", "report", "speed", "serve"}
    assert README.count("```python") == len(PYTHON) >= 2
    assert all(re.search(pattern, README) for pattern in REPLACED)
    assert all(any(command.startswith(start) for command in VITREOUS) for start in SHORTER)


@pytest.mark.demo
@pytest.mark.parametrize("command", [command for command in VITREOUS if not command.startswith("vitreous serve")])
def test_a_command_runs(workshop, command):
    result = workshop.run(command)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.strip()
    words = arguments_of(command)
    for option in ("--out", "--report"):
        if option in words:
            assert (workshop.folder / words[words.index(option) + 1]).exists()


@pytest.mark.demo
@pytest.mark.parametrize("command", [command for command in VITREOUS if command.startswith("vitreous serve")])
def test_a_server_runs(workshop, command, tmp_path):
    with (
        serving(tmp_path, *arguments_of(command)[1:], cwd=workshop.folder) as server,
        urllib.request.urlopen(server.address, timeout=60) as answer,
    ):
        assert answer.status == 200


@pytest.mark.demo
@pytest.mark.parametrize("command", MAKE)
def test_make_runs_what_it_says(tmp_path, command):
    """With the installation that there is, in the place of a new one; of the tests, those of one file."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    binaries = Path(sys.executable).parent
    for stamp in (".demo-installed", ".dev-installed"):
        (tmp_path / ".venv" / stamp).touch()
    result = subprocess.run(
        [*command.split(), f"BIN={binaries}", "TESTERS=1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "tests/_utils/test_reason.py"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if command == "make demo":
        drawn = tmp_path / "demo-output" / "cat-and-dog" / "comparison.png"
        assert drawn.name in result.stdout + result.stderr  # it says where the pictures are
        # The README's first picture is this one, as far as another processor rounds the same.
        shown = ROOT / re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)[0]
        first, second = (np.asarray(Image.open(file).convert("RGB")).astype(int) for file in (shown, drawn))
        assert first.shape == second.shape
        assert np.abs(first - second).mean() < 1
        saved = Explanation.load(drawn.parent)
        assert {saved.label(0, 0), saved.label(0, 1)} == {"Shiba Inu", "Bengal"}
        assert all(saved.label(0, number) in README for number in (0, 1))
        assert list(saved.methods) == ["twoscale", "tokentm", "gradtoken", "decompx.skipplus"]
        told = re.search(r"(Trust: .*?) \.\.\.", README.replace("\n> ", " "))
        assert told
        assert told[1] in " ".join(result.stdout.split())
    else:
        assert " passed" in result.stdout


def test_the_python_runs_and_its_comments_are_true(workshop, monkeypatch):
    monkeypatch.chdir(workshop.folder)
    space: dict[str, object] = {}
    explanations = []
    for code in PYTHON:
        for pattern, small in REPLACED.items():
            code = re.sub(pattern, small, code)  # noqa: PLW2901
        exec(compile(code, "README.md", "exec"), space)
        explanations.append(space["explanation"])
    picture, text = explanations
    rows, columns = picture.grid
    assert picture.scores["tokentm"].shape == (1, rows * columns)
    assert picture.target.shape == (1,)
    assert picture.heatmap("tokentm").shape == (1, *picture.image_size)
    assert picture.signed == {"tokentm": False, "gradtoken": False, "decompx.skipplus": True}
    assert Explanation.load(workshop.folder / "cat-explained").methods == picture.methods
    assert text.word_scores("decompx").shape == (len(text.words[0]),)
    assert (text.word_scores("decompx") < 0).any()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scores_are_called_signed_where_they_are(page):
    for line in page.read_text(encoding="utf-8").splitlines():
        named = re.search(r"scores(?:\[|\()\"([^\"]+)\"", line)
        said = line.partition("#")[2]
        if named and re.search(r"\bsigned\b(?! where the method is)", said):
            assert parse(named[1]).signed, f"{page.name}: {line.strip()}"


def row_of(name: str) -> list[str]:
    """A row of the table beside other libraries, without its name."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", README, re.MULTILINE)
    return row.replace("**", "").split(" | ")


def test_the_table_names_the_pinned_versions_of_other_libraries():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    (heading,) = re.findall(r"^\| \| Vitreous (.*) \|$", README, re.MULTILINE)
    own, *others = heading.split(" | ")
    assert own == vitreous.__version__
    assert others == [f"{name} {pinned[name]}" for name in ("captum", "grad-cam", "lxt", "quantus")]


def test_the_table_counts_methods_and_metrics_as_they_are():
    catalog = json.loads((ROOT / "src/vitreous/cli/catalog.json").read_text())
    methods = [one for one in catalog["methods"] if one["family"] not in ("control", "ceiling")]
    metrics = {metric["name"] for protocol in catalog["protocols"] for metric in protocol["metrics"]}
    assert row_of("attribution methods")[0] == str(len(methods))
    expected = f"{len(metrics)}, in {len(catalog['protocols'])} named protocols with data sets"
    assert row_of("metrics of explanations")[0] == expected


def test_the_table_is_true_of_captum():
    attr = pytest.importorskip("captum.attr")
    from captum import metrics
    from captum.attr._utils.attribution import Attribution

    classes = {name for name in attr.__all__ if isinstance(getattr(attr, name), type)}
    methods = {name for name in classes if issubclass(getattr(attr, name), Attribution)}
    methods -= {"Attribution", "GradientAttribution", "PerturbationAttribution", "LimeBase", "DataLoaderAttribution"}
    methods = {name for name in methods if not re.match("Layer|Neuron|Internal|.*LLM", name)}
    assert row_of("attribution methods")[1].startswith(f"{len(methods)},")
    assert not any(re.search("rollout|gae|attention", name, re.IGNORECASE) for name in classes)
    assert row_of("metrics of explanations")[1] == str(
        sum(hasattr(metrics, n) for n in ("infidelity", "sensitivity_max"))
    )
    for module in ("captum.influence", "captum.concept"):
        assert importlib.util.find_spec(module) is not None
    assert importlib.util.find_spec("captum.insights") is None  # its page is not part of it any more
    assert hasattr(attr, "LLMAttribution")


def test_the_table_is_true_of_grad_cam():
    cams = pytest.importorskip("pytorch_grad_cam")
    from pytorch_grad_cam.base_cam import BaseCAM

    methods = {name for name, each in vars(cams).items() if isinstance(each, type) and issubclass(each, BaseCAM)}
    around_another = {"FinerCAM", "RefineCAM", "SESS"} & set(vars(cams))
    assert row_of("attribution methods")[2] == f"{len(methods | around_another)} class activation maps"
    assert {"target_layers", "reshape_transform"} <= set(inspect.signature(BaseCAM).parameters)
    assert hasattr(cams, "DeepFeatureFactorization")  # the concepts of one image
    for metric in ("road", "arcc", "perturbation_confidence"):
        assert importlib.util.find_spec(f"pytorch_grad_cam.metrics.{metric}") is not None


def test_the_table_is_true_of_lxt_and_quantus():
    quantus = pytest.importorskip("quantus")
    lxt = pytest.importorskip("lxt")
    count = sum(map(len, quantus.AVAILABLE_METRICS.values()))
    assert row_of("metrics of explanations")[4] == f"{count}, for any explanation"
    assert "IntegratedGradients" in quantus.AVAILABLE_XAI_METHODS_CAPTUM
    assert quantus.AVAILABLE_XAI_METHODS_TF
    folder = Path(lxt.__file__).parent
    models = {file.stem for file in (folder / "efficient" / "models").glob("*.py")}
    assert {name for name in models if "vit" in name} == {"vit_torch"}  # torchvision's, and no other one of images
    assert "def pdf_heatmap(words" in (folder / "utils.py").read_text()  # figures of texts
