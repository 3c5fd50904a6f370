"""torchvision's VisionTransformer, small."""

from __future__ import annotations

from functools import partial

import pytest
from checks import CLASSES, DEPTH, Family, FamilyChecks

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")

from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer  # noqa: E402

SMALL = {"num_layers": DEPTH, "num_heads": 4, "hidden_dim": 48, "mlp_dim": 96, "num_classes": CLASSES}
STEM = [
    ConvStemConfig(out_channels=16, kernel_size=3, stride=4),
    ConvStemConfig(out_channels=24, kernel_size=3, stride=2),
]

FAMILIES = [
    Family(
        name,
        partial(VisionTransformer, image_size=32, patch_size=8, **SMALL, **options),
        "encoder.layers",
        (32, 32),
        (4, 4),
    )
    for name, options in {
        "vit": {},
        "vit_with_dropout": {"dropout": 0.5, "attention_dropout": 0.5},
        "vit_representation_layer": {"representation_size": 32},
        "vit_convolution_stem": {"conv_stem_configs": STEM},
    }.items()
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
class TestTorchvision(FamilyChecks):
    pass
