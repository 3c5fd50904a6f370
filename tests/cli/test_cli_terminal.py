"""What a person sees in a terminal: wrapped lines, one style of errors, small pictures; and nothing of it in a pipe."""

import io
import os

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from vitreous import cli
from vitreous.cli import app, explain
from vitreous.cli.console import print_line, print_pictures, shows_pictures

SMALL = ("--model", "timm/vit_tiny_patch16_224@random", "--image-size", "64x48", "--method", "gae")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def terminal(width=40, colours="truecolor"):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=colours, highlight=False)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 256, (60, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")
    return folder


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("explain",), "error: missing argument 'IMAGE'"),
        (("explain", "a.png", "--topk", "0"), "error: invalid value for '--topk'"),
        (("explain", "a.png", "--topk", "x"), "error: invalid value for '--topk': it must be a valid integer"),
        (("serve", "--port", "99999"), "error: invalid value for '--port': it must be less than or equal to 65535"),
        (("explain", "a.png", "--topk", "2", "--target", "1"), "error: invalid value for --target: it cannot be"),
        (("nonsense",), "error: no such command 'nonsense'"),
        (("--nonsense",), "error: no such option: --nonsense"),
        (("models", "check"), "error: missing argument 'MODEL'"),
    ],
)
def test_a_wrong_call_is_told_as_every_error_is_with_the_usage_below(arguments, error):
    result = run(*arguments)
    assert result.exit_code == 2
    told, usage = result.stderr.splitlines()
    assert told.startswith(error)
    assert usage.startswith("Usage: ")
    assert usage.endswith("--help")
    assert not result.stdout


def test_lines_are_wrapped_at_words_and_paths_stay_whole():
    console, path = terminal(width=30), "/a/folder/with/a/name/longer/than/the/terminal.png"
    print_line(console, f"the map beats fifty-six of fifty-six random orders: {path}")
    lines = console.file.getvalue().splitlines()
    assert lines == ["the map beats fifty-six of", "fifty-six random orders:", path]


def test_lines_of_a_pipe_are_not_wrapped():
    pipe = Console(file=io.StringIO(), width=20)
    print_line(pipe, "one sentence that is much longer than that")
    assert pipe.file.getvalue() == "one sentence that is much longer than that\n"


def test_a_character_of_a_picture_is_two_pixels():
    picture = Image.new("RGB", (2, 2))
    for place, colour in {(0, 0): (255, 0, 0), (0, 1): (0, 0, 255), (1, 0): (9, 9, 9), (1, 1): (0, 255, 0)}.items():
        picture.putpixel(place, colour)
    console = terminal()
    print_pictures(console, [("p", picture)], columns=2)
    caption, blocks, *rest = console.file.getvalue().splitlines()
    assert caption == "p"
    assert not rest
    red_on_blue, grey_on_green = blocks.split("▀")[:2]
    assert red_on_blue.endswith("\x1b[38;2;255;0;0;48;2;0;0;255m")
    assert grey_on_green.endswith("\x1b[38;2;9;9;9;48;2;0;255;0m")


def test_pictures_stand_side_by_side_and_fit():
    console = terminal(width=41)
    print_pictures(
        console, [("wide", Image.new("RGB", (30, 10))), ("a name that is too long", Image.new("RGB", (20, 20)))]
    )
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["wide", "a", "name", "that", "is", "too", "…"]
    assert [line.count("▀") for line in lines[1:]] == [40] * 3 + [20] * 7  # one is a third as high as wide
    assert all(line.startswith(" " * 21) for line in lines[4:])


def test_only_a_terminal_with_colours_shows_pictures():
    assert shows_pictures(terminal())
    assert not shows_pictures(terminal(colours=None))
    assert not shows_pictures(terminal(colours="standard"))
    assert not shows_pictures(Console(file=io.StringIO()))
    assert not shows_pictures(Console(file=io.StringIO(), force_terminal=True, color_system="256", no_color=True))


@pytest.mark.parametrize(("options", "shown"), [((), True), (("--preview",), True), (("--no-preview",), False)])
def test_the_maps_are_shown_after_explain(photos, tmp_path, monkeypatch, options, shown):
    console = terminal(width=120)
    monkeypatch.setattr(explain, "stdout_console", lambda: console)
    result = run("explain", photos / "0.png", *SMALL, "--topk", 2, "--out", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    lines = [line for line in console.file.getvalue().splitlines() if "▀" in line]
    assert bool(lines) is shown
    assert {line.count("▀") for line in lines} == ({3 * 36} if shown else set())  # the image and two classes


def test_nothing_is_shown_in_a_pipe_also_if_wanted(photos, tmp_path):
    result = run("explain", photos / "0.png", *SMALL, "--out", tmp_path / "out", "--preview")
    assert result.exit_code == 0, result.output
    assert "▀" not in result.output
    assert "\x1b" not in result.output


def test_a_folder_lists_every_explained_class(photos, tmp_path):
    result = run("explain", photos, *SMALL, "--topk", 2, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "%" in line]
    assert len(rows) == 8
    assert [row.split()[0] for row in rows[::2]] == ["0.png", "1.png", "2.png", "3.png"]
    assert all(row.split()[0] == "class" for row in rows[1::2])


def test_the_shipped_image_of_two_animals_is_called_demo_two(tmp_path):
    result = run("explain", "demo-two", *SMALL, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "cat-and-dog" / "comparison.png").is_file()


@pytest.mark.parametrize("given", [None, "0"])
def test_progress_bars_of_other_libraries_are_off_unless_wanted(monkeypatch, given):
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    cli._hide_foreign_progress()
    assert {os.environ[name] for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")} == {given or "1"}
