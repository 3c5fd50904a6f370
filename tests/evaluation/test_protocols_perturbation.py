"""Curves over erased pixels: the golden numbers of Chefer's program, known models, and nothing asked twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from small_data import arrays_in, as_tensor, batch_of, finite, loaded, samples
from small_models import CLASSES, golden_model, random_images, small_vit
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.evaluation.tasks.pixel_masking import (
    AreaBetweenCurves,
    ErasingAccuracy,
    ErasingProbability,
    erased_logits,
    find_orders,
    ranks,
)
from vitreous.evaluation.tasks.task import Case

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics_chefer_perturbation.npz"


class Scaled(nn.Module):
    """The model of the golden file: it sees twice the normalised picture."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(2 * images)


class TestGolden:
    """48 pictures of 32 x 32 pixels with maps of pixels, erased at 10% to 90%."""

    @pytest.fixture
    def golden(self):
        return arrays_in(GOLDEN)

    @pytest.fixture
    def batch(self, golden):
        model, _ = golden_model()
        model.load_state_dict({name[3:]: as_tensor(golden[name]) for name in golden if name.startswith("sd/")})
        images = (as_tensor(golden["data"]) - 0.5) / 0.5
        return batch_of(Scaled(model).eval(), images, {"given": as_tensor(golden["vis"][:, 0])}, golden["target"])

    @pytest.mark.parametrize(("direction", "name"), [(0, "pos"), (1, "neg")])
    def test_probabilities_and_logits_at_every_step(self, golden, batch, direction, name):
        cases = list(batch.maps)
        curves = list(replace(ErasingAccuracy(), explained=("predicted",)).curves(batch, cases))
        erased = torch.tensor(
            np.stack([curve.erased[0, direction] for curve in curves], axis=1)
        )  # (step, photo, class)
        whole = torch.tensor(np.stack([curve.whole for curve in curves]))
        # The program compares the highest probability and the highest logit, of whichever class.
        probability = erased.softmax(-1).amax(-1) - whole.softmax(-1).amax(-1)
        logit = erased.amax(-1) - whole.amax(-1)
        # Numbers of order 1 in float64.
        np.testing.assert_allclose(probability, golden[f"{name}_perturbations_prob_diff"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(logit, golden[f"{name}_perturbations_logit_diff"], rtol=0, atol=1e-9)

    @pytest.mark.parametrize(("direction", "name"), [("positive", "pos"), ("negative", "neg")])
    def test_hits_at_every_step(self, golden, batch, direction, name):
        rows = ErasingAccuracy().measure(batch, list(batch.maps))
        for step in range(9):
            found = [row[f"predicted_{direction}_hit_{10 * step + 10}"] for row in rows]
            assert found == golden[f"{name}_perturbations_hits"][step].tolist()
        assert [row[f"label_{direction}_hit_0"] for row in rows] == golden[f"{name}_model_hits"].tolist()


def test_ranks_put_the_highest_first_and_break_ties_from_the_upper_left():
    map_ = torch.tensor([[0.0, 2.0], [2.0, 3.0]])
    assert ranks(map_).tolist() == [[3, 1], [2, 0]]


def by_hand(model, image, map_, count, black, *, highest):
    """One photo with the ``count`` highest or lowest pixels erased."""
    chosen = map_.flatten().topk(count, largest=highest).indices
    erased = image.clone().flatten(1)
    erased[:, chosen] = black[:, None]
    with torch.no_grad():
        return model(erased.view(1, *image.shape))[0]


def test_every_picture_is_erased_as_by_hand():
    model, images = small_vit(), random_images(3)
    maps = torch.rand(3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    black = torch.tensor([-1.0, -2.0, 0.5], dtype=torch.float64)
    batch = batch_of(model, images, {"given": maps}, black=black)
    orders = find_orders(batch, [(case, 0) for case in batch.maps]).different
    counts = [0, 100, 900, 1024]
    found = erased_logits(batch, orders, counts, ("positive", "negative"), filling="black before normalisation")
    for number in range(3):
        for direction, highest in enumerate((True, False)):
            for step, count in enumerate(counts):
                expected = by_hand(model, images[number], maps[number], count, black, highest=highest)
                # Float64; only the number of pictures that run together differs.
                torch.testing.assert_close(found[number, direction, step], expected, rtol=1e-12, atol=1e-12)


def test_maps_of_patches_are_enlarged_bilinearly():
    model, images = small_vit(), random_images(1)
    small = torch.rand(1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    large = nn.functional.interpolate(small[None], scale_factor=8, mode="bilinear")[0]
    batch = batch_of(model, images, {"small": small, "large": large})
    first, second = ErasingProbability().measure(batch, list(batch.maps))
    assert first == pytest.approx(second, rel=1e-12)  # the same pictures, at other places of a batch


class TestNothingTwice:
    def evaluations(self, maps, tasks):
        batch = batch_of(small_vit(), random_images(2), maps)
        before = batch.runner.evaluations
        for task in tasks:
            task.measure(batch, list(batch.maps))
        return batch.runner.evaluations - before

    def random_maps(self, seed):
        return torch.rand(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def test_both_directions_take_eighteen_evaluations_of_every_photo(self):
        assert self.evaluations({"one": self.random_maps(0)}, [ErasingAccuracy()]) == 2 * 18

    def test_equal_maps_of_two_methods_are_one(self):
        maps = {"one": self.random_maps(0), "same": self.random_maps(0), "other": self.random_maps(1)}
        assert self.evaluations(maps, [ErasingAccuracy()]) == 2 * 2 * 18

    def test_tasks_of_one_protocol_share_what_was_asked(self):
        assert self.evaluations({"one": self.random_maps(0)}, [ErasingAccuracy(), ErasingProbability()]) == 2 * 18

    def test_a_picture_without_pixels_is_asked_about_once(self):
        assert self.evaluations({"one": self.random_maps(0)}, [AreaBetweenCurves()]) == 2 * 18 + 1

    def test_a_photo_whose_prediction_is_right_has_one_map(self, monkeypatch):
        """Of photos that the model gets right one class is explained, of others two."""
        import vitreous.evaluation.runner.adapters as adapters

        asked = []
        original = adapters.explain_again

        def counting(*arguments, target, **options):
            asked.append(tuple(target.shape))
            return original(*arguments, target=target, **options)

        monkeypatch.setattr(adapters, "explain_again", counting)
        model = loaded()
        photos = samples(4)
        right = measure(model, photos, find_protocol("tokentm-probability"), ["gae"])
        assert all(row["error"] is None for row in right)
        asked.clear()
        with torch.no_grad():
            squashed = replace(model.preprocessing, resize="squash", resize_size=None)
            predicted = model.model(squashed([photo.image for photo in photos]).double()).argmax(dim=1).tolist()
        photos = [replace(photo, label=label) for photo, label in zip(photos, predicted, strict=True)]
        photos[1] = replace(photos[1], label=(predicted[1] + 1) % CLASSES)
        rows = measure(model, photos, find_protocol("chefer-2021-perturbation"), ["gae", "raw_attention"])
        assert sorted(asked) == [(1, 2), (3, 1)]
        for row in rows:
            if row["image"] != "photo-1" or row["method"] == "raw_attention":  # the same map for every class
                for direction in ("positive", "negative"):
                    curves = [
                        [row[f"{explained}_{direction}_hit_{percent}"] for percent in range(0, 100, 10)]
                        for explained in ("predicted", "label")
                    ]
                    assert curves[0] == curves[1]


class Bright(nn.Module):
    """A transformer in name: class 1 says how bright the pictures' left half is, class 0 is always 0."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit(depth=1)

    def forward(self, images):
        left = images[..., : images.shape[-1] // 2].mean(dim=(1, 2, 3))
        return torch.stack([0 * left, left + 1], dim=1) + 0 * self.vit(images)[:, :2]


def test_the_right_map_lets_the_probability_fall_first_and_stay_longest():
    images = random_images(2).abs()
    truth = torch.zeros(2, 32, 32, dtype=torch.float64)
    truth[..., :16] = images[..., :16].sum(dim=1) + 3  # what erasing a pixel takes from class 1
    batch = batch_of(Bright(), images, {"true": truth, "opposite": -truth}, [1, 1])
    task = AreaBetweenCurves(explained=("label",))
    rows = dict(zip(batch.maps, task.measure(batch, list(batch.maps)), strict=True))
    metric = task.metrics[0]
    for number in range(2):
        right, wrong = (rows[Case(number, name)] for name in ("true", "opposite"))
        areas = [float(metric.combine(np.array([row[name] for name in metric.columns]))) for row in (right, wrong)]
        assert areas[0] > 0
        assert areas[1] == pytest.approx(-areas[0], abs=1e-9)  # the opposite map swaps the two curves
        steps = [right[f"positive_probability_{percent}"] for percent in range(0, 101, 10)]
        assert steps == sorted(steps, reverse=True)


def test_classes_that_may_all_be_right_have_their_sigmoid_for_a_probability():
    model, images = Bright(), random_images(1)
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    batch = batch_of(model, images, {"x": torch.ones(1, 32, 32, dtype=torch.float64)}, [0])
    (row,) = AreaBetweenCurves(explained=("label",)).measure(batch, list(batch.maps))
    # In float64: class 0 has the logit 0, whatever class 1 has.
    assert list(row.values()) == pytest.approx([0.5] * 22, abs=1e-12)


class TestOneMapPerClass:
    """A white photo that is told class 1 and is class 0, with one map of each: the left half, and the right one.

    With a share f of the left half erased, which turns 1 to -3, class 1 has the logit 2 - 4f and class 0 has 0: the
    answer is right from more than half on. Steps of the map of class 1 erase 0.2, 0.4, 0.6, ... of the left half; those
    of the map of class 0 begin with it behind 50%.
    """

    @pytest.fixture
    def batch(self):
        images = torch.ones(1, 3, 32, 32, dtype=torch.float64)
        left = torch.zeros(32, 32, dtype=torch.float64)
        left[:, :16] = 1
        batch = batch_of(Bright(), images, {"x": left[None]}, [0], black=torch.full((3,), -3.0, dtype=torch.float64))
        assert batch.pictures[0].predicted == 1
        return replace(batch, maps={Case(0, "x"): {1: left, 0: 1 - left}})

    def test_accuracy_follows_the_map_of_the_explained_class(self, batch):
        (row,) = ErasingAccuracy().measure(batch, list(batch.maps))
        soon, late = [0.0] * 3 + [1.0] * 7, [0.0] * 8 + [1.0] * 2
        expected = {"predicted_positive": soon, "predicted_negative": late}
        expected |= {"label_positive": late, "label_negative": soon}
        for curve, hits in expected.items():
            assert [row[f"{curve}_hit_{percent}"] for percent in range(0, 100, 10)] == hits, curve
        metrics = {
            metric.name: float(metric.combine(np.array([row[name] for name in metric.columns])))
            for metric in ErasingAccuracy().metrics
        }
        assert metrics["AUC positive"] == pytest.approx(65)  # 0 up to 20%, 1 from 30% to 90%, and half a step
        assert metrics["AUC positive, true class"] == pytest.approx(15)
        assert metrics["AUC negative"] == pytest.approx(15)
        assert metrics["AUC negative, true class"] == pytest.approx(65)

    def test_probability_is_that_of_the_explained_class_under_its_own_map(self, batch):
        (row,) = ErasingProbability(explained=("predicted", "label")).measure(batch, list(batch.maps))
        counts = [percent * 1024 // 100 for percent in range(10, 100, 10)]

        def right(erased):
            """The probability of class 0 with so many of the left half's 512 pixels erased."""
            return 1 / (1 + np.exp(2 - 4 * np.minimum(erased, 512) / 512))

        of_left, of_right = right(np.array(counts)), right(np.maximum(np.array(counts) - 512, 0))
        assert row["predicted_positive_aopc"] == pytest.approx(np.mean(of_left - right(0)))  # 1 - p falls as p rises
        assert row["label_positive_aopc"] == pytest.approx(np.mean(right(0) - of_right))


def test_random_maps_have_no_direction():
    """Over many random maps the two curves agree: their difference is within four standard errors of zero."""
    generator = torch.Generator().manual_seed(0)
    maps = {f"{number}": torch.rand(4, 32, 32, dtype=torch.float64, generator=generator) for number in range(30)}
    batch = batch_of(small_vit(depth=2), random_images(4), maps)
    task = AreaBetweenCurves()
    metric = task.metrics[0]
    areas = [
        metric.combine(np.array([row[name] for name in metric.columns]))
        for row in task.measure(batch, list(batch.maps))
    ]
    assert abs(np.mean(areas)) < 4 * np.std(areas) / len(areas) ** 0.5


def test_the_curve_is_that_of_quantus_where_both_can_draw_it():
    """quantus erases single values, so pictures have one channel; its curve has equal steps and ends with nothing."""
    quantus = pytest.importorskip("quantus")
    model, images = small_vit(in_chans=1, dtype=torch.float32), random_images(3, dtype=torch.float32, channels=1)
    maps = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch = batch_of(model, images, {"given": maps})
    classes = [picture.predicted for picture in batch.pictures]
    flipping = quantus.PixelFlipping(features_in_step=128, perturb_baseline=0.0, normalise=False, disable_warnings=True)
    theirs = flipping(model, images.numpy(), np.array(classes), maps[:, None].numpy(), device="cpu", batch_size=3)
    orders = find_orders(batch, zip(batch.maps, classes, strict=True)).different
    counts = [128 * step for step in range(1, 9)]
    logits = erased_logits(batch, orders, counts, ("positive",), filling="zero after normalisation")[:, 0]
    ours = logits.softmax(dim=-1)[range(3), :, classes]
    assert float(ours.std(dim=1).min()) > 1e-4
    np.testing.assert_allclose(ours, np.array(theirs), rtol=0, atol=1e-5)  # probabilities in float32


@pytest.mark.parametrize("name", ["chefer-2021-perturbation", "tokentm-probability", "agcam-perturbation"])
def test_a_run_from_photos_to_rows(name):
    protocol = find_protocol(name)
    rows = measure(loaded(), samples(3), protocol, ["gae", "ixg"])
    assert len(rows) == 6
    assert all(finite(row, columns_of(protocol)) for row in rows)
