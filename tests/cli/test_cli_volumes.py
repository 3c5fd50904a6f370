"""Volumes and clips on the command line: 3-D models of one's own and of transformers, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitreous
from vitreous.cli import app
from vitreous.errors import ImageError, InputError, ModelError
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.volumes import read_volume
from vitreous.metrics.perturbation import curve_columns
from vitreous.models import VolumePreprocessing
from vitreous.models.preprocessing import from_video_processor

OWN = """
import torch
from torch import nn


class Volumes(nn.Module):
    image_size, mean, std, class_names = (8, 16, 16), 0.5, 0.25, ("none", "some")

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv3d(1, 16, (2, 8, 8), (2, 8, 8))
        self.position = nn.Parameter(torch.randn(1, 16, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 2)

    def forward(self, volumes):
        tokens = self.embed(volumes).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(tokens).mean(dim=1))


def build():
    return Volumes()
"""


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})  # no path is folded
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("volumes")
    random = np.random.default_rng(0)
    (place / "own.py").write_text(OWN)
    (place / "clip").mkdir()
    for number in range(12):  # frame10 comes behind frame9
        pixels = np.full((20, 28, 3), 20 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(place / "clip" / f"frame{number}.png")
    (place / "scans").mkdir()
    lines = ["file,class_index"]
    for number in range(4):
        np.save(place / "scans" / f"scan{number}.npy", random.random((8, 16, 16)).astype(np.float32))
        lines.append(f"scan{number}.npy,{number % 2}")
    (place / "scans" / "labels.csv").write_text("\n".join(lines))
    return place


@pytest.fixture(scope="module")
def video(folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.VideoMAEConfig(
        image_size=16, patch_size=8, num_frames=6, tubelet_size=2, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.VideoMAEForVideoClassification(config).save_pretrained(folder / "videomae")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    transformers.VideoMAEImageProcessor(**sizes).save_pretrained(folder / "videomae")
    return f"hf/{folder / 'videomae'}"


def test_volumes_of_an_own_model(folder):
    model = f"py/{folder / 'own.py'}:build"
    scan = folder / "scans" / "scan0.npy"
    told = json.loads(
        run(
            "explain", scan, "--model", model, "--method", "gae,decompx", "--out", folder / "out", "--trust", "--json"
        ).stdout
    )
    (one,) = told["photos"]
    assert one["comparison"] == str(folder / "out" / "scan0" / "slices.png")
    assert one["predictions"][0]["name"] in {"none", "some"}
    assert "sentence" in one["trust"]
    with Image.open(one["comparison"]) as picture:
        assert picture.width > picture.height
    saved = Explanation.load(folder / "out" / "scan0")
    # The same numbers as those of the tensor, which is the file with the attributes' mean and std.
    loaded = vitreous.load_model(model)
    tensor = (torch.from_numpy(np.load(scan))[None, None] - 0.5) / 0.25
    expected = vitreous.explain(loaded.model, tensor, ["gae", "decompx"])
    for method in ("gae", "decompx"):
        assert saved.maps(method).shape == (1, 4, 2, 2)
        torch.testing.assert_close(saved.scores[method], expected.scores[method], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(saved.logits, expected.logits)


def test_a_folder_of_frames_is_one_clip(folder, video):
    told = json.loads(
        run("explain", folder / "clip", "--model", video, "--method", "gae", "--out", folder / "out", "--json").stdout
    )
    (one,) = told["photos"]
    assert one["comparison"] == str(folder / "out" / "clip" / "frames.png")
    loaded = vitreous.load_model(video)
    pixels = loaded.preprocessing([folder / "clip"])
    assert pixels.shape == (1, 6, 3, 16, 16)
    # Frames 0, 2, 4, 7, 9 and 11 of twelve: 0, 2.2, 4.4, ... rounded. Each is of one colour; 0.5 is mean and std.
    shown = (pixels[0, :, 0, 0, 0] * 0.5 + 0.5) * 255
    torch.testing.assert_close(shown, torch.tensor([0.0, 40, 80, 140, 180, 220]), rtol=0, atol=1e-3)
    processor = pytest.importorskip("transformers").VideoMAEImageProcessor.from_pretrained(folder / "videomae")
    frames = [Image.open(folder / "clip" / f"frame{number}.png") for number in (0, 2, 4, 7, 9, 11)]
    theirs = processor(frames, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, theirs, rtol=0, atol=2 / 255)  # Pillow rounds to 8 bits after resizing


def test_vivit_subtracts_one_behind_its_factor(folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.VivitConfig(image_size=16, num_frames=2, tubelet_size=[2, 8, 8])
    settings = transformers.VivitImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    ours = from_video_processor(settings.to_dict(), config)([folder / "clip"])
    frames = [Image.open(folder / "clip" / f"frame{number}.png") for number in (0, 11)]
    theirs = settings(frames, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 / 127.5)


def test_volumes_are_evaluated_by_dropped_tokens(folder):
    model = f"py/{folder / 'own.py'}:build"
    rows = json.loads(
        run(
            "evaluate", "--protocol", "libra-mif", "--data", f"volumes:{folder / 'scans'}", "--model", model,
            "--methods", "gae", "--out", folder / "runs", "--json",
        ).stdout
    )  # fmt: skip
    assert {row["method"] for row in rows} >= {"gae", "random"}
    results = vitreous.evaluate(
        model, f"volumes:{folder / 'scans'}", "skipplus-faithfulness", ["gae"], out=folder / "runs", threads=1
    )
    (column,) = curve_columns("deletion_", "drop", [0.5])
    table = results.stores[0].read(list(results.stores[0].run.shards()), ["image", "method", column])
    found = {(row["image"], row["method"]): row[column] for row in table.to_pylist()}
    # By hand: the eight highest of 16 tokens are left out behind the positional embedding.
    loaded = vitreous.load_model(model)
    network = loaded.model
    for number in range(4):
        pixels = loaded.preprocessing([folder / "scans" / f"scan{number}.npy"])
        scores = vitreous.explain(network, pixels, "gae", target=number % 2).scores["gae"][0]
        kept = scores.argsort(descending=True, stable=True)[8:].sort().values
        with torch.no_grad():
            tokens = network.embed(pixels).flatten(2).transpose(1, 2) + network.position
            outputs = [network.head(network.encoder(part).mean(dim=1)) for part in (tokens, tokens[:, kept])]
        whole, half = (output.double().softmax(dim=1)[0, number % 2].item() for output in outputs)
        assert found[f"scan{number}.npy", "gae"] == pytest.approx(whole - half, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "--protocol", "chefer-2021-perturbation", "--data", "DATA", "--model", "MODEL"), "by dropped"),
        (
            ("evaluate", "--protocol", "libra-mif", "--data", "DATA", "--model", "timm/test_vit@random"),
            "holds volumes or clips, but timm/test_vit@random takes images",
        ),
        (("audit", "MODEL", "DATA"), "an audit examines images"),
        (("recommend", "MODEL", "DATA"), "methods are recommended for images"),
        (("explain", "FRAME", "--model", "MODEL"), "takes volumes or clips"),
        (("explain", "SCAN", "--model", "timm/test_vit@random"), "this is a volume"),
        (("explain", "SCAN", "--model", "MODEL", "--report", "report.html"), "reports show images"),
        (("explain", "SCAN", "--model", "MODEL", "--window", "4"), "neither range nor CENTRE,WIDTH"),
        (("explain", "demo", "--model", "timm/test_vit@random", "--window", "range"), "--window is for"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_in_words_about_volumes(folder, arguments, message):
    given = {
        "DATA": f"volumes:{folder / 'scans'}",
        "MODEL": f"py/{folder / 'own.py'}:build",
        "FRAME": folder / "clip" / "frame1.png",
        "SCAN": folder / "scans" / "scan0.npy",
    }
    result = CliRunner().invoke(app, [str(given.get(one, one)) for one in arguments], env={"COLUMNS": "300"})
    assert result.exit_code != 0
    assert message in result.output


def test_reading(tmp_path):
    np.save(tmp_path / "clip.npy", np.full((5, 4, 6, 3), 51, dtype=np.uint8))  # as libraries of videos give it
    assert read_volume(tmp_path / "clip.npy").shape == (1, 3, 5, 4, 6)
    assert float(read_volume(tmp_path / "clip.npy").max()) == pytest.approx(0.2)
    np.save(tmp_path / "two.npy", np.zeros((2, 5, 4, 6), dtype=np.float32))
    assert read_volume(tmp_path / "two.npy").shape == (1, 2, 5, 4, 6)
    np.save(tmp_path / "flat.npy", np.zeros((5, 4)))
    with pytest.raises(ImageError, match="a volume has"):
        read_volume(tmp_path / "flat.npy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="holds no image files"):
        read_volume(tmp_path / "empty")
    preprocessing = VolumePreprocessing((4, 6), (0.0,) * 3, (1.0,) * 3, depth=5)
    with pytest.raises(InputError, match="has 2 channels, but the model takes 1"):
        preprocessing([tmp_path / "two.npy"])
    with pytest.raises(InputError, match="takes volumes or clips"):
        preprocessing([Image.new("RGB", (4, 4))])
    with pytest.raises(ModelError, match="one slice or more"):
        VolumePreprocessing((4, 6), (0.0,) * 3, (1.0,) * 3, depth=0)
