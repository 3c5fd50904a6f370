"""Volumes and clips: models whose patches stand in a grid of three lengths, written by hand, MONAI's and transformers'."""

from __future__ import annotations

import pytest
import torch
from checks import CLASSES, DEPTH, Family, FamilyChecks
from test_plain_encoder import WIDTH, EncoderViT
from torch import Tensor, nn

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
        return getattr(transformers, model_name)._from_config(config, attn_implementation="sdpa")

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

    def test_the_map_has_three_axes(self, case: Family) -> None:
        import vitreous

        explanation = vitreous.explain(case.model(), case.images(), "gae")
        assert explanation.maps("gae").shape == (2, *case.grid)
        assert torch.equal(explanation.maps("gae").flatten(1), explanation.scores["gae"])
        assert explanation.heatmap("gae").shape == (2, *case.image)
