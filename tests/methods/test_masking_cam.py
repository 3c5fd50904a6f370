"""Score-CAM against pytorch-grad-cam, ViT-ReciproCAM against a loop over masks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import vitreous
from small_models import PATCHES, largest_difference, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.speed.timing import one_thread

# The same arithmetic in float64 in another order: 1e-15 per step.
EXACT = 1e-10
METHODS = ["scorecam", "vit_recipro_cam", "vit_recipro_cam:neighbourhood=single,score=logit"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2, seed=6).requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def images():
    return random_images(2, seed=6)


def as_grid(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[:, 1:].reshape(len(tokens), 4, 4, -1).permute(0, 3, 1, 2)


def test_scorecam_is_pytorch_grad_cams(model, images):
    peer = pytest.importorskip("pytorch_grad_cam", reason="grad-cam is not installed")
    targets = [3, 1]
    explainer = peer.ScoreCAM(model, [model.blocks[-1].norm1], reshape_transform=as_grid)
    chosen = [peer.utils.model_targets.ClassifierOutputTarget(target) for target in targets]
    explainer(images, chosen)  # fills its activations
    activations = explainer.activations_and_grads.activations[0].numpy()
    expected = explainer.get_cam_image(images, None, chosen, activations, None)
    found = vitreous.explain(model, images, "scorecam", targets).scores["scorecam"]
    # The package keeps the scores of channels in float32, 1e-7 of scores of order 1.
    np.testing.assert_allclose(found.view(2, 4, 4), np.maximum(expected, 0), rtol=0, atol=1e-6)
    assert (expected > 0.01).any(), "nothing to compare"


def test_scorecam_is_its_definition(model, images):
    kept = {}
    handle = model.blocks[-1].norm1.register_forward_hook(lambda module, given, output: kept.update(norm=output))
    with torch.no_grad():
        model(images[:1])
        handle.remove()
        activations = as_grid(kept["norm"])[0]
        scores = []
        for channel in activations:
            large = torch.nn.UpsamplingBilinear2d((32, 32))(channel[None, None])[0, 0]
            mask = (large - large.min()) / (large.max() - large.min() + 1e-8)
            scores.append(model(images[:1] * mask)[0, 3])
        weights = torch.softmax(torch.stack(scores), dim=0)
    expected = (weights[:, None, None] * activations).sum(dim=0).clamp(min=0).flatten()
    found = vitreous.explain(model, images[:1], "scorecam", 3).scores["scorecam"][0]
    assert largest_difference(found, expected) < EXACT


def test_scorecam_asks_the_channels_that_vary_most_where_the_budget_is_small(model, images):
    asked: list[int] = []
    with model.patch_embed.register_forward_pre_hook(lambda _, given: asked.append(len(given[0]))):
        found = vitreous.explain(model, images, "scorecam:budget=5", 3).scores["scorecam:budget=5"]
    assert sum(asked) == len(images) * (1 + 5)  # the recorded run, then five channels of each
    kept = {}
    with model.blocks[-1].norm1.register_forward_hook(lambda module, given, output: kept.update(norm=output)):
        model(images)
    for image, activations in enumerate(as_grid(kept["norm"])):
        scores, channels = [], sorted(activations, key=lambda channel: -channel.var())[:5]
        for channel in channels:
            large = torch.nn.UpsamplingBilinear2d((32, 32))(channel[None, None])[0, 0]
            mask = (large - large.min()) / (large.max() - large.min() + 1e-8)
            scores.append(model(images[image : image + 1] * mask)[0, 3])
        weights = torch.softmax(torch.stack(scores), dim=0)
        expected = torch.einsum("k,krc->rc", weights, torch.stack(channels)).clamp(min=0).flatten()
        assert largest_difference(found[image], expected) < EXACT


def test_scorecam_with_a_budget_for_all_channels_is_scorecam(model, images):
    found = vitreous.explain(model, images, ["scorecam", "scorecam:budget=1000"], 3).scores
    assert torch.equal(found["scorecam"], found["scorecam:budget=1000"])


def test_scorecam_without_evaluations_is_refused(images):
    with pytest.raises(MethodError, match="at least 1"):
        vitreous.explain(torch.nn.Identity(), images, "scorecam:budget=0")


KERNEL = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16


def masks(*, gaussian: bool):
    """One per patch, (4, 4), cut off at the border."""
    for row in range(4):
        for column in range(4):
            mask = torch.zeros(6, 6, dtype=torch.float64)
            if gaussian:
                mask[row : row + 3, column : column + 3] = KERNEL
            else:
                mask[row + 1, column + 1] = 1
            yield mask[1:5, 1:5].flatten()


@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize("score", ["probability", "logit"])
def test_vit_recipro_cam_is_its_definition(model, images, gaussian, score):
    expected = []
    with torch.no_grad():
        entering = model.blocks[0](model._pos_embed(model.patch_embed(images)))
        for mask in masks(gaussian=gaussian):
            masked = torch.cat([entering[:, :1], entering[:, 1:] * mask[:, None]], dim=1)
            logits = model.head(model.norm(model.blocks[1](masked))[:, 0])
            expected.append((torch.softmax(logits, 1) if score == "probability" else logits)[:, 3])
    spelling = f"vit_recipro_cam:neighbourhood={'gaussian' if gaussian else 'single'},score={score}"
    explanation = vitreous.explain(model, images, spelling, 3)
    assert explanation.signed[spelling] == (score == "logit")
    assert largest_difference(explanation.scores[spelling], torch.stack(expected, dim=1)) < EXACT


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_a_batch_gives_what_single_images_give(options):
    model, images = small_vit(depth=2, **options), random_images(9)
    together = vitreous.explain(model, images, METHODS, 1).scores
    for number in (0, 8):
        alone = vitreous.explain(model, images[number : number + 1], METHODS, 1).scores
        for method in METHODS:
            assert together[method].shape == (9, PATCHES)
            assert largest_difference(together[method][number], alone[method][0]) < EXACT, method


def test_maps_differ_between_classes_and_the_model_is_as_it_was(model, images):
    model.train()
    before = copy.deepcopy(model.state_dict())
    scores = vitreous.explain(model, images, METHODS, [[0, 3], [0, 3]]).scores
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for method, maps in scores.items():
        assert largest_difference(maps[:, 0], maps[:, 1]) > 0.01, method
    model.eval()


def test_only_the_last_block_runs_on_the_masked_tokens(model, images, monkeypatch):
    sizes = {0: [], 1: []}
    for number, block in enumerate(model.blocks):
        forward = block.mlp.forward
        monkeypatch.setattr(
            block.mlp,
            "forward",
            lambda tokens, forward=forward, number=number: sizes[number].append(len(tokens)) or forward(tokens),
        )
    vitreous.explain(model, images, "vit_recipro_cam")
    assert sizes[0][0] == len(images)
    assert set(sizes[0][1:]) == {1}
    assert sum(sizes[1][1:]) == PATCHES * len(images)
