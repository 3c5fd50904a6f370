"""Maps are painted where the pixels are that tokens are made of, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F  # noqa: N812
from test_patch_grid import (
    WIDTH,
    ConvolutionPatches,
    First,
    LinearPatches,
    behind_a,
    convolutional_stem,
    pictures,
    squares,
)
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

import vitreous
from small_models import randomise, small_vit
from vitreous.architecture import find_architecture
from vitreous.errors import InputError, RefusedMethodsError, UnsupportedModelError
from vitreous.evaluation.tasks.task import enlarged
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.patch_geometry import PatchGeometry
from vitreous.methods.perturbation import patch_of_pixel
from vitreous.tape.runner import ModelRunner


def scattered(images: Tensor) -> Tensor:
    """As einops writes "b c (p h) (q w) -> b (h w) (p q c)": every token has one pixel of each 4 x 4 square."""
    batch, channels, height, width = images.shape
    parts = images.reshape(batch, channels, 8, height // 8, 8, width // 8)
    return parts.permute(0, 3, 5, 2, 4, 1).reshape(batch, -1, 64 * channels)


SCATTERED = {
    "pixels gathered by an order of axes": (lambda: LinearPatches(scattered, 1), 32),
    "the same in a larger picture": (lambda: LinearPatches(scattered, 1), 64),
    "a dilated convolution": (lambda: ConvolutionPatches(nn.Conv2d(3, WIDTH, 8, 1, dilation=4)), 32),
    "a dilated convolution with the right centres": (
        lambda: ConvolutionPatches(nn.Conv2d(3, WIDTH, 4, 16, dilation=16, padding=24)),
        128,
    ),
}


@pytest.mark.parametrize("case", SCATTERED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tokens_that_gather_scattered_pixels_are_refused(case, dtype):
    build, side = SCATTERED[case]
    with pytest.raises(UnsupportedModelError, match="gathers scattered pixels of the picture"):
        vitreous.explain(build().to(dtype), pictures(side, side).to(dtype), "ixg")


def test_self_attention_cv_is_refused():
    package = pytest.importorskip("self_attention_cv")
    model = package.ViT(img_dim=32, patch_dim=8, num_classes=4, dim=24, blocks=2, heads=3, dim_linear_block=32)
    with pytest.raises(UnsupportedModelError, match="gathers scattered pixels"):
        vitreous.explain(randomise(model.eval()), pictures(32, 32).float(), "ixg")


def turned_inside(tokens: Tensor) -> Tensor:
    """The four patches in the middle turned by 180 degrees; those at the edges, which edges show, stay."""
    order = torch.arange(16).view(4, 4)
    order[1:3, 1:3] = order[1:3, 1:3].flip(0, 1)
    return tokens[:, order.flatten()]


@pytest.mark.parametrize(
    "build",
    [
        lambda: ConvolutionPatches(lay_out=lambda made: turned_inside(made.flatten(2).mT)),
        lambda: LinearPatches(lambda images: turned_inside(squares(images)), 1),
    ],
)
def test_patches_in_another_order_inside_the_grid_are_refused(build):
    with pytest.raises(UnsupportedModelError, match=r"\d of 8 tokens of \w+ that were looked at do not see the pixels"):
        vitreous.explain(build(), pictures(32, 32), "ixg")


class WithoutGradient(nn.Module):
    """Gradients do not reach the picture."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.inside(images)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_places_are_also_checked_where_gradients_do_not_reach_the_picture(dtype):
    def stem() -> nn.Module:
        return WithoutGradient(nn.Conv2d(3, WIDTH, 8, 8))

    images = pictures(32, 32).to(dtype)
    assert vitreous.explain(ConvolutionPatches(stem()).to(dtype), images, "ixg").grid == (4, 4)
    blurred = WithoutGradient(convolutional_stem(nn.GroupNorm))
    assert vitreous.explain(ConvolutionPatches(blurred).to(dtype), images, "ixg").grid == (4, 4)
    model = ConvolutionPatches(stem(), lay_out=lambda made: turned_inside(made.flatten(2).mT)).to(dtype)
    with pytest.raises(UnsupportedModelError, match=r"3 of 8 tokens of \w+ that were looked at"):
        vitreous.explain(model, images, "ixg")


class Moving(nn.Module):
    """A block that leaves its patches in other places."""

    def __init__(self, block: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.move = block, move

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        tokens = self.block(tokens, **options)
        return torch.cat((tokens[:, :1], self.move(tokens[:, 1:])), dim=1)


MOVES = {
    "turned by 180 degrees": lambda patches: patches.flip(1),
    "shifted by one patch": lambda patches: patches.roll(1, dims=1),
    "shuffled": lambda patches: patches[:, torch.randperm(16, generator=torch.Generator().manual_seed(3))],
    "multiplied by a permutation": lambda patches: torch.eye(16).flip(1).to(patches) @ patches,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("move", MOVES)
def test_patches_that_move_between_blocks_are_refused(move, place, dtype):
    model = small_vit(depth=3)
    images = pictures(32, 32).to(dtype)
    model.to(dtype)
    assert vitreous.explain(model, images, "ixg").geometry is None
    scores = model(images)
    model.blocks[place] = Moving(model.blocks[place], MOVES[move])
    if dtype == torch.float64:  # positions have been added, so the class scores are the same
        torch.testing.assert_close(model(images), scores)
    with pytest.raises(UnsupportedModelError, match=f"in other places behind block {place} than in front of it"):
        vitreous.explain(model, images, "decompx.skipplus" if dtype == torch.float64 else "ixg")


class WithCoarsePatches(ConvolutionPatches):
    """Coarse patches stand where the class token would."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Conv2d(3, WIDTH, 16, 16)
        randomise(self.double().eval())

    def forward(self, images: Tensor) -> Tensor:
        tokens = torch.cat([stem(images).flatten(2).mT for stem in (self.coarse, self.stem)], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(dim=1))


@pytest.mark.parametrize("side", [32, 48])
def test_coarse_patches_in_front_are_refused(side):
    with pytest.raises(
        UnsupportedModelError, match="some of the tokens that stand before them show a part of the picture"
    ):
        vitreous.explain(WithCoarsePatches(), pictures(side, side), "ixg")


def torchvision_with_stem() -> nn.Module:
    stem = [ConvStemConfig(channels, 3, 2) for channels in (16, 24, 32, 48)]
    return VisionTransformer(224, 16, 2, 3, 48, 96, num_classes=4, conv_stem_configs=stem)


def compact_transformer() -> nn.Module:
    package = pytest.importorskip("vit_pytorch.cct")
    return package.CCT(
        img_size=224, embedding_dim=48, num_layers=2, num_heads=3, mlp_ratio=2.0, num_classes=4, n_conv_layers=2,
        kernel_size=7, stride=2, padding=3, pooling_kernel_size=3, pooling_stride=2, pooling_padding=1,
    )  # fmt: skip


# Where the first patch is centred, from kernels, strides and paddings: of a 3 x 3 convolution with stride 2 and padding
# 1, or of any odd kernel that is padded by half of it, patch i is centred on pixel 2i, so that behind four of them it
# is on pixel 16i, whose centre is 16i + 0.5; equal cells would have 16i + 8.
STEMS = {
    "torchvision": (torchvision_with_stem, 0.5, 16.0),
    "compact transformer": (compact_transformer, 0.5, 16.0),
    "vitamin": (lambda: timm.create_model("vitamin_small_224", depth=2, num_classes=4), 0.5, 16.0),
    # Even sizes are padded behind only, so that the shortcuts of 1 x 1 pixels and stride 2 are on pixel 32i + 3, and
    # the residual branches up to 28 pixels further on; how much of each depends on the weights. Equal cells: 32i + 16.
    "hybrid": (lambda: timm.create_model("vit_small_r26_s32_224", depth=2, num_classes=4), 3.5, 32.0),
}


@pytest.mark.parametrize("stem", STEMS)
def test_patches_of_a_stem_are_centred_where_their_receptive_fields_are(stem):
    build, offset, pitch = STEMS[stem]
    torch.manual_seed(0)
    model = build().eval()
    explanation = vitreous.explain(model, pictures(224, 224).float()[:1], "ixg")
    assert explanation.geometry is not None
    # Stems with known ends are exact; the hybrid's fields reach over all of the picture, and two pixels of 32 are
    # what its weights make of them.
    tolerance = 2.0 if stem == "hybrid" else 0.0
    assert explanation.geometry.offset == pytest.approx((offset, offset), abs=tolerance)
    assert explanation.geometry.pitch == (pitch, pitch)
    again = vitreous.explain(model, torch.rand(1, 3, 224, 224), "ixg")
    assert again.geometry == explanation.geometry


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm2d, nn.GroupNorm])
def test_the_geometry_does_not_depend_on_the_precision_or_on_the_picture(norm, dtype):
    model = ConvolutionPatches(convolutional_stem(norm)).to(dtype)
    found = vitreous.explain(model, torch.randn(1, 3, 64, 64).to(dtype), "ixg").geometry
    assert found == PatchGeometry((0.5, 0.5), (8.0, 8.0), (64, 64))


@pytest.mark.parametrize("crop", [1, 3, 7, 12, 15])
def test_pictures_that_are_cropped_inside_are_placed_or_refused(crop):
    shifted = First(lambda images: F.pad(images[..., crop:, crop:], (0, crop, 0, crop)))
    model = ConvolutionPatches(nn.Sequential(shifted, nn.Conv2d(3, WIDTH, 16, 16)))
    found = vitreous.explain(model, pictures(64, 64), "ixg").geometry
    assert found == PatchGeometry((8.0 + crop, 8.0 + crop), (16.0, 16.0), (64, 64))
    model = ConvolutionPatches(
        nn.Sequential(First(lambda images: images[..., crop:, crop:]), nn.Conv2d(3, WIDTH, 16, 16))
    )
    try:
        found = vitreous.explain(model, pictures(64 + crop, 64 + crop), "ixg").geometry
    except InputError as error:
        assert "are in no patch" in str(error)  # noqa: PT017
        assert crop > 3
    else:
        assert found == PatchGeometry((8.0 + crop, 8.0 + crop), (16.0, 16.0), (64 + crop, 64 + crop))


def test_patches_that_are_cut_side_by_side_have_no_geometry():
    for model in (ConvolutionPatches(), LinearPatches(squares, 1), small_vit()):
        assert vitreous.explain(model, pictures(32, 32), "ixg").geometry is None


class BrightPatch(nn.Module):
    """A stem whose patches are centred on pixels 8i, and a score that is one patch's brightness."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.inside = ConvolutionPatches(convolutional_stem())
        self.inside.head = nn.Linear(WIDTH, 2).double()
        for part in self.inside.stem.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.constant_(part.weight, 0.1)
                nn.init.zeros_(part.bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.inside.stem(images).flatten(2).mT
        for block in self.inside.blocks:
            tokens = block(tokens)
        return self.inside.head(tokens[:, self.patch])


def test_maps_masks_and_measures_are_where_the_model_sees_them(tmp_path):
    row, column = 3, 5
    model, images = BrightPatch(row * 8 + column), pictures(64, 64)[:1].abs()
    explanation = vitreous.explain(model, images, ["ixg", "occlusion:window=1,by=paint"])
    centre = torch.tensor([row * 8, column * 8])  # the pixel in the middle of the patch's receptive field
    leaf = images.clone().requires_grad_()
    model.inside.stem(leaf)[0, :, row, column].sum().backward()
    seen = leaf.grad.abs().sum(dim=(0, 1)).nonzero()
    assert torch.equal((seen.amin(dim=0) + seen.amax(dim=0)) // 2, centre)
    one = {"ixg": torch.zeros(1, 64, dtype=torch.float64)}
    one["ixg"][0, row * 8 + column] = 1
    alone = Explanation(
        scores=one, grid=(8, 8), target=explanation.target, logits=explanation.logits, image_size=(64, 64),
        signed={"ixg": False}, geometry=explanation.geometry,
    )  # fmt: skip
    for shown in (alone, _saved_and_loaded(alone, tmp_path / "folder")):
        heatmap = shown.heatmap("ixg")[0]
        assert heatmap.argmax() == centre[0] * 64 + centre[1]
        assert heatmap[centre[0] - 8, centre[1]] == heatmap[centre[0], centre[1] + 8] == 0
        sharp = shown.heatmap("ixg", smooth=False)[0].nonzero()
        assert (sharp.amin(dim=0) == centre - 4).all()
        assert (sharp.amax(dim=0) == centre + 3).all()
    runner = ModelRunner(model, images)
    for mode in ("bilinear", "nearest"):
        measured = enlarged(one["ixg"].view(1, 8, 8), runner.size, mode, runner.layout.geometry)[0]
        expected = alone.heatmap("ixg", smooth=mode == "bilinear")[0]
        torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)  # float64
    masked = patch_of_pixel((8, 8), (64, 64), runner.layout.geometry).view(64, 64)
    assert torch.equal(masked == row * 8 + column, alone.heatmap("ixg", smooth=False)[0] > 0)
    # Nothing but the patch's own cell and its neighbours, over which its receptive field reaches, changes the score.
    occluded = explanation.scores["occlusion:window=1,by=paint"][0].view(8, 8)
    assert occluded.abs().argmax() == row * 8 + column


def _saved_and_loaded(explanation: Explanation, folder) -> Explanation:
    return Explanation.load(explanation.save(folder))


class PostNormBlock(nn.Module):
    """norm(x + f(x)), as one writes it oneself."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.to_qkv(tokens).unflatten(-1, (3, 3, WIDTH // 3)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value)
        tokens = self.first(tokens + self.proj(heads.transpose(1, 2).flatten(2)))
        return self.second(tokens + self.mlp(tokens))


@pytest.mark.parametrize("method", ["gradcam", "hirescam", "xgradcam"])
def test_activation_maps_of_a_post_norm_block_are_refused_with_the_reason(method):
    model = ConvolutionPatches()
    model.blocks, model.norm = nn.Sequential(PostNormBlock(), PostNormBlock()), nn.Identity()
    randomise(model.double().eval())
    with pytest.raises(RefusedMethodsError, match="the norms of its blocks stand behind their attention"):
        vitreous.explain(model, pictures(32, 32), method)
    assert vitreous.explain(model, pictures(32, 32), "ixg").scores["ixg"].abs().min() > 0


def test_focalnet_is_read_at_its_last_stage():
    transformers = pytest.importorskip("transformers")
    sizes = {"embed_dim": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1], "focal_levels": [2] * 4}
    config = transformers.FocalNetConfig(image_size=128, num_labels=4, **sizes)
    model = randomise(transformers.FocalNetForImageClassification(config).double().eval())
    images = pictures(128, 128)
    architecture = find_architecture(model, images)
    assert [stage.tokens for stage in architecture.stages] == [1024, 256, 64, 16]
    assert architecture.stage == 3
    assert vitreous.explain(model, images, "ixg").grid == (4, 4)


def test_a_model_costs_two_runs_and_one_of_its_embedding_more_the_first_time():
    sizes: list[tuple[int, bool]] = []
    model = ConvolutionPatches(behind_a(lambda images: images))
    model.stem[0].register_forward_pre_hook(lambda _, given: sizes.append((len(given[0]), False)))
    model.head.register_forward_pre_hook(lambda _, given: sizes.append((len(given[0]), True)))
    vitreous.explain(model, pictures(32, 32), "ixg")
    embedded = [count for count, behind in sizes if not behind]
    assert sorted(embedded) == [2, 2, 2, 14]  # architecture, explanation, blocks; probes
    assert [count for count, behind in sizes if behind] == [2, 2, 2]
    sizes.clear()
    vitreous.explain(model, pictures(32, 32), "ixg")
    assert sizes == [(2, False), (2, True)]
