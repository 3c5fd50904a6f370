"""Code written for quantus runs with our methods."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch

with warnings.catch_warnings(action="ignore"):
    import quantus

import vitreous
from small_models import random_images, small_vit
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
