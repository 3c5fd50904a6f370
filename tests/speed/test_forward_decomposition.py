"""The forward decomposition that serves as a baseline of speed has the numbers of the one backward pass."""

from pathlib import Path

import pytest
import torch

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.speed.timing import one_thread

# As in test_literal: rounding is five digits smaller, any missing or doubled term far larger.
EXACT = 1e-10
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def decomposition(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import forward_decomposition

    return forward_decomposition


@pytest.mark.parametrize("depth", [3, 4])
@pytest.mark.parametrize("at_once", [1 << 27, 5 * 17 * 96])  # all start tokens together; five at a time
def test_forward_decomposition_and_one_backward_pass_agree(decomposition, monkeypatch, depth, at_once):
    monkeypatch.setattr(decomposition, "NUMBERS_AT_ONCE", at_once)
    model, images = small_vit(depth=depth, seed=5, reg_tokens=2, no_embed_class=True), random_images(1, seed=5)
    with one_thread():
        ours = vitreous.explain(model, images, ["decompx", "decompx.plus", "decompx.skipplus"], 3).scores
        run = decomposition.real_run(model, images)
        for spelling, starts in {
            "decompx": [0],
            "decompx.plus": range(depth),
            "decompx.skipplus": range(2, depth),
        }.items():
            theirs = decomposition.forward_scores(run, starts, 3)
            assert largest_difference(ours[spelling][0], theirs) < EXACT


def test_the_real_run_is_the_models(decomposition):
    model, images = small_vit(seed=6), random_images(1, seed=6)
    run = decomposition.real_run(model, images)
    streams = []
    hook = model.blocks[-1].register_forward_pre_hook(lambda _, given: streams.append(given[0]))
    with torch.no_grad():
        model(images)
    hook.remove()
    assert largest_difference(run.blocks[-1].tokens, streams[0][0]) < EXACT
