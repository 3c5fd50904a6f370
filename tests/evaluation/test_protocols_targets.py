"""Protocols of prompts and of contrasts: closed forms on tiny models, whole runs, the command line, and bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import vitreous
from evaluations import start_worker
from small_data import loaded, samples
from small_dual_encoders import prompt_tokenizer, save_clip, transformers_model
from small_models import PATCHES, small_vit
from vitreous.cli import app
from vitreous.datasets import Mosaics
from vitreous.datasets.folders import Labelled
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.run import RunError
from vitreous.evaluation.runner.adapters import prompt_name, prompted_model, resized
from vitreous.evaluation.runner.measure import measure
from vitreous.models import LoadedModel, Preprocessing
from vitreous.models.dual_encoder import find_dual_encoder
from vitreous.targets import Prompt

CONTRAST = find_protocol("contrast-dropping")
RATIOS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
NAMES = ("cat", "dog", "red_car", "tabby, tiger")


def additive_vit() -> nn.Module:
    """Blocks that add nothing and the mean of all patches: every output is a mean over patches of linear scores."""
    model = small_vit(depth=1, class_token=False, global_pool="avg")
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            if name.startswith(("0.attn.proj", "0.mlp.fc2")):
                parameter.zero_()
    model.fc_norm = nn.Identity()
    return model


def patch_scores(model: nn.Module, pixels: torch.Tensor) -> np.ndarray:
    """The outputs of every patch alone, (patches, classes)."""
    with torch.no_grad():
        tokens = model.patch_embed(pixels) + model.pos_embed
        return model.head(tokens)[0].numpy()


def metric_values(row: dict) -> dict[str, float]:
    return {
        metric.name: float(metric.combine(np.array([row[column] for column in metric.columns])))
        for metric in CONTRAST.metrics()
    }


class TestContrast:
    @pytest.fixture
    def found(self):
        model, given = loaded(additive_vit()), samples(2)
        rows = measure(model, given, CONTRAST, ["ixg", "rollout"])
        assert all(row["error"] is None for row in rows), rows
        return model, given, rows

    def test_curves_of_an_additive_model_have_a_closed_form(self, found):
        """The map orders patches by their part of f_A - f_B, so what is left are means of the lowest and highest."""
        model, given, rows = found
        for sample, row in zip(given, rows[::2], strict=True):
            scores = patch_scores(model.model, model.preprocessing([sample.image]).double())
            first, second = np.argsort(-scores.mean(axis=0))[:2]
            parts = np.sort(scores[:, first] - scores[:, second])[::-1]  # bias included: it shifts all patches alike
            counts = [int(ratio * 100) * PATCHES // 100 for ratio in RATIOS]
            deletion = [parts[count:].mean() for count in counts]
            insertion = [*(parts[:count].mean() for count in counts[1:]), parts.mean()]
            # Float64 throughout; preprocessing is in float32 on both sides.
            assert [row[f"deletion_difference_{100 * ratio:g}"] for ratio in RATIOS] == pytest.approx(
                deletion, abs=1e-9
            )
            ratios = [*RATIOS[1:], 1.0]
            assert [row[f"insertion_difference_{100 * r:g}"] for r in ratios] == pytest.approx(insertion, abs=1e-9)
            values = metric_values(row)
            assert values["deletion f_A - f_B"] == pytest.approx(np.trapezoid(deletion, RATIOS), abs=1e-9)
            assert values["insertion f_A - f_B"] == pytest.approx(np.trapezoid(insertion, ratios), abs=1e-9)

    def test_no_other_order_finds_more_of_an_additive_difference(self, found):
        """The closed form is the lowest and the highest curve there is, so the class's map cannot do better."""
        *_, rows = found
        gains = [metric_values(row) for row in rows[::2]]
        assert all(gain["deletion gain over class map"] > 0 for gain in gains)
        assert all(gain["insertion gain over class map"] > 0 for gain in gains)

    def test_a_map_that_does_not_depend_on_the_target_gains_nothing(self, found):
        *_, rows = found
        for row in rows[1::2]:
            values = metric_values(row)
            # Equal numbers, whose weighted sums cancel up to rounding.
            assert values["deletion gain over class map"] == pytest.approx(0, abs=1e-12)
            assert values["insertion gain over class map"] == pytest.approx(0, abs=1e-12)

    def test_a_run_with_controls(self, tmp_path):
        results = vitreous.evaluate(
            loaded(small_vit(depth=2)), photos(tmp_path, 3), "contrast-dropping", ["ixg", "gae"], out=tmp_path / "runs"
        )
        assert {"ixg", "gae", "random", "centre", "edges"} <= set(results.measured_methods)

    def test_a_model_with_one_value_is_an_error_of_the_image(self):
        model = loaded(small_vit(depth=2, num_classes=1))
        rows = measure(
            LoadedModel("one", model.model, model.preprocessing, None, outputs="value"), samples(1), CONTRAST, ["ixg"]
        )
        assert rows[0]["error"] == "a contrast needs two classes, and the model has one output"


def photos(folder, each: int, names=NAMES) -> Labelled:
    """Photos of one colour and noise, some of every class."""
    random, lines = np.random.default_rng(0), ["file,class_index"]
    (folder / "photos").mkdir(exist_ok=True)
    for number in range(each * len(NAMES)):
        noise = random.integers(0, 256, (24, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "photos" / f"{number:02d}.png")
        lines.append(f"{number:02d}.png,{number // each}")
    (folder / "photos" / "labels.csv").write_text("\n".join(lines))
    if names is not None:
        (folder / "photos" / "class_names.json").write_text(json.dumps(names))
    return Labelled(folder / "photos")


@pytest.fixture(scope="module")
def clip():
    model = transformers_model("clip")
    half = (0.5, 0.5, 0.5)
    return model, Preprocessing((32, 32), half, half), prompt_tokenizer()


class TestPrompts:
    @pytest.mark.parametrize("classes", [2, 4])
    def test_the_score_is_that_of_the_prompt_in_the_cells_of_its_class(self, clip, tmp_path, classes):
        data, protocol = photos(tmp_path, 3), find_protocol(f"prompt-pointing-{classes}-classes")
        mosaics = Mosaics(data, 2, classes)
        model = prompted_model(find_dual_encoder(clip), mosaics, protocol.prompt)
        chosen = [mosaics.load(index) for index in (0, 4, 11)]
        rows = measure(model, chosen, protocol, ["ixg", "tokentm"])
        for sample, row in zip(chosen, rows[::2], strict=True):
            prompt = Prompt(f"a photo of a {prompt_name(NAMES[sample.label])}.")
            preprocessing = resized(clip[1], "squash")
            explained = vitreous.explain(clip, preprocessing([sample.image]).double(), "ixg", target=prompt)
            positive = explained.scores["ixg"][0].view(4, 4).clamp(min=0).numpy()
            cells = sample.mask[28::112, 28::112][:4, :4] > 0  # one pixel of each of 4 x 4 patches of 112 pixels
            assert cells.sum() == 16 // classes
            # Float64; only the order of sums differs.
            assert row["grid_share"] == pytest.approx(positive[cells].sum() / positive.sum(), abs=1e-9)

    def test_a_run_is_resumed_and_has_controls(self, clip, tmp_path):
        data = photos(tmp_path, 3)
        options = {"out": tmp_path / "runs", "threads": 1, "shard_size": 4}
        part = vitreous.evaluate(clip, data, "prompt-pointing-2-classes", ["ixg"], limit=4, **options)
        whole = vitreous.evaluate(clip, data, "prompt-pointing-2-classes", ["ixg"], **options)
        assert {"random", "centre", "edges"} <= set(whole.measured_methods)
        means = {(row["method"], row["metric"]): row["mean"] for row in whole.rows()}
        # Two of four cells: a map that is the same in every quarter has half of its scores there.
        assert means["centre", "GridPG"] == pytest.approx(0.5, abs=1e-9)
        assert len(part.images) == 4
        assert len(whole.images) == 12

    def test_the_command_line_with_workers_and_a_report(self, tmp_path, monkeypatch):
        monkeypatch.setattr("vitreous.evaluation.engines._start", start_worker)  # as it does, without importing anew
        model = save_clip(tmp_path / "clip")
        data = photos(tmp_path, 2)
        arguments = ["--protocol", "prompt-pointing-4-classes", "--model", model, "--data", f"labelled:{data.path}"]
        arguments += ["--methods", "ixg", "--out", str(tmp_path / "runs"), "--threads", "1", "--shard-size", "4"]
        one = CliRunner().invoke(app, ["evaluate", *arguments, "--json"])
        assert one.exit_code == 0, one.output
        rows = json.loads(one.stdout)
        assert {row["method"] for row in rows} >= {"ixg", "random"}
        again = CliRunner().invoke(app, ["evaluate", *arguments, "--json", "--workers", "2"])
        assert json.loads(again.stdout) == rows
        told = CliRunner().invoke(app, ["report", str(tmp_path / "runs")])
        assert told.exit_code == 0, told.output
        assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000

    def test_what_cannot_be_measured_is_one_sentence(self, clip, tmp_path):
        data, options = photos(tmp_path, 1), {"out": tmp_path / "runs"}
        with pytest.raises(UnsupportedModelError, match="has no text tower"):
            vitreous.evaluate(loaded(small_vit()), data, "prompt-pointing-2-classes", ["ixg"], **options)
        with pytest.raises(RunError, match="leave out outputs"):
            vitreous.evaluate(clip, data, "prompt-pointing-2-classes", ["ixg"], outputs="sigmoid", **options)
        (tmp_path / "photos" / "class_names.json").unlink()
        with pytest.raises(RunError, match="prompts need the names of the classes"):
            vitreous.evaluate(clip, Labelled(data.path), "prompt-pointing-2-classes", ["ixg"], **options)


@pytest.mark.parametrize(
    ("name", "prompted"), [("red_car", "red car"), ("tabby, tabby cat", "tabby"), ("great_pyrenees", "great pyrenees")]
)
def test_names_of_classes_in_prompts(name, prompted):
    assert prompt_name(name) == prompted


def test_the_model_of_prompts_is_demo_clip_unless_another_is_named(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        vitreous, "evaluate", lambda choice, *_, **__: asked.append(choice.name) or (_ for _ in ()).throw(SystemExit)
    )
    for protocol in ("prompt-pointing-2-classes", "contrast-dropping"):
        CliRunner().invoke(app, ["evaluate", "--protocol", protocol, "--data", f"labelled:{tmp_path}"])
    assert asked == ["demo-clip", "demo"]


def test_zero_shot_classifiers_are_evaluated_like_any_other_model(clip, tmp_path):
    """Labels are outputs, probabilities are the softmax of scores, and a run finds the same classifier again."""
    model = vitreous.zero_shot(clip, [prompt_name(name) for name in NAMES])
    data, options = photos(tmp_path, 2), {"out": tmp_path / "runs", "threads": 1}
    for protocol in ("grid-pointing-2x2", "skipplus-faithfulness", "contrast-dropping"):
        results = vitreous.evaluate(model, data, protocol, ["ixg", "gae"], **options)
        assert set(results.measured_methods) >= {"ixg", "gae"}, results.failures()
        assert not results.failures()
