"""Curves over dropped patches: golden numbers of the SkipPLUS authors, a known model, nothing asked twice."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import vitreous
from areas import trapezoid
from small_data import arrays_in, as_tensor, batch_of, finite, loaded, samples
from small_models import golden_model, random_images, small_vit
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.evaluation.tasks.patch_masking import InfluenceDeletion, InsertionDeletion
from vitreous.evaluation.tasks.sanity import Concentration
from vitreous.evaluation.tasks.task import Case
from vitreous.metrics import sparseness
from vitreous.tape.runner import ModelRunner

GOLDEN = Path(__file__).parents[1] / "golden" / "skipplus_true_token_masking.npz"
PERCENT = range(10, 100, 10)


def golden_rows(golden: dict[str, np.ndarray]) -> list[dict[str, float]]:
    model, _ = golden_model()
    maps = as_tensor(golden["scores"][:, 1:]).reshape(-1, 4, 4)
    batch = batch_of(model, as_tensor(golden["images"]), {"given": maps}, golden["labels"])
    return find_protocol("skipplus-faithfulness").tasks[0].measure(batch, list(batch.maps))


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(dim=-1).numpy()


class TestGolden:
    """Pictures with scores of 16 patches; ``topratio`` keeps the top patches, ``nratio`` drops them."""

    @pytest.fixture
    def golden(self):
        return arrays_in(GOLDEN)

    @pytest.mark.parametrize(("curve", "name"), [("insertion", "topratio"), ("deletion", "nratio")])
    def test_answers_at_every_ratio(self, golden, curve, name):
        labels = golden["labels"]
        places = (range(len(labels)), labels)
        rows = golden_rows(golden)
        for percent in PERCENT:
            logits = golden[f"{name}_{percent}_logits"]
            fall = softmax(golden["logits"])[places] - softmax(logits)[places]
            assert [row[f"{curve}_hit_{percent}"] for row in rows] == (logits.argmax(axis=1) == labels).tolist()
            # Numbers of order 1 in float64.
            assert [row[f"{curve}_drop_{percent}"] for row in rows] == pytest.approx(fall, abs=1e-9)

    @pytest.mark.shared
    def test_curves_and_areas_of_all_pictures(self, shared):
        golden = arrays_in(shared / "golden" / GOLDEN.name)
        rows = golden_rows(golden)
        for curve, name in (("insertion", "topratio"), ("deletion", "nratio")):
            for kept, column in (("acc", "hit"), ("aopc", "drop")):
                means = [np.mean([row[f"{curve}_{column}_{percent}"] for row in rows]) for percent in PERCENT]
                assert means == pytest.approx(golden[f"{kept}_{name}"], abs=1e-9)
        # The trapezoid over the ratio with the unmasked point, in percent; two of the four as 100 - x.
        whole = float((golden["logits"].argmax(axis=1) == golden["labels"]).mean())
        ratios = np.arange(1, 10) / 10
        expected = (
            100 * trapezoid([*golden["acc_topratio"], whole], [*ratios, 1.0]),
            100 - 100 * trapezoid([whole, *golden["acc_nratio"]], [0.0, *ratios]),
            100 - 100 * trapezoid([*golden["aopc_topratio"], 0.0], [*ratios, 1.0]),
            100 * trapezoid([0.0, *golden["aopc_nratio"]], [0.0, *ratios]),
        )
        for metric, value in zip(InsertionDeletion().metrics, expected, strict=True):
            means = np.array([[row[column] for column in metric.columns] for row in rows]).mean(axis=0)
            assert float(metric.combine(means)) == pytest.approx(value, abs=1e-9)


class SumOfPatches(nn.Module):
    """A ViT whose blocks do nothing: every patch brings its brightness, and class 1 is their sum against a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit(depth=2, global_pool="avg", class_token=False, init_values=None)
        with torch.no_grad():
            for block in self.vit.blocks:
                block.attn.proj.weight.zero_()
                block.attn.proj.bias.zero_()
                block.mlp.fc2.weight.zero_()
                block.mlp.fc2.bias.zero_()
            self.vit.pos_embed.zero_()
            self.vit.patch_embed.proj.bias.zero_()
            self.vit.patch_embed.proj.weight.zero_()
            self.vit.patch_embed.proj.weight[0] = 1 / (3 * 64)

    def forward(self, images):
        tokens = self.vit.blocks(self.vit.patch_embed(images))
        brightness = tokens[..., 0].sum(dim=1)
        return torch.stack([torch.zeros_like(brightness), brightness], dim=1)


def test_most_influential_first_is_below_least_influential_first_for_a_model_that_adds_patches():
    images = random_images(6) + 0.3
    truth = nn.functional.avg_pool2d(images.mean(dim=1), 8)
    model = SumOfPatches()
    positive = model(images)[:, 1] > 0
    maps = torch.where(positive[:, None, None], truth, -truth)  # what each patch does for the predicted class
    batch = batch_of(model, images, {"true": maps, "opposite": -maps})
    task = InfluenceDeletion()
    rows = dict(zip(batch.maps, task.measure(batch, list(batch.maps)), strict=True))
    for number in range(6):
        right, wrong = rows[Case(number, "true")], rows[Case(number, "opposite")]
        for percent in range(0, 100, 10):
            assert right[f"mif_hit_{percent}"] <= right[f"lif_hit_{percent}"]
            assert right[f"lif_hit_{percent}"] == wrong[f"mif_hit_{percent}"]
        # Dropping what speaks against the class never changes the answer.
        assert all(right[f"lif_hit_{percent}"] == 1 for percent in range(0, 100, 10))
    mif, lif = task.metrics
    means = {
        metric.name: float(
            metric.combine(np.array([[row[c] for c in metric.columns] for row in rows.values()]).mean(axis=0))
        )
        for metric in (mif, lif)
    }
    assert means["MIF"] == pytest.approx(means["LIF"], abs=1e-9)  # over a map and its opposite together


def test_patches_of_all_methods_and_photos_are_asked_about_once_and_together():
    model = small_vit()
    lengths = []
    generator = torch.Generator().manual_seed(0)
    maps = {name: torch.rand(3, 4, 4, dtype=torch.float64, generator=generator) for name in ("one", "two")}
    maps["same"] = maps["one"].clone()
    batch = batch_of(model, random_images(3), maps)
    # The layout, and whether patches can be dropped, are found by runs of their own.
    batch.runner.logits_of_kept(random_images(1), torch.tensor([[0]]))
    with model.blocks[0].register_forward_pre_hook(lambda _, given: lengths.append(tuple(given[0].shape[:2]))):
        InsertionDeletion().measure(batch, list(batch.maps))
        InsertionDeletion().measure(batch, list(batch.maps))
    # Sixteen patches: 1, 3, 4, 6, 8, 9, 11, 12 or 14 are put in, and 15 ... 2 are left; the class token stays. 4, 8 and
    # 12 are both, and go through the model together.
    assert sorted(lengths) == sorted((12 if count in (4, 8, 12) else 6, count + 1) for count in range(1, 16))


def test_maps_of_pixels_rank_patches_by_their_means():
    model, images = small_vit(), random_images(2)
    small = torch.rand(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    large = small.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
    batch = batch_of(model, images, {"small": small, "large": large})
    rows = InsertionDeletion().measure(batch, list(batch.maps))
    for number in range(2):
        assert rows[number] == pytest.approx(rows[number + 2], abs=1e-12)  # at other places of a batch


@pytest.mark.parametrize("task", [InsertionDeletion(percent=(25, 50, 75)), InfluenceDeletion(percent=(25, 50, 75))])
def test_metrics_are_those_of_the_steps_that_were_asked_for(task):
    protocol = replace(find_protocol("skipplus-faithfulness"), tasks=(task,))
    rows = measure(loaded(), samples(2), protocol, ["ixg"])
    for row in rows:
        for metric in task.metrics:
            curve = [row[column] for column in metric.columns]
            # The three steps and the unmasked photo, a quarter apart; numbers below 100 in float64.
            area = 100 * trapezoid(curve, 0.25 * np.arange(len(curve)))
            turned = metric.name.endswith("(100 - x)")
            assert float(metric.combine(np.array(curve))) == pytest.approx(100 - area if turned else area, abs=1e-9)


@pytest.mark.parametrize("name", ["skipplus-faithfulness", "skipplus-layers", "libra-mif"])
def test_a_run_from_photos_to_rows(name):
    protocol = find_protocol(name)
    methods = protocol.spellings(["decompx", "ixg.skipplus"], depth=3)
    rows = measure(loaded(), samples(2), protocol, methods)
    assert len(rows) == 2 * (6 if name == "skipplus-layers" else 2)
    assert all(finite(row, columns_of(protocol)) for row in rows)


class TestOneLogit:
    """A model that says one number, as for MURA: above zero for yes."""

    def test_either_label_is_explained_and_measured(self):
        model = small_vit(num_classes=1, depth=2)
        photos = samples(4, classes=2)
        rows = measure(loaded(model), photos, find_protocol("skipplus-faithfulness"), ["ixg"])
        with torch.no_grad():
            logits = model(loaded(model).preprocessing([photo.image for photo in photos]).double())[:, 0]
        for row, photo, logit in zip(rows, photos, logits, strict=True):
            assert row["error"] is None
            assert row["deletion_hit_0"] == float((logit > 0) == (photo.label == 1))

    def test_the_target_is_the_logit_or_its_opposite_and_the_probability_its_sigmoid(self):
        # So large a gradient that gae, which adds it to an identity, ranks patches otherwise for half of it.
        model = small_vit(num_classes=1, depth=2)
        with torch.no_grad():
            model.head.weight.mul_(300)
        opposite = deepcopy(model)
        with torch.no_grad():
            opposite.head.weight.neg_()
            opposite.head.bias.neg_()
        photos = samples(4, classes=2)
        rows = measure(loaded(model), photos, find_protocol("skipplus-faithfulness"), ["gae"])
        images = loaded(model).preprocessing([photo.image for photo in photos]).double()
        for row, photo, image in zip(rows, photos, images[:, None], strict=True):
            towards = model if photo.label == 1 else opposite
            scores = vitreous.explain(towards, image, "gae", target=0).scores["gae"]
            order = scores.argsort(descending=True, stable=True)
            runner = ModelRunner(towards, image)
            whole = runner.logits(image).sigmoid().item()
            for percent in PERCENT:
                left = runner.logits_of_kept(image, order[:, percent * order.shape[1] // 100 :]).sigmoid().item()
                # Probabilities in float64.
                assert row[f"deletion_drop_{percent}"] == pytest.approx(whole - left, abs=1e-9)

    @pytest.mark.parametrize("outputs", [1, 3])
    def test_a_value_is_neither_yes_nor_no(self, outputs):
        model = small_vit(num_classes=outputs, depth=2)
        model.config = SimpleNamespace(problem_type="regression")
        for row in measure(loaded(model), samples(2, classes=1), find_protocol("libra-mif"), ["ixg"]):
            assert "values (regression)" in row["error"]

    def test_a_value_is_explained_as_it_is_where_no_class_has_to_be_right(self):
        model = small_vit(num_classes=1, depth=2)
        model.config = SimpleNamespace(problem_type="regression")
        photos = samples(2)
        (task,) = (task for task in find_protocol("sanity").tasks if isinstance(task, Concentration))
        protocol = replace(find_protocol("sanity"), tasks=(task,))
        images = loaded(model).preprocessing([photo.image for photo in photos]).double()
        scores = vitreous.explain(model, images, "gae", target=0).scores["gae"]
        found = [row["sparseness"] for row in measure(loaded(model), photos, protocol, ["gae"])]
        # In float64.
        assert found == pytest.approx(sparseness(scores), abs=1e-12)

    def test_explaining_no_is_the_opposite_of_explaining_yes(self):
        model = small_vit(num_classes=1, depth=2)
        protocol = find_protocol("skipplus-faithfulness")
        yes, no = ([replace(photo, label=label) for photo in samples(2)] for label in (1, 0))
        for first, second in zip(
            measure(loaded(model), yes, protocol, ["ixg"]), measure(loaded(model), no, protocol, ["ixg"]), strict=True
        ):
            assert first["insertion_drop_10"] != second["insertion_drop_10"]
            assert first["deletion_hit_0"] + second["deletion_hit_0"] == 1
