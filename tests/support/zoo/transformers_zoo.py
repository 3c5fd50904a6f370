"""transformers' models of pictures, from small configurations."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from torch import nn

from zoo.entry import CLASSES, Entry

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
_VIT = {**_SIZES, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}


def _hf(name: str, task: str = "ForImageClassification", **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        return getattr(transformers, f"{name}{task}")(config)

    return build


def _vit(name: str, task: str = "ForImageClassification", **options: object) -> Callable[[], nn.Module]:
    return _hf(name, task, **{**_VIT, **options})


def _eager(name: str, **options: object) -> Callable[[], nn.Module]:
    return _vit(name, attn_implementation="eager", **options)


def _tower(name: str, task: str = "ForImageClassification", **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        vision = {key: value for key, value in _VIT.items() if key != "num_labels"}
        text = {**_SIZES, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1}
        config = getattr(transformers, f"{name}Config")(
            vision_config={**vision, **options}, text_config=text, num_labels=CLASSES
        )
        return getattr(transformers, f"{name}{task}")(config)

    return build


_PLAIN = {
    "ViT": _vit("ViT"),
    "ViT, eager": _eager("ViT"),
    "DeiT": _vit("DeiT"),
    "DeiT, with teacher": _vit("DeiT", "ForImageClassificationWithTeacher"),
    "Beit": _vit("Beit", use_relative_position_bias=True, layer_scale_init_value=0.1),
    "Data2VecVision": _vit("Data2VecVision", use_relative_position_bias=True),
    "Dinov2": _vit("Dinov2"),
    "Dinov2WithRegisters": _vit("Dinov2WithRegisters"),
    "DINOv3ViT": _vit("DINOv3ViT", "Model", num_attention_heads=2),
    "IJepa": _vit("IJepa"),
    "ViTMSN": _vit("ViTMSN"),
    "ViTMAE": _vit("ViTMAE", "Model", mask_ratio=0.0),
    "VitDet": _vit("VitDet", "Model", window_size=0),
    "CLIP": _tower("CLIP"),
    "CLIPVisionModelWithProjection": _vit("CLIPVision", "ModelWithProjection", projection_dim=CLASSES),
    "MetaClip2": _tower("MetaClip2"),
    "Siglip": _tower("Siglip"),
    "Siglip2": _tower("Siglip2", num_patches=16),
    "Yolos": _vit("Yolos", "Model", image_size=(32, 32), num_detection_tokens=3),
    "CLIP, both towers": _tower("CLIP", "Model"),
}
# Class scores, and texts as a second input: none of these can be called with pictures alone.
_OTHER = ("ViTMAE", "VitDet", "Yolos", "CLIP, both towers", "Siglip2")
_TWO = {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_FOUR = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
_HIERARCHICAL = {
    "Swin": (_hf("Swin", image_size=32, patch_size=2, num_labels=CLASSES, **_TWO), 32),
    "Swinv2": (_hf("Swinv2", image_size=32, patch_size=2, num_labels=CLASSES, **_TWO), 32),
    "Pvt": (
        _hf("Pvt", image_size=64, num_labels=CLASSES, num_attention_heads=[1, 2, 3, 4], **_FOUR),
        64,
    ),
    "PvtV2": (
        _hf("PvtV2", image_size=64, num_labels=CLASSES, num_attention_heads=[1, 2, 3, 4], **_FOUR),
        64,
    ),
    "Cvt": (_hf("Cvt", num_labels=CLASSES, embed_dim=[8, 12, 16], num_heads=[1, 2, 2], depth=[1, 2, 3]), 64),
    "FocalNet": (
        _hf(
            "FocalNet", image_size=32, num_labels=CLASSES, embed_dim=8, hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
        ),
        32,
    ),
    "PoolFormer": (_hf("PoolFormer", num_labels=CLASSES, **_FOUR), 64),
    "Hiera": (
        _hf("Hiera", image_size=[64, 64], num_labels=CLASSES, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8]),
        64,
    ),
    "Levit": (
        _hf(
            "Levit", image_size=64, num_labels=CLASSES, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4],
            depths=[1, 1, 1], key_dim=[8, 8, 8],
        ),
        64,
    ),
    "MobileViT": (
        _hf(
            "MobileViT", image_size=64, num_labels=CLASSES, hidden_sizes=[16, 24, 32], num_attention_heads=2,
            neck_hidden_sizes=[8, 8, 12, 16, 16, 24, 32],
        ),
        64,
    ),
    "MobileViTV2": (_hf("MobileViTV2", image_size=64, num_labels=CLASSES, width_multiplier=0.25), 64),
    "Segformer": (
        _hf("Segformer", num_labels=CLASSES, num_attention_heads=[1, 2, 3, 4], **_FOUR),
        64,
    ),
    "SwiftFormer": (
        _hf("SwiftFormer", num_labels=CLASSES, depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32]),
        64,
    ),
    "DonutSwin": (_hf("DonutSwin", image_size=32, patch_size=2, num_labels=CLASSES, **_TWO), 32),
    "Perceiver": (
        _hf(
            "Perceiver", "ForImageClassificationConvProcessing", num_labels=CLASSES, num_latents=8, d_latents=24,
            num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
        ),
        224,
    ),
    "ConvNext": (_hf("ConvNext", num_labels=CLASSES, **_FOUR), 64),
    "ConvNextV2": (_hf("ConvNextV2", num_labels=CLASSES, **_FOUR), 64),
}  # fmt: skip

TRANSFORMERS = [
    *(
        Entry(f"transformers/{name}", construct, kind="other" if name in _OTHER else "plain")
        for name, construct in _PLAIN.items()
    ),
    *(
        Entry(f"transformers/{name}", construct, (size, size), kind="hierarchical")
        for name, (construct, size) in _HIERARCHICAL.items()
    ),
]
