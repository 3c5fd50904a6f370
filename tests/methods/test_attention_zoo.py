"""AGCAM, LeGrad, Grad-ECLIP, IIA, DIX, Transition Attention Maps and Beyond Intuition: authors' numbers, a peer, and equations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitreous
from literal import attention_gradient as literal
from literal import forward
from small_dual_encoders import open_clip_model, tokenize
from small_models import (
    CLASSES,
    GOLDEN,
    golden_model,
    largest_difference,
    random_images,
    randomise,
    small_case,
    small_vit,
)
from vitreous.methods.spelling import cost_of
from vitreous.speed.timing import one_thread
from vitreous.targets import Prompt

# As in test_literal: the same arithmetic in another order, 1e-15 per step; a wrong term shows far above 1e-10.
EXACT = 1e-10
METHODS = ["agcam", "legrad", "grad_eclip", "iia:points=3", "dix", "tam:steps=4", "bi_token:steps=4", "bi_head:steps=4"]
MODELS = {
    "LayerScale": {"depth": 3, "seed": 1},
    "registers, no LayerScale": {"depth": 3, "seed": 2, "reg_tokens": 2, "init_values": None},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def case(request):
    return small_case(**MODELS[request.param])


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        ("agcam", 1e-12),
        # The authors' scales 0, 0.2, ... are float32; with those, the difference is 1e-16.
        ("iia", 1e-8),
    ],
)
def test_numbers_of_the_authors(method, tolerance):
    model, images = golden_model()
    with np.load(GOLDEN) as stored:
        targets = np.stack([stored["pred"], stored["cls2"]], axis=1)
    expected = np.load(GOLDEN.parent / f"{method}.npz")[method]
    found = vitreous.explain(model, images, method, torch.tensor(targets)).scores[method].transpose(0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def check(case, spelling, transcription):
    model, images = case
    targets = (0, 3)
    found = vitreous.explain(model, images, spelling, target=[targets] * len(images)).scores[spelling]
    expected = [torch.stack([transcription(model, image, target) for target in targets]) for image in images]
    assert largest_difference(found, torch.stack(expected)) < EXACT


def test_agcam_is_its_definition(case):
    check(case, "agcam", literal.agcam)


def test_legrad_is_its_definition(case):
    check(case, "legrad", lambda model, image, target: literal.legrad(model, forward.run(model, image), target))


def test_legrads_own_feature_is_its_definition(case):
    check(
        case,
        "legrad:feature=mean",
        lambda model, image, target: literal.legrad_of_means(model, forward.run(model, image), target),
    )


def test_grad_eclip_is_its_definition(case):
    check(case, "grad_eclip", lambda *given: literal.grad_eclip(*given, [2]))
    check(case, "grad_eclip.plus", lambda *given: literal.grad_eclip(*given, [0, 1, 2]))


def test_iia_and_dix_are_their_definitions(case):
    scales = [step / 5 for step in range(6)]
    check(case, "iia", lambda *given: literal.gradient_rollout(*given, scales))
    check(case, "dix", lambda *given: literal.gradient_rollout(*given, [1.0]))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(
    ("name", "transcription"),
    [
        ("tam", literal.transition_attention_maps),
        ("bi_token", literal.beyond_intuition_token),
        ("bi_head", literal.beyond_intuition_head),
    ],
)
def test_chains_weighed_by_integrated_gradients_are_their_definitions(case, name, transcription, start):
    check(case, f"{name}:start={start},steps=5", lambda *given: transcription(*given, start, 5))


def written_out(model: VisionTransformer) -> VisionTransformer:
    """The same model with its attention as q kᵀ, softmax, A v instead of one fused call."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def test_attention_that_a_model_writes_out_itself_gives_the_same(case):
    """For AGCAM the scores themselves count, which A alone does not tell."""
    model, images = case
    fused = vitreous.explain(model, images, METHODS).scores
    eager = vitreous.explain(written_out(model), images, METHODS).scores
    for method in METHODS:
        assert largest_difference(eager[method], fused[method]) < EXACT, method


def test_scores_far_above_what_a_softmax_can_tell_apart():
    """A rounds to 0 where a score is far below the largest of its row, but its sigmoid may still be 1."""
    model = small_vit(depth=2, dtype=torch.float32).requires_grad_(requires_grad=False)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(12)
    images = random_images(1, dtype=torch.float32)
    fused = vitreous.explain(model, images, "agcam").scores["agcam"]
    eager = vitreous.explain(written_out(model), images, "agcam").scores["agcam"]
    # float32, and scores of order 100 in it: 1e-5 of the largest.
    assert largest_difference(eager, fused) < 1e-4
    with torch.no_grad():
        attention = model.blocks[0].attn
        tokens = model.blocks[0].norm1(model._pos_embed(model.patch_embed(images)))
        query, key, _ = attention.qkv(tokens).reshape(1, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * attention.scale
    assert bool(((torch.softmax(scores, -1) == 0) & (scores > 10)).any()), "the case does not occur"


class MeanOfAllTokens(nn.Module):
    """Similarity of text features with a CLIP tower's feature as LeGrad's package forms it, class token included."""

    def __init__(self, visual: nn.Module, texts: torch.Tensor) -> None:
        super().__init__()
        self.visual, self.texts = visual, nn.Parameter(texts)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.visual.transformer(self.visual._embeds(images))
        feature = self.visual.ln_post(tokens.mean(dim=1)) @ self.visual.proj
        return nn.functional.normalize(feature, dim=-1) @ self.texts.T


def test_legrad_of_prompts_agrees_with_its_package(capsys):
    """As the package is used: a CLIP model as it is, with the embeddings of prompts.

    From block 0 on: with open_clip 3 it hands tokens-first streams to the blocks that it leaves as they are, which take
    them for images-first, so that from a later block on it explains another model.
    """
    peer = pytest.importorskip("legrad", reason="legrad_torch is not installed")
    model, images = open_clip_model(), random_images(1)
    prompts = ["a photo of a cat", "the dog", "tabby cats"]
    method, target = "legrad:feature=mean", [[Prompt(text) for text in prompts]]
    found = vitreous.explain((model, tokenize), images, method, target=target).scores[method]
    texts = nn.functional.normalize(model.encode_text(tokenize(prompts)), dim=-1).detach()
    expected = peer.LeWrapper(model, layer_index=0).compute_legrad(text_embedding=texts, image=images)
    large = nn.functional.interpolate(found.view(1, len(prompts), 4, 4), scale_factor=8, mode="bilinear")
    assert largest_difference(peer.min_max(large), expected) < EXACT


def test_legrad_agrees_with_its_package(capsys):
    peer = pytest.importorskip("legrad", reason="legrad_torch is not installed")
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "patch_size": 8, "width": 24, "layers": 3, "head_width": 8, "mlp_ratio": 2.0}
    text = {"context_length": 4, "vocab_size": 10, "width": 8, "heads": 2, "layers": 1}
    clip = randomise(open_clip.model.CLIP(embed_dim=6, vision_cfg=vision, text_cfg=text)).double().eval()
    texts = nn.functional.normalize(random_images(1, seed=5).flatten()[:30].view(CLASSES, 6), dim=-1)
    images = random_images(1)
    ours = MeanOfAllTokens(copy.deepcopy(clip.visual), texts)
    expected = peer.LeWrapper(clip, layer_index=0).compute_legrad(text_embedding=texts, image=images)
    found = vitreous.explain(ours, images, "legrad", target=[list(range(CLASSES))]).scores["legrad"]
    large = nn.functional.interpolate(found.view(1, CLASSES, 4, 4), scale_factor=8, mode="bilinear")
    assert largest_difference(peer.min_max(large), expected) < EXACT


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}, {"global_pool": "map"}], ids=str)
def test_a_batch_gives_what_single_images_give(options):
    model, images = small_vit(depth=3, **options), random_images(3)
    together = vitreous.explain(model, images, METHODS).scores
    for number, image in enumerate(images):
        alone = vitreous.explain(model, image[None], METHODS).scores
        for method in METHODS:
            assert torch.isfinite(alone[method]).all()
            assert largest_difference(together[method][number], alone[method][0]) < EXACT, method


def test_maps_differ_between_classes_and_images(case):
    model, images = case
    scores = vitreous.explain(model, images, METHODS, target=[[0, 3], [0, 3]]).scores
    for method, maps in scores.items():
        assert largest_difference(maps[:, 0], maps[:, 1]) > 0.01, method
        assert largest_difference(maps[0], maps[1]) > 0.01, method


def test_the_model_is_as_it_was(case):
    model, images = case
    model.train()
    before = copy.deepcopy(model.state_dict())
    vitreous.explain(model, images, METHODS)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    model.eval()


def test_the_head_sees_every_block_in_one_further_run(monkeypatch):
    """LeGrad's cost: one forward pass of the batch, one of a single image."""
    model, images = small_vit(depth=3), random_images(3)
    vitreous.explain(model, images, "rollout")  # the first call checks the grid of patches
    runs = []
    embed = model.patch_embed.forward
    monkeypatch.setattr(model.patch_embed, "forward", lambda pixels: runs.append(len(pixels)) or embed(pixels))
    vitreous.explain(model, images, "legrad")
    assert runs == [3, 1]


class CountsPictures(nn.Module):
    """Lays the patches out as a picture again behind the blocks, as timm's DeepSeek and Qwen3 classifiers do."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.vit.forward_features(images)
        return self.vit.head(features.reshape(len(images), 4, 4, -1).mean(dim=(1, 2)))


@pytest.mark.parametrize("method", [*METHODS, "vit_recipro_cam"])
def test_a_head_that_counts_its_pictures_gets_as_many_as_it_reads_streams(method):
    model, images = small_case(seed=1, depth=3, class_token=False, global_pool="avg", fc_norm=False)
    expected = vitreous.explain(model, images, method).scores[method]
    found = vitreous.explain(CountsPictures(model), images, method).scores[method]
    assert largest_difference(found, expected) < EXACT


def test_methods_that_end_with_the_same_integral_find_it_once_for_each_target(monkeypatch):
    model, images, targets = small_vit(depth=3), random_images(2), torch.tensor([[0, 1], [2, 3]])
    spellings = ["tam:steps=4", "bi_token:steps=4", "bi_head:steps=4", "tam:steps=3"]
    alone = {spelling: vitreous.explain(model, images, spelling, targets).scores[spelling] for spelling in spellings}
    runs = []
    embed = model.patch_embed.forward
    monkeypatch.setattr(model.patch_embed, "forward", lambda pixels: runs.append(len(pixels)) or embed(pixels))
    together = vitreous.explain(model, images, spellings, targets).scores
    recorded, of_targets = 2, 2 * 2
    assert sum(runs) == recorded + of_targets * (4 + 3)
    for spelling in spellings:
        assert torch.equal(together[spelling], alone[spelling])


def test_too_few_points_are_refused():
    for spelling in ("iia:points=1", "dix:points=0", "tam:steps=1", "bi_head:steps=1"):
        with pytest.raises(vitreous.errors.MethodError, match="too few"):
            vitreous.explain(small_vit(depth=2), random_images(1), spelling)


def test_the_cost_of_legrad_says_that_the_head_is_asked_again():
    cost = cost_of("legrad")
    assert cost.label == "forward + backward + head again"
    assert not cost.one_run
    assert [name for name in ("agcam", "gae", "decompx", "rise", "tam") if cost_of(name).one_run] == [
        *("agcam", "gae", "decompx"),
    ]
