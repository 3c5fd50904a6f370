"""Curves over several images, start layers and filmstrips: against what single curves and the model itself give."""

import numpy as np
import pytest
import torch

from small_models import PATCHES, random_images, small_vit
from vitreous.api.explain import explain
from vitreous.errors import InputError, TargetError
from vitreous.pictures import (
    MetricValues,
    dataset_curves,
    dataset_curves_figure,
    dots_figure,
    filmstrip,
    filmstrip_figure,
    layer_curve_figure,
    layer_curves,
    perturbation_curves,
    radar_figure,
)
from vitreous.pictures.perturbations import mean_band
from vitreous.targets import Contrast

DEPTH = 4
EXACT = 1e-10  # float64: only the order of sums differs


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=DEPTH)


@pytest.fixture(scope="module")
def images():
    return [random_images(1, seed=seed) for seed in (0, 1, 2)]


class TestDatasetCurves:
    def test_are_those_of_every_image(self, model, images):
        found = dataset_curves(model, images, ["ixg", "rollout"], steps=4)
        for place, image in enumerate(images):
            alone = perturbation_curves(model, image, explain(model, image, ["ixg", "rollout"]), steps=4)
            for together, one in zip(found, alone, strict=True):
                assert together.method == one.method
                assert np.abs(together.deletion[place] - one.deletion).max() < EXACT
                assert np.abs(together.insertion[place] - one.insertion).max() < EXACT

    def test_the_band_is_the_interval_of_the_mean(self):
        values = np.array([[1.0, 2.0, np.nan], [3.0, 2.0, 5.0], [5.0, 2.0, np.nan]])
        mean, low, high = mean_band(values)
        np.testing.assert_allclose(mean, [3.0, 2.0, 5.0])
        # The standard deviation of 1, 3, 5 is 2.
        np.testing.assert_allclose(high - mean, [1.959964 * 2 / np.sqrt(3), 0, 0], atol=1e-6)
        np.testing.assert_allclose(mean - low, high - mean)

    def test_nothing_to_measure_is_an_error(self, model):
        for make in (dataset_curves, layer_curves):
            with pytest.raises(InputError, match="no image"):
                make(model, [], ["ixg"])

    def test_are_drawn_with_bands(self, model, images, tmp_path):
        canvas = dataset_curves_figure(dataset_curves(model, images, ["ixg", "rollout"], steps=2), width="3.25in")
        bands = [len(axes.collections) for axes in canvas.figure.axes if axes.get_xlabel()]
        assert bands == [2, 2]
        assert canvas.save(tmp_path / "curves.pdf").stat().st_size > 5000


class TestLayerCurve:
    def test_is_the_area_of_every_start_layer(self, model, images):
        plus, rollout = layer_curves(model, images[:2], ["ixg.skipplus", "tokentm"], steps=4)
        assert plus.layers == rollout.layers == (0, 1, 2, 3)
        assert (plus.skipplus, rollout.skipplus) == (2, None)
        for layer in plus.layers:
            for place, image in enumerate(images[:2]):
                spellings = [f"ixg.plus:start={layer}", f"tokentm:start={layer}"]
                alone = perturbation_curves(model, image, explain(model, image, spellings), steps=4)
                for found, one in zip((plus, rollout), alone, strict=True):
                    assert abs(found.deletion[place, layer] - one.deletion_area) < EXACT
                    assert abs(found.insertion[place, layer] - one.insertion_area) < EXACT

    def test_marks_skipplus(self, model, images):
        canvas = layer_curve_figure(layer_curves(model, images[:1], ["ixg"], steps=2))
        charts = [axes for axes in canvas.figure.axes if axes.get_xlabel()]
        assert [[text.get_text().strip() for text in axes.texts] for axes in charts] == [["SkipPLUS"]] * 2


class TestFilmstrip:
    @pytest.mark.parametrize("direction", ["deletion", "insertion"])
    def test_follows_the_curve(self, model, images, direction):
        explanation = explain(model, images[0], ["ixg", "rollout"], 3)
        film = filmstrip(model, images[0], explanation, "rollout", direction=direction, steps=4)
        curve = perturbation_curves(model, images[0], explanation, steps=4)[1]
        assert np.abs(film.probabilities - getattr(curve, direction)).max() < EXACT
        order = explanation.scores_of("rollout").argsort(descending=True, stable=True)
        for step, fraction in enumerate(film.fractions):
            done = set(order[: round(fraction * PATCHES)].tolist())
            kept = set(torch.where(film.kept[step])[0].tolist())
            assert kept == (set(range(PATCHES)) - done if direction == "deletion" else done)

    def test_says_what_the_model_predicts(self, model, images):
        explanation = explain(model, images[0], "ixg")
        film = filmstrip(model, images[0], explanation, steps=2)
        assert film.predicted[0] == explanation.class_index()
        canvas = filmstrip_figure([film])
        written = " ".join(text.get_text() for text in canvas.figure.texts)
        assert "50% deleted" in written
        assert f"class {film.predicted[1]}" in written

    def test_what_cannot_be_followed_is_one_sentence(self, model, images):
        explanation = explain(model, images[0], "ixg", Contrast(1, 2))
        with pytest.raises(TargetError, match="is none"):
            filmstrip(model, images[0], explanation)
        plain = explain(model, images[0], "ixg")
        with pytest.raises(InputError, match="at least one step"):
            filmstrip(model, images[0], plain, steps=0)
        with pytest.raises(InputError, match="deletion or insertion"):
            filmstrip(model, images[0], plain, direction="both")
        with pytest.raises(InputError, match="one image, not 2"):
            filmstrip(model, torch.cat(images[:2]), plain)
        with pytest.raises(InputError, match="no filmstrip"):
            filmstrip_figure([])


METRICS = [
    MetricValues("AOPC", "higher", {"gae": (0.5, 0.4, 0.6), "ixg": (0.3, 0.2, 0.4), "random": (0.1, 0.0, 0.2)},
                 frozenset({"random"})),
    MetricValues("error", "lower", {"gae": (2.0, 1.0, 3.0), "ixg": (1.0, 0.5, 1.5), "random": (4.0, 3.0, 5.0)},
                 frozenset({"random"})),
    MetricValues("IoU (%)", "higher", {"gae": (30, 28, 31), "ixg": (20, 19, 22), "random": (25, 24, 26)},
                 frozenset({"random"})),
]  # fmt: skip


class TestMetrics:
    def test_dots_are_where_the_numbers_are(self):
        canvas = dots_figure(METRICS, width="6.9in")
        charts = [axes for axes in canvas.figure.axes if axes.lines]
        assert len(charts) == 3
        for axes, metric in zip(charts, METRICS, strict=True):
            dots = {float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"}
            assert dots == {mean for mean, _, _ in metric.values.values()}
            ends = {tuple(line.get_xdata()) for line in axes.lines if line.get_marker() != "o"}
            assert {(low, high) for _, low, high in metric.values.values()} <= ends
        written = [text.get_text() for text in canvas.figure.texts]
        assert {"AOPC ↑", "error ↓"} <= set(written)
        assert written.index("gae") < written.index("ixg") < written.index("random")

    def test_the_rim_of_a_radar_is_the_best_and_its_centre_random_or_the_worst(self):
        canvas = radar_figure(METRICS)
        (axes,) = [axes for axes in canvas.figure.axes if axes.name == "polar"]
        gae, ixg = (line.get_ydata()[:3] for line in axes.lines)
        np.testing.assert_allclose(gae, [1, (4 - 2) / 3, 1])
        np.testing.assert_allclose(ixg, [0.5, 1, 0])
        written = " ".join(text.get_text() for text in canvas.figure.texts)
        assert "4 to 1" in written  # the error: random in the centre, the lowest at the rim
        assert "20 to 30" in written  # random is better than ixg, so the centre is the worst

    def test_what_cannot_be_drawn_is_one_sentence(self):
        with pytest.raises(InputError, match="at least three metrics"):
            radar_figure(METRICS[:2])
        for make in (dots_figure, dataset_curves_figure, layer_curve_figure):
            with pytest.raises(InputError, match="there is no"):
                make([])
