"""Blocks that know how many tokens there are: patches are dropped, hidden or refused, never put in wrong places."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from small_models import PATCHES, random_images, small_vit
from vitreous.errors import UnsupportedModelError
from vitreous.tape import removal as doing_without
from vitreous.tape.runner import ModelRunner

# Float64 and the same operations; sums over another number of tokens are cut into other pieces.
SAME = {"rtol": 1e-12, "atol": 1e-12}
COUNTS = (3, 9)  # of 16 patches; 9 of them could be a grid of their own


def subject_of(model: nn.Module, images: Tensor) -> ModelRunner:
    return ModelRunner(model, images)


def some_patches(count: int) -> Tensor:
    return torch.stack([torch.randperm(PATCHES, generator=torch.Generator().manual_seed(n))[:count] for n in range(2)])


class OwnPositions(Attention):
    """Works out where its tokens stand from how many there are; ``places`` are those of the kept ones in a picture."""

    places: Tensor | None = None

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        batch, count, width = tokens.shape
        query, key, value = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        places = torch.arange(count).expand(batch, -1) if self.places is None else self.places
        output = self.attend(query, key, value, places.to(tokens.dtype)[:, None])
        return self.proj(output.transpose(1, 2).reshape(batch, count, width))


class Rotary(OwnPositions):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        angles = places[..., None] * torch.tensor([1.0, 0.3, 0.1, 0.03])

        def turned(tokens: Tensor) -> Tensor:
            one, other = tokens.chunk(2, dim=-1)
            cosine, sine = angles.cos(), angles.sin()
            return torch.cat((one * cosine - other * sine, one * sine + other * cosine), dim=-1)

        return nn.functional.scaled_dot_product_attention(turned(query), turned(key), value)


class Distances(OwnPositions):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        bias = -0.2 * (places[..., None] - places[..., None, :]).abs()
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


@pytest.mark.parametrize("attention", [Rotary, Distances])
@pytest.mark.parametrize("count", COUNTS)
def test_positions_that_blocks_work_out_themselves_are_those_of_the_whole_picture(attention, count):
    model, images, kept = small_vit(attn_layer=attention), random_images(), some_patches(count)
    found = subject_of(model, images).logits_of_kept(images, kept)
    told = copy.deepcopy(model)
    tokens = torch.cat((torch.zeros(2, 1, dtype=torch.int64), kept.sort(dim=1).values + 1), dim=1)
    for block in told.blocks:
        block.attn.places = tokens
    with torch.no_grad():
        stream = told.norm_pre(told.pos_drop(told._pos_embed(told.patch_embed(images))))
        stream = torch.stack([row[index] for row, index in zip(stream, tokens, strict=True)])
        expected = told.forward_head(told.norm(told.blocks(stream)))
    torch.testing.assert_close(found, expected, **SAME)


class NamedOperands(OwnPositions):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        del places
        return nn.functional.scaled_dot_product_attention(query=query, key=key, value=value)


def test_patches_are_dropped_where_attention_is_called_with_names():
    images, kept = random_images(), some_patches(9)
    model, same = (small_vit(attn_layer=attention) for attention in (NamedOperands, "attn"))
    found, expected = (subject_of(vit, images).logits_of_kept(images, kept) for vit in (model, same))
    torch.testing.assert_close(found, expected, **SAME)
    assert set(doing_without._KNOWN[model].values()) == {"drop"}


class Neighbours(Block):
    """A convolution over the grid of patches behind the feed-forward part, as LocalViT and CPVT have it."""

    grid: int | None = 4

    def __init__(self, dim: int, *args: object, **options: object) -> None:
        super().__init__(dim, *args, **options)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = super().forward(tokens, **options)
        patches = tokens[:, 1:].mT
        side = self.grid or round(patches.shape[-1] ** 0.5)
        mixed = self.conv(patches.unflatten(-1, (side, -1))).flatten(2)
        return torch.cat((tokens[:, :1], tokens[:, 1:] + mixed.mT), dim=1)


class NeighboursOfAnyGrid(Neighbours):
    grid = None


@pytest.mark.parametrize("block", [Neighbours, NeighboursOfAnyGrid])
@pytest.mark.parametrize("count", COUNTS)
def test_patches_that_meet_their_neighbours_cannot_be_dropped(block, count):
    images = random_images()
    # Behind the attention of the last block hidden patches are gone, so a grid may fail there already.
    reason = r"(are mixed other than by attention|does not run with fewer patches).*by=paint"
    with pytest.raises(UnsupportedModelError, match=reason):
        subject_of(small_vit(block_fn=block), images).logits_of_kept(images, some_patches(count))


class NeighboursBehind(nn.Module):
    """A convolution over the row of patches, of any length, behind the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.conv = small_vit(depth=1), nn.Conv1d(24, 24, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.vit.forward_features(images)[:, 1:]
        return self.vit.head(self.conv(patches.mT).relu().mean(dim=-1))


def test_patches_that_meet_their_neighbours_in_the_head_cannot_be_dropped():
    images = random_images()
    with pytest.raises(UnsupportedModelError, match=r"are mixed other than by attention.*by=paint"):
        subject_of(NeighboursBehind().double().eval(), images).logits_of_kept(images, some_patches(3))


@pytest.mark.parametrize("attention", [Rotary, Distances])
@pytest.mark.parametrize("shape", [(16, 16), (8, 16), (8, 24)])
def test_the_order_of_a_few_patches_tells_as_well(attention, shape):
    """Of 4 patches the order that is tried must not be the ascending one, and one patch has no order."""
    model = small_vit(attn_layer=attention, img_size=shape)
    images, patches = random_images()[..., : shape[0], : shape[1]], shape[0] * shape[1] // 64
    kept = torch.tensor([[patches - 1], [patches - 1]])
    told, tokens = copy.deepcopy(model), torch.tensor([[0, patches]] * 2)
    for block in told.blocks:
        block.attn.places = tokens
    with torch.no_grad():
        stream = told.norm_pre(told.pos_drop(told._pos_embed(told.patch_embed(images))))[:, [0, patches]]
        expected = told.forward_head(told.norm(told.blocks(stream)))
    torch.testing.assert_close(subject_of(model, images).logits_of_kept(images, kept), expected, **SAME)


class Squeezed(Block):
    """Weighs channels by the mean token: without some patches it is the mean of the others."""

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = super().forward(tokens, **options)
        return tokens * tokens.mean(dim=1, keepdim=True).sigmoid()


def test_a_mean_over_the_tokens_is_one_over_those_that_are_left():
    model, images, kept = small_vit(block_fn=Squeezed), random_images(), some_patches(9).sort(dim=1).values
    with torch.no_grad():
        stream = model.norm_pre(model.pos_drop(model._pos_embed(model.patch_embed(images))))
        stream = torch.stack([row[[0, *(1 + patches).tolist()]] for row, patches in zip(stream, kept, strict=True)])
        expected = model.forward_head(model.norm(model.blocks(stream)))
    torch.testing.assert_close(subject_of(model, images).logits_of_kept(images, kept), expected, **SAME)


class GridBehind(nn.Module):
    """Lays the patches out as a picture again behind the blocks, as timm's DeepSeek and Qwen3 classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = small_vit(class_token=False, global_pool="avg")

    def forward(self, images: Tensor) -> Tensor:
        features = self.vit.forward_features(images)
        return self.vit.head(features.reshape(len(images), 4, 4, -1).mean(dim=(1, 2)))


def test_a_head_that_counts_on_all_patches_is_refused_in_one_sentence():
    images = random_images()
    with pytest.raises(UnsupportedModelError, match=r"GridBehind does not run with fewer patches \(.*by=paint"):
        subject_of(GridBehind(), images).logits_of_kept(images, some_patches(7))


def test_a_model_is_asked_once_whether_its_patches_can_be_dropped_and_again_when_it_was_trained():
    model, images = small_vit(), random_images()
    subject_of(model, images).layout  # noqa: B018  # finding the architecture and the patches' places costs runs, once
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))

    def cost() -> int:
        before = len(runs)
        subject_of(model, images).logits_of_kept(images, some_patches(5))
        return len(runs) - before

    first, second = cost(), cost()
    assert first == second + 1
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert cost() == first
