"""Places that cannot be: links that lead to themselves, homes of nobody and names too long end in one sentence."""

import json

import pytest
import timm
from safetensors.torch import save_file
from typer.testing import CliRunner

from small_text_models import save_classifier
from vitreous._utils.storage import expanded
from vitreous.cli import app
from vitreous.errors import InputError
from vitreous.models import load_model
from vitreous.plugin import load_plugin

NOBODY = "~nobody-is-called-so/place"
LONG = "a" * 300
DATA = ("evaluate", "--protocol", "chefer-2021-perturbation", "--data")
EXPLAIN = ("explain", "demo", "--method", "rollout")


def error_of(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "900"})
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_home_folders_are_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert expanded("~/weights.pt") == tmp_path / "weights.pt"
    assert expanded(tmp_path / "here") == tmp_path / "here"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # where a folder called ~ would be made
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ((*EXPLAIN, "--out", "~/maps", "--report", "~/page.html"), ("maps", "page.html")),
        (("figure", "overlay", "demo", "--method", "rollout", "--out", "~/figure.png"), ("figure.png",)),
        (("speed", "--methods", "rollout", "--repeats", "1", "--batch", "1", "--out", "~/rows.json"), ("rows.json",)),
        (("explain-text", "good film", "--method", "ixg", "--html", "~/page.html"), ("page.html",)),
    ],
    ids=lambda given: given[0],
)
def test_every_command_writes_at_home(home, tmp_path_factory, arguments, written):
    model = ("--model", "timm/test_vit@random")
    if arguments[0] == "explain-text":
        pytest.importorskip("transformers")
        model = ("--model", save_classifier(tmp_path_factory.mktemp("texts"), ("negative", "positive", "neither")))
    result = CliRunner().invoke(app, [*arguments, *model])
    assert result.exit_code == 0, result.output
    assert {place.name for place in home.glob("[!.]*")} == set(written)  # matplotlib keeps something there too


def test_models_and_plugins_at_home_are_found(home):
    weights = timm.create_model("test_vit", num_classes=3).state_dict()
    config = {"architecture": "test_vit", "num_classes": 3, "pretrained_cfg": {"num_classes": 3}}
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(config))
    save_file(weights, home / "model" / "model.safetensors")
    assert load_model("timm/local-dir:~/model").model.num_classes == 3
    (home / "plugin.py").write_text("open('has_run', 'w').close()")
    load_plugin("~/plugin.py")
    assert (home / "has_run").exists()


@pytest.mark.parametrize(("place", "reason"), [(NOBODY, "no such home folder"), (LONG, "too long")])
def test_a_place_that_cannot_be_is_said(place, reason):
    with pytest.raises(InputError, match=reason):
        expanded(place)


@pytest.mark.parametrize("place", [NOBODY, LONG])
@pytest.mark.parametrize(
    "arguments",
    [
        (*DATA, "labelled:PLACE"),
        (*DATA, "eraser-movies:PLACE"),
        (*EXPLAIN, "--model", "hf/PLACE"),
        (*EXPLAIN, "--model", "timm/vit_tiny_patch16_224@PLACE"),
        (*EXPLAIN, "--model", "py/PLACE:build"),
        (*EXPLAIN, "--model", "timm/local-dir:PLACE"),
        (*EXPLAIN, "--plugin", "PLACE"),
        (*EXPLAIN, "--out", "PLACE"),
        (*EXPLAIN, "--report", "PLACE.html"),
        ("figure", "overlay", "demo", "--out", "PLACE.png"),
        ("speed", "--out", "PLACE"),
        (*DATA, "labelled:.", "--plugin", "PLACE"),
    ],
    ids=" ".join,
)
def test_every_command_says_it(arguments, place):
    assert place in error_of(*(argument.replace("PLACE", place) for argument in arguments))


def test_results_that_have_too_long_a_name_are_not_read():
    assert LONG in error_of("report", LONG)


@pytest.fixture
def loop(tmp_path):
    link = tmp_path / "loop.png"
    link.symlink_to(link)
    return link


def test_results_cannot_be_where_a_link_leads_to_itself(loop):
    assert "cannot be written" in error_of(*EXPLAIN, "--out", loop)


def test_a_photo_that_cannot_be_takes_no_other_with_it(loop, tmp_path):
    result = CliRunner().invoke(app, [*EXPLAIN, str(loop), LONG, "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 2
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["chelsea"]


def test_a_figure_says_which_photo_cannot_be_read(loop, tmp_path):
    assert "loop.png" in error_of("figure", "overlay", loop, "--out", tmp_path / "figure.png")
