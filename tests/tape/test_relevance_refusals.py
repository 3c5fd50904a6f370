"""What relevance propagation refuses, and why: a part that no rule knows would make a silently wrong map."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn

import vitreous
from small_models import SIZE, largest_difference, random_images, randomise, small_vit
from vitreous.errors import UnsupportedModelError
from vitreous.speed.timing import one_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def with_layer(change) -> VisionTransformer:
    """A small ViT with something done to its feed-forward output in the first block."""

    class Changed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return change(self.inner(tokens))

    model = small_vit(depth=2)
    model.blocks[0].mlp = Changed(model.blocks[0].mlp)
    return model


def in_place(tokens: torch.Tensor) -> torch.Tensor:
    tokens = tokens.clone()
    tokens += 1
    return tokens


def divided_by_own_size(tokens: torch.Tensor) -> torch.Tensor:
    return tokens / tokens.abs().sum(dim=-1, keepdim=True)


REFUSED = {
    "an unknown function": (torch.sin, r"no relevance rule for its sin\(\)"),
    "a difference": (lambda tokens: tokens - 1, "adds a number"),
    "a number added": (lambda tokens: tokens + 1, "adds a number"),
    "arithmetic in place": (in_place, "adds a number"),
    "a division by the stream": (divided_by_own_size, "abs|depends on the tokens"),
    "a running sum": (lambda tokens: tokens.cumsum(dim=1), "cumsum"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("method", ["transattr", "lrp", "abslrp"])
def test_what_no_rule_knows_is_refused(name, method):
    change, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        vitreous.explain(with_layer(change), random_images(1), method)


def test_what_lies_below_the_blocks_that_are_read_does_not_matter():
    model = with_layer(torch.sin)
    alone = vitreous.explain(model, random_images(1), "plrp").scores["plrp"]
    assert alone.any()
    beside = vitreous.explain(model, random_images(1), ["plrp", "ixg"]).scores["plrp"]
    assert largest_difference(beside, alone) < 1e-10


def test_relevance_methods_are_not_recommended_where_they_were_not_tried():
    with pytest.raises(UnsupportedModelError) as caught:
        vitreous.explain(with_layer(torch.sin), random_images(1), "transattr")
    assert "transattr," not in str(caught.value).split("Methods that work on it:")[1]
    assert "gae" in str(caught.value)


def test_relative_positions_in_the_scores_are_refused_where_modules_are_scaled():
    model = timm.models.beit.Beit(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, use_rel_pos_bias=True
    )
    model = randomise(model).double().eval()
    with pytest.raises(UnsupportedModelError, match="relative positions or the like"):
        vitreous.explain(model, random_images(1), "abslrp")


def with_added_to_scores(*added: float | torch.Tensor) -> VisionTransformer:
    """A small ViT that writes out its attention and adds to the scores, one thing after the other."""

    class Shifted(Attention):
        def forward(self, tokens: torch.Tensor, **_) -> torch.Tensor:
            query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            scores = (query @ key.mT) * self.scale
            for one in added:
                scores = scores + one
            return self.proj((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))

    model = small_vit(depth=2)
    for block in model.blocks:
        block.attn.__class__ = Shifted
    return model


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_a_number_that_is_added_to_all_scores_changes_no_relevance(number):
    found, expected = (
        vitreous.explain(model, random_images(1), "transattr").scores["transattr"]
        for model in (with_added_to_scores(number), small_vit(depth=2))
    )
    assert largest_difference(found, expected) < 1e-10  # float64, 1e-15 per step


def test_a_number_that_is_added_to_the_scores_is_refused_where_modules_are_scaled_unless_it_is_0():
    with pytest.raises(UnsupportedModelError, match="to its attention scores"):
        vitreous.explain(with_added_to_scores(0.5), random_images(1), "abslrp")
    assert vitreous.explain(with_added_to_scores(0.0), random_images(1), "abslrp").scores["abslrp"].any()


@pytest.mark.parametrize("first", ["positions", "mask"])
def test_a_mask_does_not_hide_that_positions_are_added_too(first):
    positions, mask = torch.randn(17, 17, dtype=torch.float64), torch.zeros(17, 17, dtype=torch.float64)
    model = with_added_to_scores(positions, mask) if first == "positions" else with_added_to_scores(mask, positions)
    with pytest.raises(UnsupportedModelError, match="relative positions or the like"):
        vitreous.explain(model, random_images(1), "abslrp")


def test_rotated_positions_are_refused():
    model = timm.models.eva.Eva(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, use_rot_pos_emb=True
    )
    model = randomise(model).double().eval()
    with pytest.raises(UnsupportedModelError, match="transattr cannot explain"):
        vitreous.explain(model, random_images(1), "transattr")


def test_half_precision_is_refused():
    model = small_vit(dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="float32"):
        vitreous.explain(model, random_images(1, dtype=torch.bfloat16), "transattr")


class CastsItself(nn.Module):
    """Runs in half precision by an autocast of its own, which nobody outside sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_vit(depth=2, dtype=torch.float32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(images)


@pytest.mark.parametrize("method", ["transattr", "plrp", "lrp", "abslrp", "lrp_rollout"])
def test_a_models_own_autocast_is_refused_as_half_precision(method):
    with pytest.raises(UnsupportedModelError, match=r"it runs in torch.bfloat16, .*; run it in float32"):
        vitreous.explain(CastsItself(), random_images(1, dtype=torch.float32), method)


def test_a_convolutional_stem_is_refused_on_the_way_to_the_pixels_only():
    model = small_vit(depth=2)
    model.patch_embed.proj = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 24, 2, 2)).double()
    with pytest.raises(UnsupportedModelError, match="more convolutions"):
        vitreous.explain(model, random_images(1), "lrp")
    assert vitreous.explain(model, random_images(1), "transattr").scores["transattr"].any()


class Transposed(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2)


def test_every_pixel_counts_once_where_patches_do_not_divide_the_picture():
    model = small_vit(depth=2)
    model.patch_embed = nn.Sequential(nn.Conv2d(3, 24, 8, 7, padding=1), nn.Flatten(2), Transposed()).double()
    images = random_images(1)[:, :, :31, :31]
    spellings = ["lrp", "lrp:resolution=pixel"]
    patches, pixels = (vitreous.explain(model, images, spelling).scores[spelling] for spelling in spellings)
    assert (patches.shape, pixels.shape) == ((1, 16), (1, 31 * 31))
    # The same numbers added in another order; LRP's are large and of both signs.
    torch.testing.assert_close(patches.sum(), pixels.sum(), rtol=1e-9, atol=1e-12 * float(pixels.abs().sum()))
