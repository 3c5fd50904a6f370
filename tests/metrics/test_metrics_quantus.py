"""Metrics against quantus, where it has the same one, on the same arrays and the same random draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from vitreous.metrics import localisation as loc
from vitreous.metrics import perturbation as per
from vitreous.metrics import sanity

quantus = pytest.importorskip("quantus", reason="quantus comes with vitreous[peers]")

# Both sides work in float64; what is left is another order of summing.
ROUNDING = 1e-10
IMAGES, SIZE, CLASSES = 4, 8, 3
QUIET = {"disable_warnings": True, "display_progressbar": False}
AS_IS = {"abs": False, "normalise": False, **QUIET}


class Net(nn.Module):
    """A small model without a straight line in it, in float64 whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.from_numpy(np.random.default_rng(3).normal(size=(CLASSES, SIZE * SIZE)))
        self.weights = nn.Parameter(weights, requires_grad=False)

    def forward(self, images):
        return torch.tanh(images.double().flatten(1) @ self.weights.T / SIZE)


@pytest.fixture
def model() -> nn.Module:
    return Net().eval()


@pytest.fixture
def images() -> np.ndarray:
    # quantus hands images over as float32: quarters survive that without a change.
    return np.random.default_rng(0).integers(-8, 9, (IMAGES, 1, SIZE, SIZE)) / 4


@pytest.fixture
def labels() -> np.ndarray:
    return np.array([0, 1, 2, 0])


@pytest.fixture
def maps() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(IMAGES, 1, SIZE, SIZE))


@pytest.fixture
def masks() -> np.ndarray:
    masks = np.zeros((IMAGES, 1, SIZE, SIZE), dtype=np.int16)
    for index in range(IMAGES):
        masks[index, :, index : 2 * index + 3, 1:7] = 1
    return masks


def asked(metric, model, images, labels, maps, masks=None, **options):
    """What quantus says of maps that were made before."""
    return metric(
        model=model, x_batch=images.copy(), y_batch=labels, a_batch=maps.copy(), s_batch=masks, device="cpu", **options
    )


@pytest.mark.parametrize(
    ("name", "measure", "positive"),
    [
        ("PointingGame", loc.pointing_game, False),
        ("RelevanceMassAccuracy", loc.energy_in_mask, True),
        ("RelevanceRankAccuracy", loc.rank_accuracy, False),
    ],
)
def test_localisation(name, measure, positive, model, images, labels, maps, masks):
    # quantus divides by the sum of all relevance, which means a share only where none is negative.
    maps = np.abs(maps) if positive else maps
    expected = asked(getattr(quantus, name)(**AS_IS), model, images, labels, maps, masks.astype(bool))
    found = [measure(map_[0], mask[0]) for map_, mask in zip(maps, masks, strict=True)]
    np.testing.assert_allclose(found, np.asarray(expected, dtype=float), atol=ROUNDING)
    assert name == "PointingGame" or len(set(found)) == IMAGES


def test_pointing_at_both_a_hit_and_a_miss(model, images, labels, maps, masks):
    maps = maps.copy()
    maps[0, 0, 0, 1], maps[1, 0, 7, 7] = 99, 99
    expected = asked(quantus.PointingGame(**AS_IS), model, images, labels, maps, masks.astype(bool))
    assert [loc.pointing_game(map_[0], mask[0]) for map_, mask in zip(maps, masks, strict=True)][:2] == [1, 0]
    assert [bool(value) for value in expected][:2] == [True, False]


def test_sparseness(model, images, labels, maps):
    # quantus adds 1e-7 to every value; a million times larger maps make that disappear in the rounding.
    metric = quantus.Sparseness(abs=True, normalise=False, **QUIET)
    expected = asked(metric, model, images, labels, 1e6 * maps)
    np.testing.assert_allclose(sanity.sparseness(maps.reshape(IMAGES, -1)), expected, atol=ROUNDING)


def test_complexity(model, images, labels, maps):
    # quantus adds 1e-12 inside the logarithm.
    expected = asked(quantus.Complexity(abs=True, normalise=False, **QUIET), model, images, labels, maps)
    np.testing.assert_allclose(sanity.complexity(maps.reshape(IMAGES, -1)), expected, atol=1e-9)


def test_effective_complexity(model, images, labels, maps):
    maps = np.where(np.abs(maps) < 0.5, 1e-7 * maps, maps)[:1]
    metric = quantus.EffectiveComplexity(abs=True, normalise=True, **QUIET)
    expected = asked(metric, model, images[:1], labels[:1], maps)
    found = sanity.effective_complexity(maps.reshape(1, -1))
    np.testing.assert_array_equal(found, expected)
    assert 1 < found[0] < SIZE * SIZE


def test_faithfulness_correlation(model, images, labels, maps):
    runs, size = 12, 20
    metric = quantus.FaithfulnessCorrelation(
        nr_runs=runs, subset_size=size, perturb_baseline=0.0, return_aggregate=False, **AS_IS
    )
    np.random.seed(5)  # noqa: NPY002  # quantus draws from numpy's global generator
    expected = asked(metric, model, images, labels, maps, softmax=False)
    np.random.seed(5)  # noqa: NPY002
    flat_maps, flat_images = maps.reshape(IMAGES, -1), images.reshape(IMAGES, -1)

    def scores(values: np.ndarray) -> np.ndarray:
        return per.of_class(model(torch.from_numpy(values)).numpy(), labels)

    sums, falls = np.empty((2, IMAGES, runs))
    for run in range(runs):
        drawn = np.stack([np.random.choice(SIZE**2, size, replace=False) for _ in range(IMAGES)])  # noqa: NPY002
        erased = flat_images.copy()
        np.put_along_axis(erased, drawn, 0.0, axis=1)
        sums[:, run] = np.take_along_axis(flat_maps, drawn, axis=1).sum(axis=1)
        falls[:, run] = scores(flat_images) - scores(erased)
    # tanh of sums in float64, on both sides after images that float32 holds exactly.
    np.testing.assert_allclose(sanity.faithfulness_correlation(sums, falls), expected, atol=1e-9)


def explain(model, inputs, targets, **_):
    """A map that depends on the image in no straight line."""
    return np.sin(3 * np.asarray(inputs, dtype=np.float64)) + np.asarray(inputs, dtype=np.float64) ** 2


@pytest.mark.parametrize(
    ("name", "measure"), [("MaxSensitivity", sanity.max_sensitivity), ("AvgSensitivity", sanity.average_sensitivity)]
)
def test_sensitivity(name, measure, model, images, labels):
    samples = 6
    metric = getattr(quantus, name)(nr_samples=samples, lower_bound=0.2, **AS_IS)
    maps = explain(model, images, labels)
    np.random.seed(7)  # noqa: NPY002  # quantus draws from numpy's global generator
    expected = asked(metric, model, images, labels, maps, explain_func=explain)
    np.random.seed(7)  # noqa: NPY002
    flat = images.reshape(IMAGES, -1)
    noise = [np.random.uniform(-0.2, 0.2, flat.shape) for _ in range(samples)]  # noqa: NPY002
    # quantus gives the disturbed images to the explainer as float32.
    disturbed = np.stack([explain(model, (flat + one).astype(np.float32), labels) for one in noise])
    np.testing.assert_allclose(measure(maps.reshape(IMAGES, -1), disturbed), expected, atol=1e-6)


def test_similarity_of_maps_for_the_randomisation_check(maps):
    first, second = maps[0, 0], maps[1, 0]
    expected = quantus.similarity_func.correlation_spearman(first.ravel(), second.ravel())
    assert sanity.spearman(first, second) == pytest.approx(expected, abs=ROUNDING)
