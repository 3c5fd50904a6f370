"""Places that cannot be: links that lead to themselves, homes of nobody and names too long end in one sentence."""

import pytest
from typer.testing import CliRunner

from vitreous.cli import app
from vitreous.errors import InputError
from vitreous.paths import expanded

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
