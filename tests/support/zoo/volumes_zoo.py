"""3-D models: volumes of MONAI and vit-pytorch, clips of transformers and torchvision.

Clips of transformers have their frames first: these are the ``channels`` of an entry, and its size begins with the
three colours. Not among the entries of pictures; the sweep takes them as a group of their own.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import CLASSES, Entry

_SMALL = {"dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "num_classes": CLASSES, "channels": 3}
_TUBES = {"image_size": 16, "image_patch_size": 8, "frames": 8, "frame_patch_size": 2}
_FACTORISED = {**{key: value for key, value in _SMALL.items() if key != "depth"}, "spatial_depth": 2}


class FirstOutput(nn.Module):
    """MONAI's ViT returns its hidden states as well."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, volumes: Tensor) -> Any:
        return self.model(volumes)[0]


def _monai(position: str) -> nn.Module:
    nets = import_module("monai.networks.nets")
    model = nets.ViT(
        in_channels=1, img_size=(8, 16, 16), patch_size=(4, 8, 8), hidden_size=24, mlp_dim=32, num_layers=2,
        num_heads=2, classification=True, num_classes=CLASSES, post_activation=None, pos_embed_type=position,
    )  # fmt: skip
    return FirstOutput(model)


def _vit_pytorch(module: str, name: str, **options: object) -> nn.Module:
    return getattr(import_module(f"vit_pytorch.{module}"), name)(**options)


def _video(name: str, **options: object) -> nn.Module:
    transformers = import_module("transformers")
    config = getattr(transformers, f"{name}Config")(
        image_size=16, num_frames=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_labels=CLASSES, **options,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForVideoClassification")(config)


def _swin_3d() -> nn.Module:
    package = import_module("torchvision.models.video.swin_transformer")
    return package.SwinTransformer3d(
        patch_size=[2, 4, 4], embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=[2, 2, 2], num_classes=CLASSES
    )


_CLIP: dict[str, Any] = {"channels": 8, "size": (3, 16, 16)}  # eight frames
_VOLUME: dict[str, Any] = {"size": (8, 16, 16)}

VOLUMES = [
    Entry("volumes/monai ViT", partial(_monai, "learnable"), channels=1, **_VOLUME),
    Entry("volumes/monai ViT, sincos", partial(_monai, "sincos"), channels=1, **_VOLUME),
    Entry("volumes/vit_pytorch vit_3d.ViT", partial(_vit_pytorch, "vit_3d", "ViT", **_SMALL, **_TUBES), **_VOLUME),
    Entry(
        "volumes/vit_pytorch simple_vit_3d.SimpleViT",
        partial(_vit_pytorch, "simple_vit_3d", "SimpleViT", **_SMALL, **_TUBES),
        **_VOLUME,
    ),
    *(
        Entry(
            f"volumes/vit_pytorch vivit.ViViT, {variant}",
            partial(_vit_pytorch, "vivit", "ViViT", **_FACTORISED, **_TUBES, temporal_depth=2, variant=variant),
            kind="hierarchical",
            **_VOLUME,
        )
        for variant in ("factorized_encoder", "factorized_self_attention")
    ),
    Entry("volumes/transformers VideoMAE", partial(_video, "VideoMAE", patch_size=8, tubelet_size=2), **_CLIP),
    Entry("volumes/transformers ViViT", partial(_video, "Vivit", tubelet_size=[2, 8, 8]), **_CLIP),
    Entry(
        "volumes/transformers TimeSformer", partial(_video, "Timesformer", patch_size=8), kind="hierarchical", **_CLIP
    ),
    Entry("volumes/torchvision Swin 3-D", _swin_3d, size=(4, 32, 32), kind="hierarchical", dtype=torch.float64),
]
