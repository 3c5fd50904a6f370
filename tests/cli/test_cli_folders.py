"""Folders of photos on the command line: what is taken, what is left out, and what is said of it."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from vitreous.cli import app
from vitreous.cli.explain_images import find_image_files
from vitreous.errors import ImageError

MODEL = ("--model", "timm/test_vit@random", "--method", "rollout")


@pytest.fixture
def folder(tmp_path):
    """Two photos, two other files, and photos two levels below."""
    place = tmp_path / "photos"
    for name in ("a.png", "b.JPG", "cats/a.png", "cats/c.png", "dogs/young/d.png", ".hidden/e.png", "empty/notes.txt"):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".txt":
            Image.new("RGB", (8, 8), (200, len(name), 0)).save(file, format="PNG")
        else:
            file.write_text("no photo")
    for name in ("notes.txt", "labels.csv", ".DS_Store"):
        (place / name).write_text("no photo")
    return place


def names(photos, folder):
    return [str(photo.relative_to(folder)) for photo in photos]


def test_what_is_skipped_is_told_by_subfolder(folder):
    photos, skipped = find_image_files(str(folder))
    assert names(photos, folder) == ["a.png", "b.JPG"]
    assert str(skipped) == (
        f"{folder}: skipped 2 files without an image suffix and 3 images in 2 subfolders (cats: 2, dogs/young: 1) "
        "(use --recursive to include them)"
    )


def test_recursive_takes_subfolders_but_no_hidden_ones(folder):
    photos, skipped = find_image_files(str(folder), recursive=True)
    assert names(photos, folder) == ["a.png", "b.JPG", "cats/a.png", "cats/c.png", "dogs/young/d.png"]
    assert str(skipped) == f"{folder}: skipped 2 files without an image suffix"


def test_links_to_folders_are_not_followed(folder):
    (folder / "cats" / "back").symlink_to(folder)
    photos, _ = find_image_files(str(folder), recursive=True)
    assert len(photos) == 5


def test_many_subfolders_are_counted_and_some_named(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "photo.png").touch()
    (tmp_path / "photo.png").touch()
    _, skipped = find_image_files(str(tmp_path))
    assert "8 images in 8 subfolders (0: 1, 1: 1, 2: 1, 3: 1, 4: 1, and 3 more)" in str(skipped)


def test_nothing_is_said_where_nothing_is_skipped(tmp_path):
    (tmp_path / "photo.png").touch()
    _, skipped = find_image_files(str(tmp_path))
    assert str(skipped) == ""
    assert find_image_files(str(tmp_path / "photo.png")) == ([tmp_path / "photo.png"], None)


def test_a_folder_whose_photos_are_all_in_subfolders_says_so(folder):
    for name in ("a.png", "b.JPG"):
        (folder / name).unlink()
    with pytest.raises(
        ImageError,
        match=r"holds no images; there are images in 2 subfolders \(cats: 2, dogs/young: 1\): use --recursive",
    ):
        find_image_files(str(folder))
    with pytest.raises(ImageError, match=r"holds no images$"):
        find_image_files(str(folder / "empty"), recursive=True)


def test_the_command_tells_it_on_standard_error_and_takes_the_option(folder, tmp_path):
    def explained(*more):
        arguments = ["explain", str(folder), *MODEL, "--out", str(tmp_path / "out"), "--json", *more]
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result

    result = explained()
    assert "skipped 2 files" in result.stderr
    assert "cats: 2, dogs/young: 1" in result.stderr
    assert len(json.loads(result.stdout)["photos"]) == 2
    deep = explained("--recursive")
    assert len(json.loads(deep.stdout)["photos"]) == 5
    # Photos of one name, in different subfolders, get folders of their own.
    assert {place.name for place in (tmp_path / "out").iterdir()} == {"a", "a-2", "b", "c", "d"}
