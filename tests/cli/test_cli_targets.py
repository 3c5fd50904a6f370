"""The command line with targets that are not a class: contrasts, another picture, a mask, one of several heads."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitreous.cli import app
from vitreous.explanation.explanation import Explanation

OWN = '''
import timm
import torch
from torch import nn
from vitreous.models import LoadedModel, Preprocessing


class Heads(nn.Module):
    """A dense head and two classifiers on one small ViT."""

    def __init__(self):
        super().__init__()
        self.vit = timm.create_model("test_vit", num_classes=0, img_size=32)
        self.dense, self.cats, self.dogs = (nn.Linear(self.vit.embed_dim, classes) for classes in (3, 4, 5))

    def forward(self, images):
        tokens = self.vit.forward_features(images)
        patches = self.dense(tokens[:, 1:]).transpose(1, 2)
        side = int(patches.shape[2] ** 0.5)
        maps = nn.functional.interpolate(patches.unflatten(2, (side, side)), images.shape[-2:])
        return {"maps": maps, "cat_head": self.cats(tokens[:, 0]), "dog_head": self.dogs(tokens[:, 0])}


class Cats(Heads):
    class_names = ("tabby", "tiger cat", "lion", "lynx")

    def forward(self, images):
        return super().forward(images)["cat_head"]


def heads():
    torch.manual_seed(0)
    return Heads().eval()


def cats():
    torch.manual_seed(0)
    return Cats().eval()
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    random = np.random.default_rng(0)
    for name, size in (("photo", (40, 60)), ("other", (50, 50))):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    mask = np.zeros((40, 60), dtype=np.uint8)
    mask[10:30, 20:40] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return tmp_path


def run(folder, model, *arguments):
    given = ("explain", folder / "photo.png", "--model", f"py/{folder}/own.py:{model}", "--image-size", 32)
    given += ("--mean", 0.5, "--std", 0.5, "--method", "ixg", "--out", folder / "out", *arguments)
    return CliRunner().invoke(app, [str(argument) for argument in given], env={"COLUMNS": "200"})


def test_a_contrast(folder):
    result = run(folder, "cats", "--target", "tabby vs tiger cat", "--target", "lion vs next", "--target", "lynx")
    assert result.exit_code == 0, result.output
    saved = Explanation.load(folder / "out" / "photo")
    assert saved.label(0, 0) == "tabby rather than tiger cat"
    assert saved.label(0, 1).startswith("lion rather than")
    assert saved.label(0, 2) == "lynx"
    assert "explained: tabby rather than tiger cat (" in result.stdout
    assert saved.provenance["targets"][:2] == ["0 vs 1", "2 vs next"]
    listed = json.loads(run(folder, "cats", "--target", "predicted vs next", "--json").stdout)["photos"][0]["targets"]
    assert listed[0]["index"] is None
    assert listed[0]["value"] > 0


def test_a_contrast_in_a_figure_and_a_report(folder):
    page = folder / "page.html"
    assert run(folder, "cats", "--target", "tabby vs lion", "--report", page).exit_code == 0
    assert "tabby rather than lion" in page.read_text()
    assert "they follow the probability of a class" in page.read_text()
    for figure in ("overlay", "heads"):
        given = ("figure", figure, folder / "photo.png", "--model", f"py/{folder}/own.py:cats", "--image-size", "32")
        given += ("--mean", "0.5", "--std", "0.5", "--method", "gradtoken", "--target", "tabby vs lion")
        drawn = folder / f"{figure}.png"
        result = CliRunner().invoke(app, [str(each) for each in (*given, "--out", drawn)])
        assert result.exit_code == 0, result.output
        assert drawn.is_file()


def test_another_picture(folder):
    result = run(folder, "cats", "--similar-to", folder / "other.png", "--similar-to", folder / "photo.png")
    assert result.exit_code == 0, result.output
    saved = Explanation.load(folder / "out" / "photo")
    assert saved.label(0, 0) == "similarity to other.png"
    assert saved.value(saved.class_index(0, 1)) == pytest.approx(1, abs=1e-5)  # to itself


def test_a_mask(folder):
    result = run(folder, "heads", "--output", "maps", "--mask", folder / "mask.png", "--target", 2)
    assert result.exit_code == 0, result.output
    saved = Explanation.load(folder / "out" / "photo")
    # The photo's shorter side, 40 pixels, becomes 32: 20 x 20 pixels of the mask become 16 x 16.
    assert saved.label() == "class 2 in 256 pixels"
    assert saved.provenance["output"] == "maps"
    assert run(folder, "heads", "--output", "maps", "--mask", folder / "mask.png").exit_code == 0


def test_one_of_several_heads(folder):
    assert run(folder, "heads", "--output", "dog_head", "--target", "4").exit_code == 0
    assert Explanation.load(folder / "out" / "photo").logits.shape == (1, 5)


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        ("cats", ("--target", "tabby vs dog"), "there is no class 'dog'"),
        ("cats", ("--target", "tabby vs tabby"), "a contrast needs two classes, not 0 twice"),
        ("cats", ("--target", "tabby vs lion", "--topk", "2"), "it cannot be combined with --topk"),
        ("cats", ("--similar-to", "gone.png"), "gone.png"),
        ("cats", ("--mask", "MASK"), "needs a dense output of shape"),
        ("heads", ("--output", "maps", "--mask", "OTHER"), "the mask is 50 x 50 pixels, and has to be 60 x 40 as the"),
        ("heads", ("--output", "maps", "--mask", "MASK", "--target", "1 vs 2"), "--mask takes classes of --target"),
        ("heads", ("--output", "bird_head"), "the model returns no output 'bird_head': it returned dict of maps"),
        ("heads", (), "must return class scores"),
    ],
)
def test_mistakes(folder, model, arguments, sentence):
    files = {"MASK": folder / "mask.png", "OTHER": folder / "other.png"}
    result = run(folder, model, *(files.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
