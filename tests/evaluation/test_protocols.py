"""All protocols: found by name, written down completely, changed only with a new version; and runs that go on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import forked
import vitreous.evaluation.runner.adapters as adapters
from small_data import finite, loaded, samples
from small_models import small_vit
from vitreous.datasets.dataset import Sample
from vitreous.errors import MethodError, ProtocolError
from vitreous.evaluation.protocols import PROTOCOLS, find_protocol, list_protocols
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.methods.spelling import parse
from vitreous.metrics import perturbation
from vitreous.metrics.metric import MetricError
from vitreous.models import Preprocessing
from vitreous.plugin import method

# The version of a protocol and the sha256 of the settings that it stands for. A run's key depends on the settings, and
# readers compare versions: whoever changes a setting raises the version and writes the new line here.
SETTINGS = {
    "chefer-2021-segmentation": (1, "d30db9379e544da5"),
    "chefer-2021-perturbation": (1, "d7b5fc75b27b96d5"),
    "tokentm-probability": (1, "58e660369b8baec8"),
    "tokentm-ablation": (1, "a3bc31c03e2e87a6"),
    "gradtoken-segmentation": (1, "7175364b596c771e"),
    "gradtoken-voc": (1, "e29a1580bfc4fae6"),
    "gradtoken-ablation": (1, "f4c16419253f68bf"),
    "skipplus-faithfulness": (1, "29a9e83763c8bf33"),
    "skipplus-layers": (1, "6ca00f7fc2da5ec2"),
    "skipplus-segmentation": (1, "de4b32a278b9f649"),
    "libra-mif": (1, "4e06b676c6f52e10"),
    "agcam-perturbation": (1, "27a82b4ebbdbcb95"),
    "sanity": (1, "5d929a4f8b7d6628"),
    "localisation": (1, "61e68a5a2e234bd2"),
    "grid-pointing-2x2": (1, "06c39c89e0d0c5c2"),
    "grid-pointing-3x3": (1, "c65197bbf6183149"),
    "prompt-pointing-2-classes": (1, "e022e03264580e1c"),
    "prompt-pointing-4-classes": (1, "e5e281d4ec82798a"),
    "contrast-dropping": (1, "46c296b8eabf6acd"),
    "saco": (1, "0098207b1fa35e07"),
    "road": (1, "64d641b12e1cc329"),
    "fillings": (1, "ef3305f717351d2c"),
    "single-deletion": (1, "98c96e1026963661"),
    "completeness": (1, "5aa90e8b485020c0"),
    "random-logit": (1, "501238fdbce0c4b2"),
    "efficient-randomisation": (1, "8bf374e6d4d77042"),
    "shift-stability": (1, "cdcc3f76604ba5e0"),
    "eraser-movies": (1, "162b7827eb4ea96d"),
    "eraser-movies-rationales": (1, "405fa3e8cdcc8530"),
}


def digest(settings: dict) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("protocol", list_protocols(), ids=lambda protocol: protocol.name)
class TestEveryProtocol:
    def test_settings_change_only_with_the_version(self, protocol):
        assert (protocol.version, digest(protocol.settings())) == SETTINGS[protocol.name]

    def test_settings_are_json_and_hold_every_field_of_every_task(self, protocol):
        settings = protocol.settings()
        assert json.loads(json.dumps(settings)) == settings
        for task, written in zip(protocol.tasks, settings["tasks"], strict=True):
            assert written["task"] == task.kind
            assert {field.name for field in fields(task)} <= written.keys()

    def test_metrics_have_names_of_their_own_and_a_direction(self, protocol):
        names = [metric.name for metric in protocol.metrics()]
        assert len(set(names)) == len(names)
        for metric in protocol.metrics():
            assert metric.direction in ("higher", "lower")
            assert set(metric.columns) <= set(columns_of(protocol))
            assert metric.range[0] < metric.range[1]

    def test_rows_are_spellings(self, protocol):
        for spelling in protocol.spellings(["gae"], 12):
            assert parse(spelling).spelling == spelling

    def test_a_small_run_measures_everything(self, protocol):
        """A model with 20 outputs fits all protocols, VOC's included."""
        if protocol.reads == "texts":
            pytest.importorskip("transformers", reason="transformers is not installed")
            from small_reviews import reviews, text_model

            model, given = text_model(), reviews(2)
        else:
            model, given = loaded(small_vit(depth=2, num_classes=20)), samples(2, classes=20)
        rows = measure(model, given, protocol, protocol.spellings(["gae"], 2))
        assert len(rows) == 2 * len(protocol.spellings(["gae"], 2))
        assert all(finite(row, columns_of(protocol)) for row in rows), rows[0]["error"]
        for metric in protocol.metrics():
            means = np.array([[row[column] for column in metric.columns] for row in rows]).mean(axis=0)
            found = float(metric.combine(means))
            assert np.isfinite(found)
            assert metric.range[0] - 1e-9 <= found <= metric.range[1] + 1e-9


def test_an_unknown_protocol_is_refused_with_a_hint():
    with pytest.raises(ProtocolError, match="did you mean chefer-2021-segmentation"):
        find_protocol("chefer-segmentation")
    assert find_protocol("sanity") is PROTOCOLS["sanity"]


class TestSpellings:
    def test_blanks_and_repetitions_do_not_count(self):
        assert find_protocol("libra-mif").spellings([" gae", "gae", "ixg"], 12) == ["gae", "ixg"]

    def test_ablations_have_rows_of_their_own(self):
        rows = find_protocol("tokentm-ablation").spellings(["gae"], 12)
        assert "gae" not in rows
        assert rows[-4:] == [f"tokentm.rollout:depth={depth}" for depth in (3, 6, 9, 12)]
        assert len(find_protocol("gradtoken-ablation").spellings([], 12)) == 5 * 2 + 12

    def test_shallow_models_have_fewer_quarters(self):
        rows = find_protocol("tokentm-ablation").spellings([], 2)
        assert rows[-2:] == [f"tokentm.rollout:depth={depth}" for depth in (1, 2)]

    def test_the_layer_sweep_starts_everywhere(self):
        protocol = find_protocol("skipplus-layers")
        found = protocol.spellings(["decompx.skipplus", "ixg.propagate", "tokentm:necc=rescaled"], 2)
        assert found == [
            "decompx.plus:start=0",
            "decompx.plus:start=1",
            "ixg.plus.propagate:start=0",
            "ixg.plus.propagate:start=1",
            "tokentm.plus:necc=rescaled,start=0",
            "tokentm.plus:necc=rescaled,start=1",
        ]

    def test_a_method_without_layers_cannot_be_swept(self):
        with pytest.raises(MethodError, match="no layers"):
            find_protocol("skipplus-layers").spellings(["rise"], 12)

    def test_a_wrong_spelling_is_refused(self):
        with pytest.raises(MethodError, match="no method"):
            find_protocol("libra-mif").spellings(["gea"], 12)


class TestRunsThatGoOn:
    def test_photos_without_label_or_mask_get_the_reason(self):
        first, second, third = samples(3)
        photos = [first, replace(second, label=None, mask=None, objects=()), third]
        for name, reason in (
            ("chefer-2021-segmentation", "the image has no mask"),
            ("chefer-2021-perturbation", "the image has no label"),
            ("skipplus-faithfulness", "the image has no label"),
        ):
            rows = measure(loaded(), photos, find_protocol(name), ["gae"])
            assert [row["error"] for row in rows] == [None, reason, None]
            assert all(rows[1][column] is None for column in columns_of(find_protocol(name)))

    def test_a_label_that_the_model_does_not_have_is_an_error_of_its_photo(self):
        photos = samples(2)
        rows = measure(loaded(), [photos[0], replace(photos[1], label=7)], find_protocol("libra-mif"), ["gae"])
        assert [row["error"] for row in rows] == [None, None]  # the predicted class counts
        rows = measure(
            loaded(), [photos[0], replace(photos[1], label=7)], find_protocol("skipplus-faithfulness"), ["gae"]
        )
        assert rows[1]["error"] == "the label 7 is not one of the model's 5 classes"

    def test_a_photo_counts_for_the_tasks_it_can_be_measured_by(self):
        photos = [replace(photo, mask=None, objects=()) for photo in samples(2)]
        protocol = find_protocol("tokentm-ablation")
        rows = measure(loaded(), photos, protocol, ["tokentm"])
        segmentation, accuracy, _ = protocol.tasks
        for row in rows:
            assert row["error"] is None
            assert all(row[column] is None for column in segmentation.columns)
            assert all(row[column] is not None for column in accuracy.columns)

    def test_an_empty_photo_spoils_no_other(self):
        photos = samples(2)
        broken = Sample("broken", Image.new("RGB", (0, 5)), 0)
        rows = measure(loaded(), [photos[0], broken, photos[1]], find_protocol("libra-mif"), ["gae"])
        assert [row["image"] for row in rows] == ["photo-0", "broken", "photo-1"]
        assert rows[0]["error"] is None
        assert rows[2]["error"] is None
        assert "no content" in rows[1]["error"]
        assert measure(loaded(), [broken], find_protocol("libra-mif"), ["gae"])[0]["error"] == rows[1]["error"]

    def test_a_method_that_the_model_cannot_serve_spoils_no_other(self):
        rows = measure(loaded(depth=2), samples(2), find_protocol("libra-mif"), ["gae", "raw_attention:layer=7"])
        by_method = {row["method"]: row["error"] for row in rows}
        assert by_method["gae"] is None
        assert "layer=7 does not exist" in by_method["raw_attention:layer=7"]

    def test_scores_that_overflow_are_errors_of_their_photo(self):
        model, photos, protocol = loaded(), samples(4), find_protocol("libra-mif")
        whole = measure(model, photos, protocol, ["gae"])
        dark = replace(photos[2], image=Image.new("RGB", (40, 40)))

        def overflow(_, inputs, logits):
            return torch.where((inputs[0] == -1).flatten(1).all(dim=1)[:, None], torch.inf, logits)

        model.model.register_forward_hook(overflow)
        rows = measure(model, [*photos[:2], dark, photos[3]], protocol, ["gae"])
        assert "NaN or infinite class scores" in rows[2]["error"]
        for number in (0, 1, 3):
            assert rows[number]["error"] is None
            for column in columns_of(protocol):
                assert rows[number][column] == pytest.approx(whole[number][column], abs=1e-9)  # float64, other batches

    def test_a_method_that_fails_on_one_photo_spoils_no_other(self, registry):
        @method("fails_on_the_dark", values=("tokens",))
        def fails_on_the_dark(view, layer):
            scores = view.tokens(layer).sum(-1)
            if bool((view.runner.images == -1).flatten(1).all(dim=1).any()):
                raise MethodError("too dark")
            return scores

        photos = samples(3)
        photos[1] = replace(photos[1], image=Image.new("RGB", (40, 40)))
        rows = measure(loaded(), photos, find_protocol("libra-mif"), ["gae", "fails_on_the_dark"])
        errors = {(row["image"], row["method"]): row["error"] for row in rows}
        assert errors.pop(("photo-1", "fails_on_the_dark")).endswith("): too dark")
        assert set(errors.values()) == {None}

    def test_maps_that_are_not_finite_are_errors_of_their_method(self, monkeypatch):
        original = adapters.explain_again

        def spoiled(*arguments, **options):
            explanation = original(*arguments, **options)
            explanation.scores["ixg"][1, ..., 0] = torch.nan
            return explanation

        monkeypatch.setattr(adapters, "explain_again", spoiled)
        photos = [replace(photo, label=0) for photo in samples(2)]
        rows = measure(loaded(), photos, find_protocol("skipplus-faithfulness"), ["gae", "ixg"])
        errors = {(row["image"], row["method"]): row["error"] for row in rows}
        assert errors.pop(("photo-1", "ixg")) == "ixg gave a map with NaN or infinite scores"
        assert set(errors.values()) == {None}

    def test_a_case_that_cannot_be_measured_spoils_no_other(self, monkeypatch):
        original = perturbation.log_odds

        def refusing(before, after):
            if before > refused:
                raise MetricError("refused")
            return original(before, after)

        refused = 2.0
        monkeypatch.setattr(perturbation, "log_odds", refusing)
        model, photos, protocol = loaded(), samples(4), find_protocol("tokentm-probability")
        with torch.no_grad():
            squashed = adapters.resized(model.preprocessing, "squash")([photo.image for photo in photos]).double()
            likely = model.model(squashed).softmax(dim=1).amax(dim=1).tolist()
        whole = measure(model, photos, protocol, ["gae"])
        refused = sorted(likely)[2] - 1e-9  # two photos are above
        for row, expected, probability in zip(measure(model, photos, protocol, ["gae"]), whole, likely, strict=True):
            if probability > refused:
                assert row["error"] == "refused"
            else:
                assert row == expected

    def test_blanks_around_a_spelling_are_not_part_of_it(self):
        protocol = find_protocol("libra-mif")
        assert measure(loaded(), samples(1), protocol, [" gae "]) == measure(loaded(), samples(1), protocol, ["gae"])

    def test_a_model_that_is_no_transformer_gives_errors(self):
        network = nn.Sequential(nn.Conv2d(3, 4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        rows = measure(loaded(network), samples(2), find_protocol("libra-mif"), ["gae"])
        assert all("no residual stream of tokens" in row["error"] for row in rows)

    def test_no_photos_give_no_rows(self):
        assert measure(loaded(), [], find_protocol("libra-mif"), ["gae"]) == []


def test_a_row_does_not_depend_on_the_photos_beside_it():
    """Twenty photos are measured in two parts, one by one in twenty."""
    protocol = find_protocol("gradtoken-ablation")
    photos = samples(20)
    methods = ["gradtoken", "gae"]
    together = measure(loaded(), photos, protocol, methods)
    alone = [row for photo in photos[14:18] for row in measure(loaded(), [photo], protocol, methods)]
    for found, expected in zip(alone, together[28:36], strict=True):
        assert (found["image"], found["method"]) == (expected["image"], expected["method"])
        for column in columns_of(protocol):
            assert found[column] == pytest.approx(expected[column], abs=1e-9)  # float64, other batches


def test_the_same_photos_give_the_same_rows_bit_for_bit():
    protocol = find_protocol("chefer-2021-perturbation")
    first, again = (measure(loaded(), samples(5), protocol, ["gae", "tokentm"]) for _ in range(2))
    assert first == again


def test_photos_are_squashed_or_cropped_as_the_protocol_says():
    """A bright stripe at the edge is seen where nothing is cropped, and its mask with it."""
    own = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3, "nearest", "shorter", (32, 32))
    squashed = adapters.resized(own, "squash")
    mask = np.zeros((32, 96), np.int16)
    mask[:, :24] = 1
    assert squashed.displayed_mask(mask, outside=-1).mean() == pytest.approx(0.25, abs=0.04)
    assert (adapters.resized(own, "model").displayed_mask(mask, outside=-1) == 0).all()
    assert squashed.displayed_mask(mask, outside=-1).shape == (32, 32)


def test_what_a_crop_adds_around_a_photo_does_not_count():
    own = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3, "nearest", "squash", (16, 16))
    found = own.displayed_mask(np.full((20, 20), 2, np.int16), outside=-1)
    assert (found[8:24, 8:24] == 2).all()
    found[8:24, 8:24] = -1
    assert (found == -1).all()


@pytest.mark.parametrize("things", ["protocols", "metrics"])
def test_the_page_of_all_protocols_or_metrics_is_up_to_date(things):
    script = Path(__file__).parents[2] / "scripts" / f"write_{things}_page.py"
    result = forked.run([str(script), "--check"])
    assert result.returncode == 0, result.stderr
