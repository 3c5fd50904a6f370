"""TIS: the formula from hooks and runs by hand, k-means, masks, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import PATCHES, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.methods.perturbation import seeded
from vitreous.methods.random_masks import TransformerInputSampling, k_means

# Float64: sums of some hundred terms in another order.
SAME = {"rtol": 1e-10, "atol": 1e-12}


def probability_of(model: nn.Module, image: Tensor, kept: list[int], target: int) -> Tensor:
    """Of a class with some patches, by running the parts of timm's model one after the other."""
    prefix = model.num_prefix_tokens
    stream = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
    stream = torch.cat((stream[:, :prefix], stream[:, [place + prefix for place in kept]]), dim=1)
    for block in model.blocks:
        stream = block(stream)
    return model.forward_head(model.norm(stream)).softmax(-1)[0, target]


@torch.no_grad()
def tis_by_hand(model: nn.Module, image: Tensor, target: int, keep: float) -> Tensor:
    """Every channel of every block is a mask."""
    streams: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: streams.append(out[0])) for block in model.blocks]
    model(image[None])
    for hook in hooks:
        hook.remove()
    weighted, covered = torch.zeros(2, PATCHES, dtype=torch.float64)
    for stream in streams:
        for channel in stream[model.num_prefix_tokens :].T:
            kept = channel.topk(int(keep * PATCHES)).indices.sort().values.tolist()
            probability = probability_of(model, image, kept, target)
            for place in kept:
                weighted[place] += probability
                covered[place] += 1
    return weighted / covered


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "no_embed_class": True}])
def test_the_formula(options):
    model, images = small_vit(depth=2, **options), random_images()
    spelling = "tis:keep=0.25"
    found = vitreous.explain(model, images, spelling, [1, 3]).scores[spelling]
    expected = [tis_by_hand(model, image, target, 0.25) for image, target in zip(images, (1, 3), strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), **SAME)


def test_a_budget_bounds_the_evaluations_and_a_seed_fixes_the_map():
    model, images = small_vit(depth=2), random_images(1)
    maps = {
        name: vitreous.explain(model, images, name, 1).scores[name] for name in ("tis:budget=9", "tis:budget=9,seed=1")
    }
    again = vitreous.explain(model, images, "tis:budget=9", 1).scores["tis:budget=9"]
    assert torch.equal(maps["tis:budget=9"], again)
    assert not torch.equal(maps["tis:budget=9"], maps["tis:budget=9,seed=1"])
    channels = torch.randn(40, PATCHES, generator=seeded(0))
    assert TransformerInputSampling(budget=9).masks(channels).shape == (9, PATCHES)


def test_scores_are_probabilities_and_painting_is_another_map():
    model, images = small_vit(depth=2), random_images()
    drop, paint = "tis:budget=12", "tis:budget=12,by=paint"
    scores = vitreous.explain(model, images, [drop, paint], 2).scores
    for map_ in scores.values():
        assert bool(((map_ >= 0) & (map_ <= 1)).all())
    assert not torch.allclose(scores[drop], scores[paint])


def test_centres_are_the_means_of_their_points():
    points = torch.randn(200, 3, generator=seeded(1), dtype=torch.float64)
    centres = k_means(points, 5, seeded(2))
    nearest = torch.cdist(points, centres).argmin(dim=1)
    for number in range(5):
        # It stops when centres move by less than 1e-4 of the largest.
        torch.testing.assert_close(points[nearest == number].mean(dim=0), centres[number], rtol=0, atol=1e-3)


def test_points_far_from_each_other_are_told_apart():
    places = torch.tensor([[0.0, 0.0], [100.0, 0.0]], dtype=torch.float64)
    points = places.repeat(10, 1) + 0.1 * torch.randn(20, 2, generator=seeded(3), dtype=torch.float64)
    centres = k_means(points, 2, seeded(0))
    assert float((centres[:, 0] - 50).abs().min()) > 45


@pytest.mark.parametrize("options", ["budget=0", "keep=0", "keep=1"])
def test_what_makes_no_mask_is_refused(options):
    with pytest.raises(MethodError, match="must"):
        vitreous.methods.spelling.parse(f"tis:{options}")
