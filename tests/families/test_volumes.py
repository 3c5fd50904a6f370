"""Volumes and clips: models whose grid of patches has three lengths, written by hand, MONAI's and transformers'."""

from __future__ import annotations

import pytest
import torch
from checks import CLASSES, DEPTH, Family, FamilyChecks, randomised
from hooked import logits_of
from test_plain_encoder import WIDTH, EncoderViT
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import vitreous
from literal.forward import run
from literal.gradtoken import gradtoken
from vitreous.errors import UnsupportedModelError
from vitreous.models import LoadedModel, VolumePreprocessing

VOLUME = {"image": (8, 24, 16), "grid": (2, 3, 4)}  # patches of 4 x 8 x 4 voxels
CLIP = {"image": (6, 16, 16), "grid": (3, 2, 2), "channel_axis": 2}  # tubes of 2 frames and 8 x 8 pixels


class VolumePatches(nn.Module):
    """A convolution over all three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, WIDTH, (4, 8, 4), (4, 8, 4))

    def forward(self, volumes: Tensor) -> Tensor:
        return self.proj(volumes).flatten(2).transpose(1, 2)


class CutPatches(nn.Module):
    """Patches cut out by reshaping and mapped by a linear layer: there is no convolution to see a grid at."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * 4 * 8 * 4, WIDTH)

    def forward(self, volumes: Tensor) -> Tensor:
        batch = len(volumes)
        parts = volumes.reshape(batch, 3, 2, 4, 3, 8, 4, 4).permute(0, 2, 4, 6, 3, 5, 7, 1)
        return self.proj(parts.reshape(batch, 24, -1))


class MonaiClassifier(nn.Module):
    """MONAI's ViT returns its hidden states as well."""

    def __init__(self) -> None:
        super().__init__()
        nets = pytest.importorskip("monai.networks.nets", reason="monai is not installed")
        self.vit = nets.ViT(
            in_channels=3,
            img_size=VOLUME["image"],
            patch_size=(4, 8, 4),
            hidden_size=WIDTH,
            mlp_dim=96,
            num_layers=DEPTH,
            num_heads=4,
            classification=True,
            num_classes=CLASSES,
            post_activation=None,
        )

    def forward(self, volumes: Tensor) -> Tensor:
        return self.vit(volumes)[0]


def video(config_name: str, model_name: str, **options: object):
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = getattr(transformers, config_name)(
            image_size=16,
            num_frames=6,
            hidden_size=WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            intermediate_size=96,
            num_labels=CLASSES,
            **options,
        )
        attention = "eager" if config_name == "TimesformerConfig" else "sdpa"
        return getattr(transformers, model_name)._from_config(config, attn_implementation=attention)

    return build


def own(patches: type[nn.Module], pooling: str):
    return lambda: EncoderViT(patches=patches, pooling=pooling)


FAMILIES = [
    Family("own_volume", own(VolumePatches, "class"), "encoder.layers", **VOLUME),
    Family("own_cut_volume", own(CutPatches, "mean"), "encoder.layers", prefix=0, read="patches", **VOLUME),
    Family("monai", MonaiClassifier, "vit.blocks", **VOLUME),
    Family(
        "videomae",
        video("VideoMAEConfig", "VideoMAEForVideoClassification", patch_size=8, tubelet_size=2),
        "videomae.encoder.layer",
        prefix=0,
        read="patches",
        **CLIP,
    ),
    Family(
        "vivit",
        video("VivitConfig", "VivitForVideoClassification", tubelet_size=[2, 8, 8]),
        "vivit.layers",
        **CLIP,
    ),
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
class TestVolumes(FamilyChecks):
    """Every check of a family of pictures holds for volumes and clips."""

    def test_maps_have_three_axes(self, case: Family) -> None:
        explanation = vitreous.explain(case.model(), case.images(), "gae")
        assert explanation.maps("gae").shape == (2, *case.grid)
        assert torch.equal(explanation.maps("gae").flatten(1), explanation.scores["gae"])
        assert explanation.heatmap("gae").shape == (2, *case.image)

    def test_voxels_agree_with_autograd(self, case: Family) -> None:
        model, images, target = case.model(), case.images().requires_grad_(), case.target()
        logits = logits_of(model(images)).gather(1, target[:, None]).sum()
        (gradient,) = torch.autograd.grad(logits, [images])
        # Voxels, and their sums over patches by a reshape that knows where these are.
        expected = (images * gradient).detach().sum(dim=case.channel_axis)
        depth, rows, columns = case.grid
        high, tall, wide = (length // cells for length, cells in zip(case.image, case.grid, strict=True))
        sums = expected.reshape(2, depth, high, rows, tall, columns, wide).sum(dim=(2, 4, 6))
        one = "integrated_gradients:steps=1,quadrature=right"  # the gradient at the input itself
        found = vitreous.explain(model, images.detach(), [one, f"{one},resolution=pixel"], target)
        torch.testing.assert_close(found.maps(f"{one},resolution=pixel"), expected, **case.agrees)
        torch.testing.assert_close(found.maps(one), sums, **case.agrees)

    def test_painted_patches_are_painted_voxels(self, case: Family) -> None:
        model, images, target = case.model(), case.images(), case.target()
        scores = vitreous.explain(model, images, "occlusion:of=logit", target).maps("occlusion:of=logit")
        whole = logits_of(model(images)).gather(1, target[:, None])[:, 0].detach()
        place = tuple(cells // 2 for cells in case.grid)
        sides = [length // cells for length, cells in zip(case.image, case.grid, strict=True)]
        block = tuple(slice(at * side, (at + 1) * side) for at, side in zip(place, sides, strict=True))
        painted = images.movedim(case.channel_axis, 1).clone()
        painted[(slice(None), slice(None), *block)] = 0
        without = logits_of(model(painted.movedim(1, case.channel_axis))).gather(1, target[:, None])[:, 0].detach()
        torch.testing.assert_close(scores[(slice(None), *place)], whole - without, **case.agrees)


class PlantedVolume(nn.Module):
    """Logit 1 is the mean of one block of voxels times 5, read from its token through one attention block."""

    def __init__(self, grid: tuple[int, int, int], place: tuple[int, int, int]) -> None:
        super().__init__()
        count, width = grid[0] * grid[1] * grid[2], 8
        self.embed = nn.Conv3d(1, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, count, width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, 2)
        chosen = (place[0] * grid[1] + place[1]) * grid[2] + place[2]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            self.embed.weight[0] = 1 / 64  # channel 0: the mean of the patch
            self.position[0, chosen, 1] = 1  # channel 1: whether it is the chosen one
            self.query.weight[0] = 0
            self.key.weight[0, 1] = 1  # keys are long for it alone
            self.position[0, :, 2] = 1
            self.query.weight[0, 2] = 80  # and every query asks for that: attention is one-hot up to e^-28
            self.value.weight[3, 0] = 1  # its mean goes to channel 3 of all tokens
            self.head.weight[1, 3] = 5

    def forward(self, volumes: Tensor) -> Tensor:
        tokens = self.embed(volumes).flatten(2).transpose(1, 2) + self.position
        query, key, value = (part(tokens)[:, None] for part in (self.query, self.key, self.value))
        tokens = tokens + nn.functional.scaled_dot_product_attention(query, key, value)[:, 0]
        return self.head(tokens.mean(dim=1))


@pytest.mark.parametrize("place", [(0, 1, 3), (1, 2, 0)])
def test_a_planted_block_of_voxels_has_the_maximum(place: tuple[int, int, int]) -> None:
    grid = (2, 3, 4)
    model = PlantedVolume(grid, place).double().eval()
    volumes = 1 + torch.rand(2, 1, 8, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = tuple(slice(4 * at, 4 * at + 4) for at in place)
    expected = 5 * volumes[(slice(None), 0, *block)].mean(dim=(1, 2, 3))
    methods = ["ixg", "gae", "rollout", "decompx", "occlusion:of=logit", "integrated_gradients:steps=2"]
    found = vitreous.explain(model, volumes, methods, target=1)
    torch.testing.assert_close(found.logits[:, 1], expected, rtol=1e-8, atol=0)  # e^-28 of other tokens
    for method in methods:
        maps = found.maps(method)
        assert all(torch.unravel_index(each.argmax(), grid) == place for each in maps), method
        heatmap = found.heatmap(method, smooth=False)[(0, *block)]
        assert bool((heatmap == 1).all()), method
    # The logit is linear in the block, so that these are it exactly.
    for method in ("occlusion:of=logit", "integrated_gradients:steps=2"):
        torch.testing.assert_close(found.maps(method)[(slice(None), *place)], expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("frames_first", [False, True])
def test_as_many_frames_as_channels_are_told_apart(frames_first: bool) -> None:  # noqa: FBT001
    """Three frames of three channels: only how many tokens change with a slice says which axis is which."""

    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit_3d(3, 3)

        def forward(self, clips: Tensor) -> Tensor:
            return self.vit(clips.transpose(1, 2) if frames_first else clips)

    model = randomised(Clips())
    clips = torch.randn(1, 3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = vitreous.explain(model, clips, "occlusion:of=logit", target=0)
    assert found.grid == (3, 2, 2)
    clips_painted = clips.clone()
    clips_painted[(slice(None), 1) if frames_first else (slice(None), slice(None), 1)] *= torch.where(
        torch.arange(16)[:, None] // 8 * 2 + torch.arange(16) // 8 == 3, 0.0, 1.0
    )  # frame 1, lower right
    expected = (model(clips) - model(clips_painted))[0, 0].detach()
    torch.testing.assert_close(found.maps("occlusion:of=logit")[0, 1, 1, 1], expected, rtol=1e-9, atol=1e-12)


def test_a_tube_of_all_frames_has_its_channels_by_their_number() -> None:
    model = randomised(vit_3d(4, 4))
    clips = torch.randn(1, 3, 4, 16, 16, dtype=torch.float64)
    found = vitreous.explain(model, clips, "gae")
    assert (found.grid, found.image_size) == ((1, 2, 2), (4, 16, 16))


def vit_3d(frames: int, tube: int) -> nn.Module:
    package = pytest.importorskip("vit_pytorch.vit_3d", reason="vit-pytorch is not installed")
    tube = 1 if tube == frames == 3 else tube
    return package.ViT(
        image_size=16, image_patch_size=8, frames=frames, frame_patch_size=tube, num_classes=CLASSES, channels=3,
        dim=16, depth=2, heads=2, mlp_dim=16,
    )  # fmt: skip


def test_every_method_works_on_volumes_or_says_why_not() -> None:
    case = FAMILIES[0]
    found = vitreous.supported(case.model(), case.images()[:1])
    assert set(found.refused) == {"dave"}
    assert "volumes or clips" in found.refused["dave"]


def test_factorised_attention_is_refused() -> None:
    package = pytest.importorskip("vit_pytorch.vivit", reason="vit-pytorch is not installed")
    options = {
        "image_size": 16, "image_patch_size": 8, "frames": 6, "frame_patch_size": 2, "num_classes": CLASSES,
        "dim": 16, "spatial_depth": 2, "temporal_depth": 2, "heads": 2, "mlp_dim": 16, "channels": 3,
    }  # fmt: skip
    clips = torch.randn(2, 3, 6, 16, 16)
    attention = package.ViViT(**options, variant="factorized_self_attention").eval()
    with pytest.raises(UnsupportedModelError, match="slices or frames are run apart"):
        vitreous.explain(attention, clips, "gae")


def test_attention_in_turn_is_refused_in_words_about_clips() -> None:
    build = video("TimesformerConfig", "TimesformerForVideoClassification", patch_size=8)
    with pytest.raises(UnsupportedModelError, match="does not show a grid of depth, rows and columns"):
        vitreous.explain(randomised(build()), torch.randn(1, 6, 3, 16, 16, dtype=torch.float64), "gae")


def swin_3d() -> tuple[nn.Module, Tensor]:
    """Windows of 2 x 2 x 2 patches in two stages, of which the second has 2 x 4 x 4 patches."""
    package = pytest.importorskip("torchvision.models.video.swin_transformer", reason="torchvision is not installed")
    model = package.SwinTransformer3d(
        patch_size=[2, 4, 4], embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=[2, 2, 2], num_classes=CLASSES
    )
    return randomised(model), torch.randn(2, 3, 4, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize(("stage", "block", "grid"), [(-1, "features.2.1", (2, 4, 4)), (0, "features.0.1", (2, 8, 8))])
def test_windows_of_tubes_are_served_by_what_needs_no_global_attention(stage, block, grid) -> None:
    model, clips = swin_3d()
    kept: list[Tensor] = []
    handle = model.get_submodule(block).register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    logits = model(clips)[:, 1].sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(logits, kept[-1])
    loaded = LoadedModel("swin", model, VolumePreprocessing((32, 32), (0.0,) * 3, (1.0,) * 3), None, stage=stage)
    last = f"ixg:layer={1 if stage == 0 else -1}"
    methods = [last, "integrated_gradients:steps=1,quadrature=right,resolution=pixel", "occlusion:of=logit"]
    found = vitreous.explain(loaded, clips, methods, target=1)
    assert found.grid == grid
    # (batch, depth, rows, columns, channels) as the model has it: float64 sums of eight or sixteen products.
    torch.testing.assert_close(found.maps(last), (kept[-1] * gradient).detach().sum(-1), rtol=1e-9, atol=1e-12)
    with pytest.raises(UnsupportedModelError, match="it is windowed"):
        vitreous.explain(loaded, clips, "gae", target=1)


def test_a_voxel_of_a_windowed_model_changes_its_patch() -> None:
    """Tokens stand where their voxels are, though blocks have them window by window."""
    model, clips = swin_3d()
    place = (1, 2, 3)  # of 2 x 4 x 4
    changed = clips[:1].clone()
    changed[:, :, 2:4, 16:24, 24:32] = 0
    expected = (model(clips[:1]) - model(changed))[0, 1].detach()
    found = vitreous.explain(model, clips[:1], "occlusion:of=logit", target=1).maps("occlusion:of=logit")
    torch.testing.assert_close(found[(0, *place)], expected, rtol=1e-9, atol=1e-12)


class TimmVolume(nn.Module):
    """A timm ViT whose patches are blocks of voxels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, volumes: Tensor) -> Tensor:
        return self.model(as_picture(volumes))


def as_picture(volumes: Tensor) -> Tensor:
    """Volumes of 2 x 3 x 4 blocks of 2 x 2 x 4 voxels as pictures of 6 x 4 patches of 4 x 4 pixels, in this order."""
    blocks = volumes.reshape(-1, 3, 2, 2, 3, 2, 4, 4).permute(0, 1, 2, 4, 3, 5, 6, 7)
    return blocks.reshape(-1, 3, 24, 16)


def test_maps_of_tokens_are_those_of_the_same_tokens_in_a_picture() -> None:
    """GradToken written out step by step, and all three against the 2-D model that has the same tokens."""
    torch.manual_seed(0)
    plain = VisionTransformer(
        img_size=(24, 16), patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=CLASSES, class_token=True
    )
    plain = randomised(plain)
    volumes = torch.randn(2, 3, 4, 6, 16, dtype=torch.float64)
    methods = ["gradtoken", "decompx.skipplus", "twoscale"]
    found = vitreous.explain(TimmVolume(plain), volumes, methods, target=1)
    assert found.grid == (2, 3, 4)
    pictures = as_picture(volumes)
    expected = vitreous.explain(plain, pictures, methods, target=1)
    for method in methods:
        torch.testing.assert_close(found.scores[method], expected.scores[method], rtol=1e-8, atol=1e-11)
    for number, picture in enumerate(pictures):
        literal = gradtoken(run(plain, picture), 1).detach()
        torch.testing.assert_close(found.scores["gradtoken"][number], literal, rtol=1e-8, atol=1e-11)
