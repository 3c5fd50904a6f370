"""Code written for quantus runs with our methods."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch

with warnings.catch_warnings(action="ignore"):
    import quantus

import vitreous
from small_models import cheap_spelling, random_images, small_vit
from vitreous.errors import InputError
from vitreous.integrations.quantus import explain_func


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2, dtype=torch.float32)


@pytest.fixture(scope="module")
def x_batch():
    return random_images(3, dtype=torch.float32).numpy()


@pytest.fixture(scope="module")
def y_batch():
    return np.array([1, 2, 0])


def test_scores_are_those_of_explain(model, x_batch, y_batch):
    found = explain_func(model, x_batch, y_batch, method="gae")
    scores = vitreous.explain(model, torch.from_numpy(x_batch), "gae", y_batch.tolist()).scores["gae"]
    assert found.shape == (3, 1, 32, 32)
    assert np.array_equal(found[:, 0, ::8, ::8].reshape(3, 16), scores.numpy())


@pytest.mark.parametrize("method", [cheap_spelling(info) for info in vitreous.list_methods()])
def test_every_method(model, x_batch, method):
    """As quantus documents it: the metric explains perturbed images by ``explain_func``."""
    # So little noise that a map stays one that is not 0 everywhere, which quantus would refuse.
    metric = quantus.AvgSensitivity(nr_samples=1, lower_bound=1e-3, disable_warnings=True, display_progressbar=False)
    settings = {"device": "cpu", "explain_func": explain_func, "explain_func_kwargs": {"method": method}}
    # No method's map of the third image for class 4 is 0 everywhere.
    scores = metric(model=model, x_batch=x_batch[2:], y_batch=np.array([4]), a_batch=None, **settings)
    assert len(scores) == 1
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    "metric",
    [
        partial(quantus.FaithfulnessCorrelation, nr_runs=5, subset_size=64),
        partial(quantus.RegionPerturbation, patch_size=8, regions_evaluation=3),
        quantus.PointingGame,
        quantus.RelevanceRankAccuracy,
        quantus.EffectiveComplexity,
        partial(quantus.RandomLogit, num_classes=5),
    ],
    ids=lambda metric: getattr(metric, "func", metric).__name__,
)
def test_metrics_of_every_category(model, x_batch, y_batch, metric):
    masks = np.zeros((3, 1, 32, 32), dtype=bool)
    masks[:, :, 8:24, 8:24] = True
    scores = metric(disable_warnings=True, display_progressbar=False)(
        model=model,
        x_batch=x_batch,
        y_batch=y_batch,
        a_batch=explain_func(model, x_batch, y_batch, method="ixg"),
        s_batch=masks,
        device="cpu",
        explain_func=explain_func,
        explain_func_kwargs={"method": "ixg"},
    )
    assert np.isfinite(np.asarray(scores, dtype=float)).all()


def test_model_randomisation_explains_the_randomised_weights(model, x_batch, y_batch):
    """MPRT changes the weights of one model in place: a map that was kept from before would correlate by 1."""
    metric = quantus.MPRT(disable_warnings=True, display_progressbar=False)
    settings = {"device": "cpu", "explain_func": explain_func, "explain_func_kwargs": {"method": "gae"}}
    scores = metric(model=model, x_batch=x_batch, y_batch=y_batch, a_batch=None, **settings)
    assert scores["original"] == pytest.approx([1, 1, 1])
    assert all(max(found) < 0.999 for layer, found in scores.items() if layer.endswith("qkv"))
    assert sum(layer.endswith("qkv") for layer in scores) == 2


def test_a_metric_with_explain_func(model, x_batch, y_batch):
    metric = quantus.MaxSensitivity(nr_samples=2, disable_warnings=True, display_progressbar=False)
    scores = metric(
        model=model,
        x_batch=x_batch,
        y_batch=y_batch,
        a_batch=None,
        device="cpu",
        explain_func=explain_func,
        explain_func_kwargs={"method": "gae"},
    )
    assert len(scores) == 3
    assert np.isfinite(scores).all()


def test_a_metric_with_maps(model, x_batch, y_batch):
    metric = quantus.PixelFlipping(
        features_in_step=256, perturb_baseline="black", disable_warnings=True, display_progressbar=False
    )
    maps = explain_func(model, x_batch, y_batch, method="ixg", spread="share")
    scores = metric(model=model, x_batch=x_batch, y_batch=y_batch, a_batch=maps, device="cpu")
    assert np.asarray(scores).shape == (3, 12)  # 3 x 32 x 32 elements in steps of 256


def test_evaluate(model, x_batch, y_batch):
    results = quantus.evaluate(
        metrics={
            "Sparseness": quantus.Sparseness(disable_warnings=True, display_progressbar=False),
            "Robustness": quantus.LocalLipschitzEstimate(
                nr_samples=2, disable_warnings=True, display_progressbar=False
            ),
        },
        xai_methods={"gae": explain_func, "ixg.plus": explain_func},
        model=model,
        x_batch=x_batch,
        y_batch=y_batch,
        agg_func=np.mean,
        explain_func_kwargs={"spread": "value"},
        call_kwargs={"run": {"device": "cpu"}},
    )
    assert set(results) == {"gae", "ixg.plus"}
    assert all(np.isfinite(value) for found in results.values() for value in found.values())
    assert all(set(found) == {"Sparseness", "Robustness"} for found in results.values())


def test_other_forms_of_inputs(model, x_batch):
    one = explain_func(model, x_batch[0], 1, method="gae")
    assert np.array_equal(one, explain_func(model, x_batch[:1], np.array([1]), method="gae"))
    assert explain_func(model, x_batch, None, method="gae").shape == (3, 1, 32, 32)
    with pytest.raises(InputError, match="channel_first"):
        explain_func(model, x_batch, None, channel_first=False)
    assert partial(explain_func, method="gae")(model=model, inputs=x_batch, targets=[1, 1, 1]).shape == (3, 1, 32, 32)
