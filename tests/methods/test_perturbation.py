"""Perturbation methods: goldens, agreement with captum and scikit-learn, closed forms, budgets, seeds, batches."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, golden_model, largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.errors import InputError, MethodError, UnsupportedModelError
from vitreous.methods import View
from vitreous.methods.occlusion import Occlusion
from vitreous.methods.perturbation import (
    PerturbationMethod,
    balanced,
    blocks_of_patches,
    patch_of_pixel,
    seeded,
    windows,
    windows_within,
)
from vitreous.methods.random_masks import Hsic, Lime, Rise, coalitions
from vitreous.methods.spelling import parse
from vitreous.methods.vitcx import VitCx, clusters, complete_linkage, upsampler_of
from vitreous.tape import Plan, record
from vitreous.tape.runner import ModelRunner

GOLDEN = Path(__file__).parents[1] / "golden"
# Float64: the same numbers but for the order of sums.
SAME = {"rtol": 1e-10, "atol": 1e-12}
# A least-squares problem in float64 whose condition number is below 1e4.
SOLVED = {"rtol": 1e-9, "atol": 1e-11}
# captum adds up some dozens of values of order 1 in float32.
SINGLE = {"rtol": 2e-6, "atol": 5e-7}
# Small budgets keep this quick; whether a map is good is not at stake here.
SPELLINGS = (
    *("rise:budget=40", "rise:budget=40,resolution=pixel", "rise:budget=40,by=drop"),
    *("vitcx", "vitcx:resolution=pixel", "vitcx:budget=11", "atman", "atman:of=logit,similarity=2"),
    *("lime:budget=40", "lime:budget=40,by=drop", "kernel_shap:budget=40", "kernel_shap:budget=40,by=drop"),
    *("hsic:budget=40", "hsic:budget=40,by=drop", "pami", "pami:by=drop", "occlusion", "occlusion:window=2,by=drop"),
)


def ask(procedure: PerturbationMethod, model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, ModelRunner]:
    """The maps of all targets (batch, targets, ...), and the runner that was asked."""
    architecture = find_architecture(model, images)
    runner = ModelRunner(model, images, targets)
    with record(model, architecture, images, Plan(architecture.depth, procedure.needs(0, architecture.depth))) as tape:
        return procedure.maps(View(tape, {}, targets[:, 0], runner)), runner


def two_classes() -> Tensor:
    return torch.tensor([[1, 3], [4, 0]])


# Goldens --------------------------------------------------------------------------------------------------------------


def test_rise_of_its_authors():
    stored = np.load(GOLDEN / "rise.npz")
    model, images = golden_model()
    procedure = Rise(keep=float(stored["p1"]), masks=torch.tensor(stored["masks"]))
    found, runner = ask(procedure, model, images, torch.arange(10).expand(3, -1))
    # Probabilities in float64.
    np.testing.assert_allclose(found.unflatten(-1, (32, 32)), stored["sal_all_classes"], rtol=0, atol=1e-8)
    assert runner.evaluations == 3 * 60


def products_of_channels(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Scalar products between the channels of every image, (channels, channels)."""
    architecture, procedure = find_architecture(model, images), VitCx()
    with record(model, architecture, images, Plan(4, procedure.needs(0, 4))) as tape:
        view = View(tape, {}, torch.zeros(len(images)), ModelRunner(model, images))
        return [upsampler_of(view).products(channels) for channels in procedure.channels(view)]


def golden_channels() -> tuple[list[Tensor], Tensor]:
    """The channels of the golden images, and the clusters that the authors' program put them in (scikit-learn's)."""
    labels = np.load(GOLDEN / "vitcx.npz")["labels_by_scikit_learn"]
    return products_of_channels(*golden_model()), torch.tensor(labels)


def test_channels_are_joined_as_the_authors_program_joins_them():
    for products, theirs in zip(*golden_channels(), strict=True):
        ours = clusters(products, 0.1, None)
        assert len(ours.unique()) == 17
        assert torch.equal(ours[:, None] == ours, theirs[:, None] == theirs)


def test_vitcx_of_its_authors():
    stored = np.load(GOLDEN / "vitcx.npz")
    model, images = golden_model()
    (products, *_), (labels, *_) = golden_channels()
    ours = clusters(products, 0.1, None)
    # The authors' noise belongs to scikit-learn's cluster numbers, which count in another order.
    order = [int(labels[ours == number][0]) for number in range(17)]
    targets = torch.tensor(np.stack([np.load(GOLDEN / "model.npz")[name][:1] for name in ("pred", "cls2")], axis=1))
    procedure = VitCx(noises=[torch.tensor(stored["noise_randn_0"])[order]])
    found, runner = ask(procedure, model, images[:1], targets)
    for number, name in enumerate(("pred", "cls2")):
        # Values of 1e-5 to 0.05, in float64.
        np.testing.assert_allclose(found[0, number], stored[f"{name}_vitcx_pixels"][0].ravel(), rtol=0, atol=1e-10)
    assert runner.evaluations == 2 * 17


# Peers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_occlusion_agrees_with_captum(window, stride):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    spelling = f"occlusion:of=logit,window={window},stride={stride}"
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    pixels = captum.Occlusion(model).attribute(
        images, sliding_window_shapes=(3, 8 * window, 8 * window), strides=(3, 8 * stride, 8 * stride), target=target
    )
    expected = pixels[:, 0, ::8, ::8].flatten(1)  # captum repeats a window's value on its pixels
    torch.testing.assert_close(found, expected.to(found), **SINGLE)


def few_patches(columns: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of 2 x columns patches, few enough for all their sets."""
    generator = torch.Generator().manual_seed(2)
    model = small_vit(img_size=(16, 8 * columns), depth=2)
    return model, torch.randn(2, 3, 16, 8 * columns, dtype=torch.float64, generator=generator), two_classes()[:, 0]


def test_kernel_shap_of_all_sets_is_captums_exact_shapley_values():
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    model, images, target = few_patches(columns=2)
    spelling = "kernel_shap:of=logit,budget=15"
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    numbers = patch_of_pixel((2, 2), (16, 16)).view(1, 1, 16, 16).repeat(1, 3, 1, 1)
    with torch.no_grad():
        pixels = captum.ShapleyValues(model).attribute(images, target=target, feature_mask=numbers)
    torch.testing.assert_close(found, pixels[:, 0, ::8, ::8].flatten(1).to(found), **SINGLE)


@pytest.mark.parametrize("by", ["paint", "drop"])
def test_kernel_shap_of_all_sets_is_shapleys_definition(by):
    """φ_i = Σ_S |S|! (M-|S|-1)! / M! (f(S ∪ i) - f(S))."""
    model, images, target = few_patches(columns=3)
    spelling = f"kernel_shap:budget=63,by={by}"
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    runner, pixels = ModelRunner(model, images), patch_of_pixel((2, 3), (16, 24)).view(16, 24)
    worth = {}
    for size in range(7):
        for chosen in itertools.combinations(range(6), size):
            if by == "paint":
                logits = runner.logits(images * torch.isin(pixels, torch.tensor(chosen)))
            else:
                logits = runner.logits_of_kept(images, torch.tensor([chosen, chosen], dtype=torch.int64))
            worth[frozenset(chosen)] = logits.softmax(1).gather(1, target[:, None])[:, 0]
    for patch in range(6):
        expected = sum(
            math.factorial(len(chosen))
            * math.factorial(5 - len(chosen))
            / math.factorial(6)
            * (worth[chosen | {patch}] - worth[chosen])
            for chosen in worth
            if patch not in chosen
        )
        torch.testing.assert_close(found[:, patch], expected, **SOLVED)


def test_lime_agrees_with_captum_on_the_same_sets():
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    pytest.importorskip("sklearn", reason="captum's ridge regression is scikit-learn's")
    from captum._utils.models.linear_model import SkLearnRidge

    model, images, target = few_patches(columns=3)
    generator = torch.Generator().manual_seed(4)
    kept = torch.rand(25, 6, generator=generator) < 0.6
    kept[kept.sum(dim=1) == 0, 0] = True
    found, _ = ask(Lime(of="logit", ridge=0.7, width=0.5, kept=kept), model, images, target[:, None])
    pixels = patch_of_pixel((2, 3), (16, 24)).view(16, 24)

    def similarity(_: Tensor, __: Tensor, sample: Tensor, **___: object) -> float:
        cosine = torch.cosine_similarity(sample.double(), torch.ones(1, 6, dtype=torch.float64))
        return math.sqrt(math.exp(-float((1 - cosine) ** 2) / 0.5**2))

    for image in range(2):
        sets = iter([torch.ones(6), *kept.double()])
        peer = captum.LimeBase(
            model,
            interpretable_model=SkLearnRidge(alpha=0.7),
            similarity_func=similarity,
            perturb_func=lambda *_, sets=sets, **__: next(sets)[None].double(),
            perturb_interpretable_space=True,
            from_interp_rep_transform=lambda sample, original, **_: original * sample[0][pixels],
            to_interp_rep_transform=None,
        )
        with torch.no_grad():
            expected = peer.attribute(images[image : image + 1], target=int(target[image]), n_samples=26)
        # captum hands its samples to scikit-learn as they are, float64, but its weights in float32.
        torch.testing.assert_close(found[image, 0], expected[0].double(), rtol=1e-4, atol=1e-6)


def test_complete_linkage_agrees_with_scikit_learn():
    clustering = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    points = np.random.default_rng(0).random((40, 3))
    distance = np.linalg.norm(points[:, None] - points, axis=-1)
    for threshold, at_most in ((0.3, 40), (0.6, 40), (0.0, 7), (0.3, 5)):
        theirs = clustering.AgglomerativeClustering(
            n_clusters=at_most if at_most < 40 else None,
            distance_threshold=threshold if at_most == 40 else None,
            metric="precomputed",
            linkage="complete",
        ).fit(distance)
        ours = complete_linkage(distance, threshold, at_most)
        assert np.array_equal(ours[:, None] == ours, theirs.labels_[:, None] == theirs.labels_)


# Closed forms ---------------------------------------------------------------------------------------------------------


def additive_model() -> nn.Module:
    """Blocks that add nothing, no norm, an average and a linear head: every patch contributes by itself."""
    model = small_vit(global_pool="avg", class_token=False, depth=2)
    model.norm = model.fc_norm = nn.Identity()
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()
    return model


def contributions(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """What each patch adds to the logit against a patch of zeros."""
    embedded = nn.functional.conv2d(images, model.patch_embed.proj.weight, stride=8).flatten(2)
    return torch.einsum("bcp,bc->bp", embedded, model.head.weight[target]).detach() / PATCHES


@pytest.mark.parametrize(
    "spelling",
    [
        "occlusion:of=logit",
        "lime:of=logit,ridge=0,budget=60",
        "kernel_shap:of=logit,budget=60",
        "kernel_shap:of=logit,budget=61,seed=3",
    ],
)
def test_contributions_that_add_up_are_recovered_exactly(spelling):
    model, images, target = additive_model(), random_images(), two_classes()[:, 0]
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    torch.testing.assert_close(found, contributions(model, images, target), **SOLVED)


def test_pami_with_one_patch_is_what_the_patch_adds_to_a_picture_of_zeros():
    model, images, target = additive_model(), random_images(), two_classes()[:, 0]
    found = vitreous.explain(model, images, "pami:of=logit,window=1", target).scores["pami:of=logit,window=1"]
    nothing = model(torch.zeros_like(images)).detach().gather(1, target[:, None])
    torch.testing.assert_close(found, nothing + contributions(model, images, target), **SOLVED)


@pytest.mark.parametrize("spelling", ["kernel_shap:budget=40", "kernel_shap:budget=10,by=drop"])
def test_shapley_values_add_up_to_what_all_patches_achieve(spelling):
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    found = vitreous.explain(model, images, spelling, target).scores[spelling].sum(dim=1)
    runner = ModelRunner(model, images)
    if "drop" in spelling:
        nothing = runner.logits_of_kept(images, torch.zeros(2, 0, dtype=torch.int64))
    else:
        nothing = runner.logits(torch.zeros_like(images))
    gain = runner.logits(images).softmax(1) - nothing.softmax(1)
    torch.testing.assert_close(found, gain.gather(1, target[:, None])[:, 0], **SOLVED)


def test_hsic_is_its_definition_written_out():
    model, images, targets = small_vit(), random_images(), two_classes()
    kept = torch.rand(30, PATCHES, generator=seeded(1)) < 0.5
    found, runner = ask(Hsic(kept=kept), model, images, targets)
    pixels = kept[:, patch_of_pixel((4, 4), (32, 32))].view(-1, 1, 32, 32)
    centring = torch.eye(30, dtype=torch.float64) - 1 / 30
    for image, number in itertools.product(range(2), range(2)):
        values = runner.logits(images[image] * pixels)[:, targets[image, number]]
        distance = (values[:, None] - values).abs()
        width = distance[~torch.eye(30, dtype=torch.bool)].median()
        output = (-(distance**2) / (2 * width**2)).exp()
        for patch in range(PATCHES):
            agree = kept[:, None, patch] == kept[:, patch]
            kernel = torch.where(agree, 0.5, -0.5).double()
            expected = torch.trace(kernel @ centring @ output @ centring) / 29**2
            torch.testing.assert_close(found[image, number, patch], expected, **SAME)


def test_hsic_sees_on_which_patches_the_output_depends():
    model, images, target = additive_model(), random_images(), two_classes()[:, 0]
    # Three patches add 1 or -1 each, all others nothing.
    factors = torch.zeros(2, PATCHES, dtype=torch.float64)
    factors[:, [2, 7, 8]] = 1 / contributions(model, images, target)[:, [2, 7, 8]].abs()
    images = images * factors[:, patch_of_pixel((4, 4), (32, 32))].view(2, 1, 32, 32)
    scores = vitreous.explain(model, images, "hsic:budget=400", target).scores["hsic:budget=400"]
    for values in scores:
        assert set(values.argsort(descending=True)[:3].tolist()) == {2, 7, 8}
        assert values[[2, 7, 8]].min() > 10 * values[[0, 1, 3, 4, 5, 6, *range(9, 16)]].max()


def test_occlusion_by_dropping_is_the_loss_of_the_dropped_patches():
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    spelling = "occlusion:by=drop,of=logit"
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    runner = ModelRunner(model, images)
    for patch in range(PATCHES):
        others = torch.tensor([number for number in range(PATCHES) if number != patch]).expand(2, -1)
        lost = runner.logits(images) - runner.logits_of_kept(images, others)
        torch.testing.assert_close(found[:, patch], lost.gather(1, target[:, None])[:, 0], **SAME)


def test_rise_by_dropped_tokens_is_the_weighted_mean_of_its_masks():
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    runner = ModelRunner(model, images)
    kept = blocks_of_patches(20, 3, 0.4, (4, 4), seeded(5))
    spelling = "rise:budget=20,cells=3,keep=0.4,seed=5,by=drop"
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    for image in range(2):
        expected = torch.zeros(PATCHES, dtype=torch.float64)
        for mask in kept:
            said = runner.logits_of_kept(images[image : image + 1], torch.where(mask)[0][None])
            expected += said.softmax(1)[0, target[image]] * mask / (20 * 0.4)
        torch.testing.assert_close(found[image], expected, **SAME)


@pytest.mark.parametrize("spelling", ["rise:budget=20", "vitcx:seed=1"])
def test_a_patch_is_the_mean_of_its_pixels(spelling):
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    both = [f"{spelling},resolution={resolution}" for resolution in ("pixel", "patch")]
    pixels, patches = (vitreous.explain(model, images, each, target).scores[each] for each in both)
    means = pixels.reshape(2, 4, 8, 4, 8).mean(dim=(2, 4)).flatten(1)
    torch.testing.assert_close(patches, means, **SAME)


@pytest.mark.parametrize(("similarity", "measure"), [(2.0, "logit"), (0.3, "loss")])
@pytest.mark.parametrize("fused", [True, False])
def test_atman_is_its_definition_written_out(similarity, measure, *, fused):
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    for block in model.blocks:
        block.attn.fused_attn = fused
    spelling = f"atman:factor=0.8,similarity={similarity},of={measure}"
    found = vitreous.explain(model, images, spelling, target).scores[spelling]
    with torch.no_grad():
        start = model._pos_embed(model.patch_embed(images))
    directions = start[:, 1:] / start[:, 1:].norm(dim=-1, keepdim=True)
    alike = directions @ directions.mT
    together = (alike >= similarity).double().sum() - 2 * PATCHES
    assert (together > 0) == (similarity < 1)  # or the threshold would not be tested

    def said(factor: Tensor) -> Tensor:
        tokens = start
        for block in model.blocks:
            own = block.attn
            qkv = own.qkv(block.norm1(tokens)).unflatten(-1, (3, own.num_heads, -1)).permute(2, 0, 3, 1, 4)
            scores = own.scale * qkv[0] @ qkv[1].mT * factor[:, None, None]
            tokens = tokens + block.ls1(own.proj((scores.softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2)))
            tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
        logits = model.head(model.norm(tokens)[:, 0])
        logits = logits if measure == "logit" else logits.log_softmax(1)
        return logits.gather(1, target[:, None])[:, 0].detach()

    whole = said(torch.ones(2, 17, dtype=torch.float64))
    for patch in range(PATCHES):
        factor = torch.ones(2, 17, dtype=torch.float64)
        for image, other in itertools.product(range(2), range(PATCHES)):
            if other == patch:
                factor[image, 1 + other] = 1 - 0.8
            elif alike[image, patch, other] >= similarity:
                factor[image, 1 + other] = 1 - 0.8 * alike[image, patch, other]
        torch.testing.assert_close(found[:, patch], whole - said(factor), **SAME)


# Masks ----------------------------------------------------------------------------------------------------------------


def test_every_patch_is_kept_in_half_of_balanced_masks():
    assert (balanced(30, PATCHES, seeded(0)).sum(dim=0) == 15).all()


def test_all_sets_have_the_weights_of_the_shapley_kernel():
    kept, weights = coalitions(4, 14, 0)
    assert len(kept.unique(dim=0)) == 14
    for chosen, weight in zip(kept, weights, strict=True):
        size = int(chosen.sum())
        assert weight == pytest.approx(3 / (math.comb(4, size) * size * (4 - size)))


def test_drawn_sets_come_with_their_complements_and_in_the_kernels_sizes():
    kept, weights = coalitions(16, 4000, 0)
    assert torch.equal(kept[::2], ~kept[1::2])
    assert (weights == 1).all()
    sizes = torch.bincount(kept.sum(dim=1), minlength=17)[1:16] / 4000
    chances = torch.tensor([1 / (size * (16 - size)) for size in range(1, 16)])
    # Shares of 2000 draws (complements are not independent) deviate by at most 0.01; five times that is never reached.
    torch.testing.assert_close(sizes, chances / chances.sum(), rtol=0, atol=0.05)
    assert kept.float().mean(dim=0).sub(0.5).abs().max() == 0


def test_windows_cover_the_picture_and_are_cut_off_at_its_edges():
    found = windows((4, 5), 2, 3).view(-1, 4, 5).int()
    assert found.shape[0] == 2 * 2
    assert found[0].nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert found[-1].nonzero().tolist() == [[3, 3], [3, 4]]


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 1), (2, 5), (9, 2)])
@pytest.mark.parametrize("grid", [(4, 5), (14, 14), (1, 7)])
def test_windows_within_a_budget_leave_out_no_patch_that_they_had_without(grid, window, stride):
    for budget in range(1, 200, 7):
        found, without = windows_within(budget, grid, window, stride), windows(grid, window, stride)
        assert len(found) <= budget
        if len(without) <= budget:
            assert torch.equal(found, without)
        else:
            assert found.any(dim=0).all()
            # No smaller stride would have been enough.
            step = stride + 1
            while not torch.equal(windows(grid, max(window, step), step), found):
                assert len(windows(grid, max(window, step), step)) > budget
                step += 1


def test_occlusion_within_a_budget_is_that_of_larger_squares():
    model, images = small_vit(), random_images()
    small, large = "occlusion:budget=10", "occlusion:window=2,stride=2"
    scores = vitreous.explain(model, images, [small, large]).scores
    assert torch.equal(scores[small], scores[large])


def test_atman_within_a_budget_suppresses_squares():
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    spelling = "atman:budget=4,of=logit,similarity=2,factor=0.8"
    found = vitreous.explain(model, images, spelling, target).scores[spelling].view(2, 4, 4)
    runner = ModelRunner(model, images)
    for row, column in itertools.product((0, 2), (0, 2)):
        factor = torch.ones(2, 5, 4, dtype=torch.float64)
        factor[:, 1 + row : 3 + row, column : column + 2] = 0.2  # a row for the class token in front, mostly cut off
        lost = runner.logits(images) - runner.logits_of_damped(images, factor.flatten(1)[:, 3:])
        for patch in found[:, row : row + 2, column : column + 2].flatten(1).T:
            torch.testing.assert_close(patch, lost.gather(1, target[:, None])[:, 0], **SAME)


def test_pixels_of_padded_pictures_belong_to_the_patch_that_covers_them():
    patches = patch_of_pixel((4, 6), (30, 45)).view(30, 45)
    assert patches[0, 7] == 0
    assert patches[0, 8] == 1
    assert patches[29, 44] == 23
    assert patches[24, 0] == 18


# All of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_batch_gives_what_single_images_give(spelling):
    model, images, target = small_vit(), random_images(), two_classes()[:, 0]
    together = vitreous.explain(model, images, spelling, target)
    scores = together.scores[spelling]
    pixels = "resolution=pixel" in spelling
    assert scores.shape == ((2, 32 * 32) if pixels else (2, PATCHES))
    assert together.heatmap(spelling).shape == (2, 32, 32)
    assert (scores.std(dim=1) > 1e-9).all()
    for image in range(2):
        alone = vitreous.explain(model, images[image : image + 1], spelling, target[image : image + 1])
        torch.testing.assert_close(alone.scores[spelling][0], scores[image], **SAME)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_several_targets_cost_the_evaluations_of_one(spelling):
    model, images, targets = small_vit(), random_images(), two_classes()
    vitreous.explain(model, images, "pami:by=drop")  # the first call checks patches: their grid, and without some
    asked: list[int] = []
    model.patch_embed.register_forward_pre_hook(lambda _, given: asked.append(len(given[0])))
    one = [vitreous.explain(model, images, spelling, target).scores[spelling] for target in targets.T]
    evaluations = sum(asked)
    asked.clear()
    both = vitreous.explain(model, images, spelling, targets).scores[spelling]
    assert sum(asked) == evaluations / 2
    torch.testing.assert_close(both, torch.stack(one, dim=1), **SAME)
    assert not torch.allclose(both[:, 0], both[:, 1])


@pytest.mark.parametrize(
    ("spelling", "evaluations"),
    [
        *[
            (f"{name}:budget={budget}", budget)
            for name in ("rise", "lime", "hsic", "kernel_shap")
            for budget in (37, 64)
        ],
        ("rise:budget=37,by=drop", 37),
        *[(f"{name}:budget=37,by=drop", 37) for name in ("lime", "hsic", "kernel_shap")],
        ("vitcx:budget=11", 10),
        ("vitcx:budget=2", 2),
        ("occlusion", PATCHES),
        ("occlusion:window=2,stride=2,by=drop", 4),
        ("pami:window=3", 4),
        ("atman", PATCHES),
        ("occlusion:budget=16", PATCHES),
        ("occlusion:budget=15", 4),
        ("occlusion:budget=4,by=drop", 4),
        ("occlusion:budget=3", 1),
        ("pami:budget=16", PATCHES),
        ("pami:budget=15", 4),
        ("pami:window=2,budget=8", 4),
        ("pami:window=2,budget=9,by=drop", 9),
        ("atman:budget=16", PATCHES),
        ("atman:budget=15", 4),
        ("atman:budget=1", 1),
    ],
)
def test_a_budget_is_kept_exactly(spelling, evaluations):
    model, images = small_vit(depth=2), random_images()
    vitreous.explain(model, images, "pami:by=drop")  # the first call checks patches: their grid, and without some
    asked: list[int] = []
    model.patch_embed.register_forward_pre_hook(lambda _, given: asked.append(len(given[0])))
    vitreous.explain(model, images, spelling)
    assert sum(asked) == 2 + 2 * evaluations  # the recorded run, then the same number for each image


def test_vitcx_counts_two_evaluations_for_each_mask():
    model, images = small_vit(), random_images(1)
    _, runner = ask(VitCx(), model, images, torch.tensor([[0]]))
    (products,) = products_of_channels(model, images)
    count = len(clusters(products, 0.1, None).unique())
    assert 1 < count < 24
    assert runner.evaluations == 2 * count


@pytest.mark.parametrize(
    "spelling",
    [
        *("rise:budget=20", "rise:resolution=pixel,budget=20", "lime:budget=20", "kernel_shap:budget=20"),
        *("hsic:budget=20", "vitcx"),
    ],
)
def test_the_seed_decides_everything_that_is_random(spelling):
    model, images = small_vit(), random_images()
    seeds = [f"{spelling}{',' if ':' in spelling else ':'}seed={seed}" for seed in (0, 1)]
    first = vitreous.explain(model, images, seeds).scores
    torch.manual_seed(1234)  # the global state is neither used nor changed
    before = torch.get_rng_state()
    second = vitreous.explain(model, images, [spelling, *seeds]).scores
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[seeds[0]], second[seeds[0]])
    assert torch.equal(first[seeds[0]], second[spelling])
    assert not torch.allclose(first[seeds[0]], first[seeds[1]], rtol=1e-6, atol=0)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_what_is_random_does_not_depend_on_the_default_type(default):
    model, images = small_vit(), random_images()
    spellings = [
        *("rise:budget=20", "rise:budget=20,by=drop", "lime:budget=20", "kernel_shap:budget=20", "hsic:budget=20"),
        *("vitcx:budget=20", "smoothgrad:samples=2"),
    ]
    expected = vitreous.explain(model, images, spellings).scores
    torch.set_default_dtype(default)
    try:
        found = vitreous.explain(model, images, spellings).scores
    finally:
        torch.set_default_dtype(torch.float32)
    for spelling in spellings:
        assert torch.equal(found[spelling], expected[spelling]), spelling


def test_more_evaluations_come_closer_to_the_shapley_values():
    model, images, target = few_patches(columns=3)
    spellings = [f"kernel_shap:budget={budget}" for budget in (8, 40, 63)]
    few, many, exact = vitreous.explain(model, images, spellings, target).scores.values()
    assert 0 < (many - exact).norm() < (few - exact).norm()


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("rise:by=drop,resolution=pixel", "pixels cannot be dropped"),
        ("rise:keep=1", "keep must lie between"),
        ("rise:budget=0", "at least 1"),
        ("rise.propagate:resolution=pixel", "leave out resolution=pixel"),
        ("vitcx.propagate:resolution=pixel", "leave out resolution=pixel"),
        ("vitcx:by=drop", "no set of tokens"),
        ("occlusion:budget=0", "at least 1"),
        ("pami:budget=0", "at least 1"),
        ("atman:budget=0", "at least 1"),
        ("vitcx:budget=1", "at least 2"),
        ("lime:budget=0", "at least 1"),
        ("lime:ridge=-1", "ridge not below 0"),
        ("kernel_shap:budget=1", "at least 2"),
        ("hsic:budget=1", "at least 2"),
        ("occlusion:window=0", "at least 1"),
        ("pami:stride=0", "at least 1"),
        ("atman:factor=1", "between 0 and 1"),
        ("occlusion.plus", "no layers"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_the_model_runs(spelling, reason):
    with pytest.raises(MethodError, match=reason):
        vitreous.explain(nn.Identity(), random_images(), spelling)


def test_an_average_of_no_patches_is_refused_with_advice():
    with pytest.raises(UnsupportedModelError, match="by=paint"):
        vitreous.explain(small_vit(global_pool="avg"), random_images(), "kernel_shap:by=drop,budget=20")


@pytest.mark.parametrize("name", ["occlusion", "rise", "vitcx"])
def test_a_patch_map_can_be_propagated(name):
    model, images = small_vit(), random_images()
    plain, spread = f"{name}:budget=20", f"{name}.propagate:budget=20"
    scores = vitreous.explain(model, images, [plain, spread]).scores
    assert scores[spread].shape == scores[plain].shape == (2, PATCHES)
    architecture, target = find_architecture(model, images), torch.zeros(2, dtype=torch.int64)
    propagate = parse("raw_attention.propagate").propagate
    with record(model, architecture, images, Plan(architecture.depth, propagate.needs(architecture.depth))) as tape:
        expected = propagate.apply(View(tape, {}, target, ModelRunner(model, images)), scores[plain])
    torch.testing.assert_close(scores[spread], expected, **SAME)
    assert not torch.allclose(scores[spread], scores[plain])


def test_methods_can_be_asked_of_half_precision():
    model, images = small_vit(dtype=torch.bfloat16), random_images(dtype=torch.bfloat16)
    for spelling in SPELLINGS:
        scores = vitreous.explain(model, images, spelling).scores[spelling]
        assert scores.dtype == torch.float32
        assert torch.isfinite(scores).all(), spelling


def test_a_class_of_a_model_with_one_output_is_its_sigmoid():
    model, images = small_vit(num_classes=1), random_images()
    found = vitreous.explain(model, images, "occlusion").scores["occlusion"]
    procedure = Occlusion(by="paint", of="logit", window=1, stride=1)
    logits, _ = ask(procedure, model, images, torch.zeros(2, 1, dtype=torch.int64))
    whole = model(images).detach()
    torch.testing.assert_close(found, whole.sigmoid() - (whole - logits[:, 0]).sigmoid(), **SAME)


def test_of_padded_pictures_the_patches_of_the_model_are_painted_and_summed():
    """Patches of 8 pixels, the last of which stand over the edge of 30 x 29 pixels by 2 and 3."""
    model = small_vit(dynamic_img_size=True, dynamic_img_pad=True)
    pictures = random_images(1)[..., :30, :29]
    methods = ["occlusion:of=logit", "integrated_gradients:steps=2", "integrated_gradients:steps=2,resolution=pixel"]
    found = vitreous.explain(model, pictures, methods, 1).scores
    lines = [slice(start, start + 8) for start in range(0, 32, 8)]
    patches = [(rows, columns) for rows in lines for columns in lines]
    lost = []
    for rows, columns in patches:
        painted = pictures.clone()
        painted[..., rows, columns] = 0
        lost.append(model(pictures)[0, 1] - model(painted)[0, 1])
    assert largest_difference(found[methods[0]][0], torch.stack(lost)) < 1e-12  # float64, batched otherwise
    pixels = found[methods[2]].view(30, 29)
    assert largest_difference(found[methods[1]][0], torch.stack([pixels[place].sum() for place in patches])) < 1e-12


def test_pictures_that_are_mostly_padding_at_their_edge_are_refused():
    """25 pixels in 4 patches of 8: of the grid alone they would be taken for patches of 7."""
    model = small_vit(dynamic_img_size=True, dynamic_img_pad=True)
    with pytest.raises(InputError, match="pads images of 25 x 32 pixels to 32 x 32"):
        vitreous.explain(model, random_images(1)[..., :25, :], "occlusion")
