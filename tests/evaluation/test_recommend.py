"""``vitreous.recommend``: figures are those of ``evaluate``; a method must beat the controls, or that is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import vitreous
from evaluations import write_photos
from small_data import loaded
from small_models import SIZE, small_vit
from vitreous.cli import app
from vitreous.errors import DataError, InputError
from vitreous.evaluation.recommend import PhotoFolder, _protocol
from vitreous.models import LoadedModel, Preprocessing


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Grey photos with one bright square each, in one of sixteen places."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    for number in range(12):
        pixels = np.full((SIZE, SIZE, 3), 120, np.uint8)
        row, column = divmod((7 * number) % 16, 4)
        pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 250
        Image.fromarray(pixels).save(folder / ("more" if number % 2 else ".") / f"{number}.png")
    return folder


def small() -> LoadedModel:
    return loaded(depth=1)  # randomised block by block, so that the time grows with the square of its depth


ONE_BLOCK = """
from small_models import small_vit

def build():
    model = small_vit(depth=1)
    model.image_size, model.mean, model.std = 32, 0.5, 0.5
    return model
"""


@pytest.fixture(scope="module")
def found(photos, tmp_path_factory):
    """Two photos have no p below 0.05, however good a map is."""
    return vitreous.recommend(small(), photos, ["gae", "rollout"], limit=2, out=tmp_path_factory.mktemp("runs"))


def test_figures_are_those_of_evaluate(photos, found, tmp_path):
    model = small()
    results = vitreous.evaluate(
        model,
        PhotoFolder(photos),
        _protocol("dropped", with_masks=False),
        ["gae", "rollout"],
        limit=2,
        shuffle=True,
        out=tmp_path,
    )
    expected = {(row["method"], row["metric"]): row["mean"] for row in results.rows()}
    measured = {(row.method, name): one.mean for row in found.rows for name, one in row.metrics.items()}
    assert measured == pytest.approx(expected, abs=1e-9)
    assert {row.method for row in found.rows if row.control} == {"random", "centre", "edges"}
    assert found.photos == 2
    assert all(row.cost is None if row.control else row.cost > 0 for row in found.rows)


def test_rows_come_with_the_most_faithful_first(found):
    name = next(iter(found.rows[0].metrics))
    means = [row.metrics[name].mean for row in found.rows]
    assert means == sorted(means, reverse=True)


def test_where_nothing_beats_the_controls_that_is_said(found):
    assert found.choices["faithfulness"].method is None
    assert "no method beats the controls on these 2 images" in str(found)
    assert found.choices["speed"].method is None
    assert "localisation" not in found.choices
    assert "the data set has no masks" in str(found)


def test_a_method_that_beats_the_controls_is_recommended(photos, tmp_path):
    """Dropping each patch alone says more about dropping several than any control does."""
    method = "occlusion:by=drop"
    found = vitreous.recommend(loaded(depth=1), photos, [method], limit=8, out=tmp_path)
    choice = found.choices["faithfulness"]
    assert choice.method == method
    assert choice.p < 0.05
    assert choice.sentence.startswith(f"Faithfulness: use {method}, ")
    assert choice.control.method in choice.sentence
    assert found.choices["speed"].method == method


def test_masks_bring_localisation(tmp_path):
    data = write_photos(tmp_path / "photos", 2)
    found = vitreous.recommend(small(), data, "gae", limit=2, out=tmp_path / "runs")
    assert found.choices["localisation"].metric == "mAP"
    assert {"mAP", "mIoU"} <= set(found.rows[0].metrics)


def test_the_same_call_computes_nothing_again(photos, found):
    shards = {file: file.stat().st_mtime_ns for file in found.folder.rglob("*.parquet")}
    again = vitreous.recommend(small(), photos, ["gae", "rollout"], limit=2, out=found.folder.parent)
    assert again.folder == found.folder
    assert shards
    assert {file: file.stat().st_mtime_ns for file in again.folder.rglob("*.parquet")} == shards


class Convolved(nn.Module):
    """Tokens meet in a convolution as well, so that none can be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit(depth=2)
        self.mix = nn.Conv1d(24, 24, 3, padding=1).double()
        self.vit.blocks[0].register_forward_hook(lambda _m, _i, out: out + 0.1 * self.mix(out.mT).mT)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.vit(images)


def test_a_model_that_cannot_drop_patches_has_them_painted(photos, tmp_path):
    preprocessing = Preprocessing((SIZE, SIZE), (0.5,) * 3, (0.5,) * 3)
    model = LoadedModel("convolved", Convolved().eval(), preprocessing, None)
    found = vitreous.recommend(model, photos, ["gae"], limit=2, out=tmp_path)
    assert found.removal == "mean"
    assert "painted with the mean colour" in str(found)
    assert np.isfinite(next(iter(found.rows[0].metrics.values())).mean)


def test_everything_can_be_written_as_json(found):
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["photos"] == 2
    assert {row["method"] for row in values["rows"]} == {"gae", "rollout", "random", "centre", "edges"}


def test_input_that_cannot_be_measured_is_refused(photos, tmp_path):
    with pytest.raises(InputError, match="at least 2"):
        vitreous.recommend(small(), photos, limit=1, out=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="holds no images"):
        vitreous.recommend(small(), empty, out=tmp_path)


def test_the_command_line_prints_table_and_sentences(photos, tmp_path):
    (tmp_path / "one_block.py").write_text(ONE_BLOCK)
    model = f"py/{tmp_path / 'one_block.py'}:build"
    arguments = ["recommend", model, str(photos), "--limit", "2", "--methods", "gae", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "random (control)" in done.output
    assert "no method beats the controls" in " ".join(done.output.split())
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(as_json.stdout)["choices"]["faithfulness"]["method"] is None
