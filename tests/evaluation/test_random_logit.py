"""The random-logit column against quantus: with two classes both compare with the same one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import vitreous
from small_data import loaded, samples
from small_models import small_vit
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import measure

quantus = pytest.importorskip("quantus", reason="quantus comes with vitreous[peers]")


def test_it_is_that_of_quantus_with_rank_correlation():
    model = loaded(small_vit(depth=2, num_classes=2))
    photos = samples(3, classes=2)
    protocol = replace(find_protocol("random-logit"), resize="model")
    rows = measure(model, photos, protocol, ["ixg"])
    pixels = model.preprocessing([photo.image for photo in photos]).double()
    predicted = model.model(pixels).argmax(dim=1).numpy()

    def explain_func(model, inputs, targets, **_):
        del model, inputs
        scores = vitreous.explain(loaded_model.model, pixels, "ixg", [int(each) for each in targets]).scores["ixg"]
        return scores.view(len(pixels), 1, 4, 4).numpy()

    loaded_model = model
    metric = quantus.RandomLogit(
        num_classes=2,
        similarity_func=quantus.similarity_func.correlation_spearman,
        abs=False,
        normalise=False,
        disable_warnings=True,
        display_progressbar=False,
    )
    expected = metric(
        model=model.model,
        x_batch=np.zeros((3, 1, 4, 4)),
        y_batch=predicted,
        a_batch=explain_func(None, None, predicted),
        explain_func=explain_func,
    )
    # Both are rank correlations of 16 numbers in float64.
    assert [row["random_logit"] for row in rows] == pytest.approx(expected, abs=1e-12)
