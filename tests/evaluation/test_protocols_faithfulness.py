"""ROAD, fillings, SaCo, single deletion, completeness, classes, weights, shifts, mosaics: literal forms and peers."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitreous
from small_data import batch_of, loaded, samples
from small_models import SIZE, golden_model, random_images, small_vit
from vitreous.datasets import Mosaics, Stratified
from vitreous.datasets.folders import Labelled
from vitreous.errors import DataError
from vitreous.evaluation.protocols import find_protocol, list_protocols
from vitreous.evaluation.runner.measure import columns_of, measure
from vitreous.evaluation.tasks import faithfulness as tasks
from vitreous.evaluation.tasks.pixel_masking import blurred, linear_imputation
from vitreous.evaluation.tasks.segmentation import GridPointing
from vitreous.evaluation.tasks.task import enlarged
from vitreous.metrics.faithfulness import salience_coefficient

NEW = ("saco", "road", "fillings", "single-deletion", "completeness", "random-logit", "efficient-randomisation")
NEW = (*NEW, "shift-stability", "grid-pointing-2x2", "grid-pointing-3x3")
# The system is solved to 1e-5 of a pixel's equation; inside of holes of 32 pixels that is an error below 1e-4.
SOLVED = 1e-3


def smooth_images(count=2):
    places = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    images = torch.stack([torch.sin(3 * places[:, None] + k) * torch.cos(2 * places - k) for k in range(3 * count)])
    return images.view(count, 3, SIZE, SIZE) + 0.1 * random_images(count)


def random_maps(count=2, seed=0):
    return torch.rand(count, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestLinearImputation:
    def test_it_is_that_of_grad_cam(self):
        road = pytest.importorskip("pytorch_grad_cam.metrics.road", reason="grad-cam comes with vitreous[peers]")
        images, maps = smooth_images().float(), enlarged(random_maps(), (SIZE, SIZE), "bilinear")
        for share in (0.1, 0.5, 0.9):
            erased = maps > maps.flatten(1).quantile(1 - share, dim=1)[:, None, None]
            expected = torch.stack(
                [
                    road.NoisyLinearImputer(noise=0)(each, (~gone).float())
                    for each, gone in zip(images, erased, strict=True)
                ]
            )
            assert (linear_imputation(images, erased) - expected).abs().max() < SOLVED

    def test_a_linear_ramp_is_continued_and_the_rest_stays(self):
        ramp = torch.arange(SIZE, dtype=torch.float64).expand(1, 1, SIZE, SIZE) / SIZE
        erased = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
        erased[:, 10:20, 8:25] = True
        found = linear_imputation(ramp.clone(), erased)
        assert (found - ramp).abs().max() < SOLVED
        assert torch.equal(found[:, :, ~erased[0]], ramp[:, :, ~erased[0]])

    def test_where_nothing_is_left_all_is_the_mean(self):
        images = smooth_images(1)
        found = linear_imputation(images, torch.ones(1, SIZE, SIZE, dtype=torch.bool))
        assert torch.allclose(found, images.mean(dim=(-2, -1), keepdim=True).expand_as(images))


def test_blurring_keeps_the_mean_of_a_plain_image_and_smooths_others():
    plain = torch.full((1, 3, SIZE, SIZE), 0.7, dtype=torch.float64)
    assert torch.allclose(blurred(plain), plain, rtol=0, atol=1e-12)
    assert blurred(random_images(1)).std() < 0.5 * random_images(1).std()


class TestRoad:
    def test_the_curve_is_that_of_grad_cams_imputer(self):
        road = pytest.importorskip("pytorch_grad_cam.metrics.road", reason="grad-cam comes with vitreous[peers]")
        model, images = golden_model()
        images, map_ = images[:1], random_maps(1)
        batch = batch_of(model, images, {"x": map_})
        target = int(model(images).argmax())
        task = tasks.Road(percent=(30, 70))
        found = TestRoad.without_noise(task, batch)
        whole = enlarged(map_, (SIZE, SIZE), "bilinear")[0]
        order = whole.flatten().argsort(descending=True, stable=True)
        for percent in (30, 70):
            count = percent * SIZE * SIZE // 100
            for way, gone in (("morf", order[:count]), ("lerf", order[len(order) - count :])):
                kept = torch.ones(SIZE * SIZE, dtype=torch.float64)
                kept[gone] = 0
                filled = road.NoisyLinearImputer(noise=0)(images[0].float(), kept.view(SIZE, SIZE))
                with torch.no_grad():
                    expected = float(model(filled[None].double()).softmax(dim=1)[0, target])
                # The difference of the two imputations, seen through the model.
                assert found[f"road_{way}_probability_{percent}"] == pytest.approx(expected, abs=5e-3)

    @staticmethod
    def without_noise(task, batch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tasks, "_noise", lambda _, like: torch.zeros_like(like))
            (row,) = task.measure(batch, list(batch.maps))
        return row

    def test_noise_is_that_of_the_image(self):
        like = torch.zeros(3, 8, 8, dtype=torch.float64)
        assert torch.equal(tasks._noise("a", like), tasks._noise("a", like))
        assert not torch.equal(tasks._noise("a", like), tasks._noise("b", like))
        assert float(tasks._noise("a", like).std()) == pytest.approx(0.01, rel=0.2)

    def test_its_number_is_half_of_the_difference(self):
        gap, morf, lerf = tasks.Road().metrics
        means = np.concatenate([np.full(9, 0.2), np.full(9, 0.8)])
        assert gap.combine(means) == pytest.approx(30)
        assert (morf.combine(means[:9]), lerf.combine(means[9:])) == (pytest.approx(20), pytest.approx(80))


class TestSaCo:
    def test_it_is_the_pairs_of_the_outputs(self):
        model, images = golden_model()
        images, map_ = images[:1], random_maps(1)
        batch = batch_of(model, images, {"x": map_})
        (row,) = tasks.GroupFaithfulness(groups=4).measure(batch, list(batch.maps))
        whole = enlarged(map_, (SIZE, SIZE), "bilinear")[0].flatten()
        target = int(model(images).argmax())
        saliences, falls = [], []
        with torch.no_grad():
            before = model(images).softmax(dim=1)[0, target]
            for group in whole.argsort(descending=True, stable=True).chunk(4):
                painted = images.flatten(2).clone()
                painted[:, :, group] = images.mean(dim=(-2, -1))[:, :, None]
                falls.append(float(before - model(painted.view_as(images)).softmax(dim=1)[0, target]))
                saliences.append(float(whole[group].sum()))  # groups of equal size
        # Float64 throughout; the coefficient jumps only where two effects are equal, which they are not here.
        assert row["saco"] == pytest.approx(float(salience_coefficient(saliences, falls)), abs=1e-9)

    def test_a_constant_map_has_none(self):
        batch = batch_of(small_vit(), random_images(1), {"x": torch.ones(1, 4, 4, dtype=torch.float64)})
        (row,) = tasks.GroupFaithfulness().measure(batch, list(batch.maps))
        assert row["saco"] == 0.0


class TestFillings:
    def test_every_filling_has_its_columns_and_dropping_is_that_of_patches(self):
        model, images = golden_model()
        batch = batch_of(model, images[:1], {"x": random_maps(1)})
        (row,) = tasks.FillingCurves().measure(batch, list(batch.maps))
        assert np.isfinite(list(row.values())).all()
        order = random_maps(1).flatten().argsort(descending=True)
        target = int(model(images[:1]).argmax())
        kept = batch.runner.logits_of_kept(images[:1], order[None, 8:])
        assert row["dropped_morf_probability_50"] == pytest.approx(float(kept.softmax(dim=1)[0, target]), abs=1e-9)

    def test_fillings_differ(self):
        batch = batch_of(small_vit(), smooth_images(1), {"x": random_maps(1)})
        (row,) = tasks.FillingCurves().measure(batch, list(batch.maps))
        assert len({row[f"{filling}_morf_probability_50"] for filling in tasks.FILLINGS}) == len(tasks.FILLINGS)


class Linear(nn.Module):
    """A ViT whose logits are sums over pixels besides: what a cell does is what it weighs."""

    def __init__(self, weights):
        super().__init__()
        self.vit, self.weights = small_vit(depth=1), weights

    def forward(self, images):
        return 1e-9 * self.vit(images) + torch.stack([(images * self.weights).sum(dim=(1, 2, 3))] * 5, dim=1)


def test_single_deletion_of_a_linear_model_is_the_rank_of_what_cells_weigh():
    images = random_images(1)
    weights = torch.randn(3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    effect = ((images[0] - images[0].mean(dim=(1, 2), keepdim=True)) * weights).sum(dim=0)
    cells = effect.unfold(0, 8, 8).unfold(1, 8, 8).sum(dim=(2, 3))  # the patches are the cells
    batch = batch_of(Linear(weights), images, {"true": cells[None], "false": -cells[None]})
    rows = tasks.SingleDeletion().measure(batch, list(batch.maps))
    assert [row["single_deletion"] for row in rows] == [pytest.approx(1), pytest.approx(-1)]


def test_completeness_of_maps_that_add_up_and_of_others():
    model, images = golden_model()
    logit = float(model(images[:1]).detach().max())
    even = torch.full((1, 4, 4), logit / 16, dtype=torch.float64)
    batch = batch_of(model, images[:1], {"complete": even, "double": 2 * even})
    complete, double = tasks.Completeness().measure(batch, list(batch.maps))
    assert complete["completeness_error"] == pytest.approx(0, abs=1e-9)
    assert double["completeness_error"] == pytest.approx(1 / 3, abs=1e-9)


def test_random_logit_tells_methods_of_the_class_from_others():
    protocol = find_protocol("random-logit")
    rows = measure(loaded(), samples(3), protocol, ["rollout", "gae", "ixg"])
    by_method = {(row["image"], row["method"]): row["random_logit"] for row in rows}
    for number in range(3):
        assert by_method[f"photo-{number}", "rollout"] == 1.0
        assert by_method[f"photo-{number}", "ixg"] < 0.99


def test_the_other_class_is_never_the_explained_one():
    task = tasks.RandomLogit()
    pictures = [tasks.Picture(f"photo {number}", number % 5, 5) for number in range(50)]
    others = [task.other_class(picture) for picture in pictures]
    assert all(other != picture.predicted and 0 <= other < 5 for other, picture in zip(others, pictures, strict=True))
    assert len(set(others)) == 5


def test_shifts_move_the_image_and_repeat_its_edge():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(tasks.shifted(image, 1, 0)[0, 0, 1:], image[0, 0, :-1])
    assert torch.equal(tasks.shifted(image, 1, 0)[0, 0, 0], image[0, 0, 0])
    assert torch.equal(tasks.shifted(image, 0, -2)[0, 0, :, :2], image[0, 0, :, 2:])
    assert torch.equal(tasks.shifted(image, 0, 0), image)


def test_the_controls_say_what_stability_is_worth():
    """The centre never moves, and random numbers have nothing to do with those of a shifted image."""
    rows = measure(loaded(), samples(4), find_protocol("shift-stability"), ["centre", "random", "gae"])
    means = {name: np.mean([row["shift_1"] for row in rows if row["method"] == name]) for name in ("centre", "random")}
    assert means["centre"] == pytest.approx(1, abs=1e-12)
    assert abs(means["random"]) < 0.4


@pytest.mark.parametrize("name", [name for name in NEW if not name.startswith("grid")])
def test_every_new_protocol_gives_finite_rows(name):
    protocol = find_protocol(name)
    columns = columns_of(protocol)
    for row in measure(loaded(), samples(2), protocol, ["gae", "random"]):
        assert row["error"] is None
        assert all(np.isfinite(row[column]) for column in columns)


def test_new_protocols_are_listed():
    assert set(NEW) <= {protocol.name for protocol in list_protocols()}


# Mosaics --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """Photos of one colour each, three of each of ten classes, one class after the other."""
    lines = ["file,class_index"]
    for number in range(30):
        Image.new("RGB", (20, 30), (number, 0, 255 - number)).save(tmp_path / f"{number:02d}.png")
        lines.append(f"{number:02d}.png,{number // 3}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    return Labelled(tmp_path)


class TestMosaics:
    @pytest.mark.parametrize("cells", [2, 3])
    def test_a_photo_is_in_the_cell_of_its_mask_and_other_classes_in_all_others(self, photos, cells):
        mosaics = Mosaics(photos, cells)
        for index in (0, 13, 29):
            sample = mosaics.load(index)
            pixels = np.asarray(sample.image)
            side = pixels.shape[0] // cells
            numbers = pixels[side // 2 :: side, side // 2 :: side, 0].ravel()
            inside = sample.mask[side // 2 :: side, side // 2 :: side].ravel()
            assert inside.sum() == 1
            assert numbers[inside.argmax()] == index
            assert sample.mask.mean() == pytest.approx(1 / cells**2)
            assert sample.label == index // 3
            assert len({number // 3 for number in numbers}) == cells**2

    def test_two_classes_have_two_cells_each(self, photos):
        mosaics = Mosaics(photos, 2, 2)
        for index in (0, 13, 29):
            sample = mosaics.load(index)
            numbers = np.asarray(sample.image)[112::224, 112::224, 0].ravel()
            own = numbers // 3 == index // 3
            assert index in numbers[own]
            assert len(set(numbers)) == 4  # there are three photos of every class, so none stands there twice
            assert len({number // 3 for number in numbers}) == 2
            assert np.array_equal(sample.mask[112::224, 112::224].ravel() > 0, own)
            assert own.sum() == 2

    def test_settings_of_mosaics_are_part_of_their_fingerprint(self, photos):
        prints = {Mosaics(photos, *setting).fingerprint for setting in ((2,), (2, 4), (2, 2), (3,))}
        assert len(prints) == 3  # four classes are what four cells show anyway
        copied = pickle.loads(pickle.dumps(Mosaics(photos, 2, 2)))
        assert copied.fingerprint == Mosaics(photos, 2, 2).fingerprint
        with pytest.raises(DataError, match="4 cells cannot show 3 classes in equally many cells each"):
            Mosaics(photos, 2, 3)

    def test_it_is_the_same_every_time_and_depends_on_the_name_alone(self, photos):
        one, other = (np.asarray(Mosaics(photos, 2).load(7).image) for _ in range(2))
        assert np.array_equal(one, other)
        stratified = Stratified(photos, 0)
        place = [stratified.name(index) for index in range(30)].index(photos.name(7))
        assert Mosaics(stratified, 2).load(place).name == photos.name(7)

    def test_too_few_classes_are_refused(self, photos):
        with pytest.raises(DataError, match="needs photos of 16 classes, and those of labelled have labels of 10"):
            Mosaics(photos, 4)

    def test_a_worker_gets_the_same_set(self, photos):
        copied = pickle.loads(pickle.dumps(Mosaics(photos, 2)))
        assert copied.fingerprint == Mosaics(photos, 2).fingerprint != photos.fingerprint
        assert np.array_equal(np.asarray(copied.load(3).image), np.asarray(Mosaics(photos, 2).load(3).image))


def test_stratified_samples_have_all_classes_equally_often(photos):
    stratified = Stratified(photos, 0)
    labels = stratified.labels()
    assert sorted(labels) == sorted(photos.labels())
    for limit in (10, 20):
        assert all(labels[:limit].count(label) == limit // 10 for label in range(10))
    assert [stratified.name(index) for index in range(30)] != [photos.name(index) for index in range(30)]


class TestGridPointing:
    def test_a_map_in_the_cell_gets_all_and_controls_a_quarter(self, photos, tmp_path):
        model = replace(loaded(small_vit(num_classes=10)), name="small")
        results = vitreous.evaluate(
            model, photos, "grid-pointing-2x2", ["ixg"], out=tmp_path / "runs", threads=1, controls=True
        )
        means = {(row["method"], row["metric"]): row["mean"] for row in results.rows()}
        # 4 x 4 patches, a quarter of which are in each cell; the mean of 30 shares of 16 uniform numbers.
        assert means["centre", "GridPG"] == pytest.approx(0.25, abs=1e-9)
        assert means["random", "GridPG"] == pytest.approx(0.25, abs=0.05)
        assert 0 <= means["ixg", "GridPG"] <= 1

    def test_the_share_is_that_of_the_positive_scores(self):
        map_ = torch.zeros(1, 4, 4, dtype=torch.float64)
        map_[0, :2, :2] = 1.0
        map_[0, 2:, 2:] = 0.5
        map_[0, 2:, :2] = -3.0
        batch = batch_of(small_vit(), random_images(1), {"x": map_}, labels=[0])
        cell = np.zeros((SIZE, SIZE), dtype=np.int16)
        cell[: SIZE // 2, : SIZE // 2] = 1
        batch = replace(batch, pictures=(replace(batch.pictures[0], mask=cell, objects=(0,)),))
        (row,) = GridPointing().measure(batch, list(batch.maps))
        assert row == {"grid_share": pytest.approx(2 / 3), "grid_hit": 1.0}

    def test_the_share_is_the_focus_of_quantus(self):
        quantus = pytest.importorskip("quantus", reason="quantus comes with vitreous[peers]")
        map_ = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 4, 4)))
        batch = batch_of(small_vit(), random_images(1), {"x": map_}, labels=[0])
        cell = np.zeros((SIZE, SIZE), dtype=np.int16)
        cell[SIZE // 2 :, : SIZE // 2] = 1
        batch = replace(batch, pictures=(replace(batch.pictures[0], mask=cell, objects=(0,)),))
        (row,) = GridPointing().measure(batch, list(batch.maps))
        focus = quantus.Focus(disable_warnings=True, normalise=False, abs=False)
        (expected,) = focus.evaluate_batch(a_batch=map_[:, None].numpy(), c_batch=[(0, 0, 1, 0)])
        # quantus adds 1e-9 to the sum of all positive scores, which is about 6 here.
        assert row["grid_share"] == pytest.approx(expected, abs=1e-9)
