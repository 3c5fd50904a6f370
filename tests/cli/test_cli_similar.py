"""``vitreous similar``: two images with the patches that match, a folder with its nearest neighbours, bad input."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vitreous
from vitreous.cli import app
from vitreous.explanation.explanation import Explanation

MODEL = ("--model", "timm/test_vit@random", "--image-size", "32")


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for name in ("query", "photos/a", "photos/b", "photos/c"):
        Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    with Image.open(tmp_path / "query.png") as photo:
        photo.rotate(2).save(tmp_path / "photos" / "near.png")
    return tmp_path


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["similar", *map(str, arguments)], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result


def test_two_images_are_matched(folder):
    images = folder / "query.png", folder / "photos" / "near.png"
    told = json.loads(run(*images, *MODEL, "--pairs", 3, "--out", folder / "out", "--json").stdout)
    model = vitreous.load_model("timm/test_vit@random", image_size=32)
    found = vitreous.match_patches(model, *map(str, images))
    assert told["method"] == "decompx:layer=-1"
    assert told["similarity"] == pytest.approx(found.similarity)
    assert [(tuple(pair["first"]), tuple(pair["second"])) for pair in told["pairs"]] == [
        pair[:2] for pair in found.pairs(3)
    ]
    assert np.array(told["maps"][1]).shape == found.grids[1]
    # Float32, and the same run of the same model.
    assert np.allclose(np.load(folder / "out" / "scores.npy"), found.scores.numpy(), rtol=1e-4, atol=1e-7)
    saved = json.loads((folder / "out" / "match.json").read_text())
    assert saved["pairs"] == told["pairs"]
    with Image.open(told["picture"]) as picture:
        assert picture.width > 2 * picture.height * 0.9


def test_a_folder_gives_its_nearest_neighbours(folder):
    arguments = folder / "query.png", folder / "photos", *MODEL, "--method", "ixg,rollout", "-k", 2
    told = json.loads(run(*arguments, "--out", folder / "out", "--json").stdout)
    found = vitreous.similar(
        vitreous.load_model("timm/test_vit@random", image_size=32), folder / "query.png", folder / "photos", "ixg", k=2
    )
    assert [neighbour["image"] for neighbour in told["neighbours"]] == [str(file) for file in found.files]
    assert told["neighbours"][0]["similarity"] == pytest.approx(found.similarities[0], abs=1e-6)
    assert Explanation.load(folder / "out" / "query").methods == ("ixg", "rollout")
    assert len(Explanation.load(folder / "out" / "neighbours")) == 2
    assert json.loads((folder / "out" / "neighbours.json").read_text())["neighbours"] == told["neighbours"]
    assert (folder / "out" / "neighbours.png").is_file()
    assert "near.png" in run(*arguments, "--out", folder / "out").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("photos", "query.png"), "is a folder: the first argument is one image"),
        (("missing.png", "query.png"), "there is no such file"),
        (("query.png", "missing.png"), "there is no such file"),
        (("query.png", "photos/a.png", "--method", "ixg,cat"), "two images are matched by one method, not by 2"),
        (("query.png", "photos/a.png", "--method", "gae"), "gae is not linear in what it explains"),
        (("query.png", "photos/a.png", "--method", "gea"), "there is no method 'gea'"),
        (("query.png", "alone"), "holds no image besides query.png"),
        (("query.png", "empty"), "no image"),
    ],
)
def test_bad_input_is_one_line(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    (folder / "alone").mkdir()
    (folder / "alone" / "query.png").symlink_to(folder / "query.png")
    result = run(*arguments, *MODEL, code=2)
    assert message in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.output
