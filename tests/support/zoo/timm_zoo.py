"""One small model of every transformer-like family of timm, and of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import timm
from timm.layers import GatedMlp
from timm.models import focalnet, gcvit, metaformer, mlp_mixer, nest, volo
from timm.models.mlp_mixer import Affine
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import nn
from torchvision.models import maxvit, swin_transformer, vision_transformer

from zoo.entry import CLASSES, Entry

_PLAIN_SIZE = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
_FOUR = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32)}
_TWO = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}


def _timm(name: str, **options: object) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, num_classes=CLASSES, **options)


def _plain(name: str, **options: object) -> Callable[[], nn.Module]:
    return _timm(name, **{**_PLAIN_SIZE, **options})


_MIXER = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 24, "num_classes": CLASSES}
_PLAIN = {
    "vit": _plain("vit_base_patch16_224"),
    "vit_registers": _plain("vit_base_patch16_224", reg_tokens=4, global_pool="avg"),
    "vit_clip": _plain("vit_base_patch32_clip_quickgelu_224"),
    "vit_siglip": _plain("vit_base_patch16_siglip_224"),
    "vit_dinov2": _plain("vit_small_patch14_dinov2"),
    "vit_dinov3": _plain("vit_small_patch16_dinov3", num_heads=2),
    "vit_relpos": _plain("vit_relpos_base_patch16_224"),
    "vit_parallel": _plain("vit_small_patch16_18x2_224"),
    "vit_xsmall_parallel_things": _plain("vit_base_patch16_xp_224"),
    "vit_hybrid_r26": _timm("vit_tiny_r_s16_p8_224", img_size=64, embed_dim=24, depth=2, num_heads=3),
    "vit_sam": _plain("samvit_base_patch16", window_size=0, global_attn_indexes=(0, 1), use_rel_pos=False),
    "deit": _plain("deit_tiny_patch16_224"),
    "deit_distilled": _plain("deit_tiny_distilled_patch16_224"),
    "deit3": _plain("deit3_small_patch16_224"),
    "eva02": _plain("eva02_base_patch14_224", num_heads=2),
    "beit": _plain("beit_base_patch16_224"),
    "cait": _plain("cait_xxs24_224"),
    "xcit": _plain("xcit_nano_12_p8_224"),
    "convit": _plain("convit_tiny", embed_dim=8, local_up_to_layer=1),
    "naflexvit": _plain("naflexvit_base_patch16_gap"),
    "tnt": _timm("tnt_s_patch16_224", img_size=32, embed_dim=24, depth=2),
    "vitamin": _timm("vitamin_small_224", img_size=64, depth=2),
    "qwen3_vit": _plain("qwen3_vit_88m"),
    "deepseek_vit": _plain("deepseek_vit_412m"),
    "mixer": partial(mlp_mixer.MlpMixer, **_MIXER),
    "resmlp": partial(mlp_mixer.MlpMixer, block_layer=mlp_mixer.ResBlock, norm_layer=Affine, mlp_ratio=4, **_MIXER),
    "gmlp": partial(
        mlp_mixer.MlpMixer, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=GatedMlp, mlp_ratio=4, **_MIXER
    ),
}
_LARGER = ("vit_hybrid_r26", "vitamin")
_NO_ATTENTION = ("mixer", "resmlp", "gmlp")
_MAXVIT = {"embed_dim": (16, 16), "depths": (1, 1), "stem_width": 8, "transformer_dim_head": 8}
_WINDOWS = {"block_type": ("M", "M"), "transformer_window_size": (4, 4)}
_COAT = {"img_size": 64, "serial_depths": (1, 1, 1, 1), "num_heads": 8}
_METAFORMER = {"depths": (1, 1, 1, 1), "num_classes": CLASSES}
_HIERARCHICAL = {
    "swin": _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, **_TWO),
    "swinv2": _timm("swinv2_tiny_window8_256", img_size=64, window_size=4, **_TWO),
    "swinv2_cr": _timm("swinv2_cr_tiny_224", img_size=64, window_size=4, **_TWO),
    "pvt_v2": _timm("pvt_v2_b0", num_heads=(1, 2, 3, 4), **_FOUR),
    "maxvit": _timm("maxvit_tiny_rw_224", img_size=64, **_MAXVIT, **_WINDOWS),
    "maxvit_tf": _timm("maxvit_tiny_tf_224", img_size=64, **_MAXVIT, **_WINDOWS),
    "coatnet": _timm("coatnet_0_rw_224", img_size=64, block_type=("C", "T"), **_MAXVIT),
    "coatnext": _timm("coatnext_nano_rw_224", img_size=64, block_type=("C", "T"), **_MAXVIT),
    "hiera": _timm("hiera_tiny_224", img_size=64, embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)),
    "mvitv2": lambda: MultiScaleVit(
        MultiScaleVitCfg(depths=(1, 1), embed_dim=(16, 32), num_heads=(1, 2)), img_size=64, num_classes=CLASSES
    ),
    "poolformer": partial(metaformer.MetaFormer, dims=(8, 16, 24, 32), **_METAFORMER),
    "caformer": partial(
        metaformer.MetaFormer, dims=(32, 32, 32, 32), **_METAFORMER,
        norm_layers=[metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
        token_mixers=[metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention],
    ),
    "tiny_vit": _timm("tiny_vit_5m_224", num_heads=(2, 2, 4, 4), window_sizes=(4, 4, 4, 2), **_FOUR),
    "efficientformer": _timm("efficientformer_l1", depths=(1, 1, 1, 2), embed_dims=(8, 16, 24, 32), num_vit=1),
    "efficientformerv2": _timm(
        "efficientformerv2_s0", img_size=64, depths=(1, 1, 1, 2), embed_dims=(8, 16, 24, 32), num_vit=1,
        mlp_ratios=((4,), (4,), (4,), (4, 4)),
    ),
    "focalnet": partial(focalnet.FocalNet, embed_dim=8, depths=(1, 1, 1, 1), num_classes=CLASSES),
    "levit": _timm("levit_128s", img_size=64, embed_dim=(16, 24, 32), key_dim=8, depth=(1, 1, 1), num_heads=(2, 3, 4)),
    "twins_pcpvt": _timm("twins_pcpvt_small", img_size=64, num_heads=(1, 2, 3, 4), **_FOUR),
    "twins_svt": _timm("twins_svt_small", img_size=64, num_heads=(1, 2, 3, 4), **_FOUR),
    "pit": _timm("pit_ti_224", img_size=64, patch_size=16, stride=8, base_dims=(16, 16), depth=(1, 1), heads=(1, 2)),
    "nest": partial(
        nest.Nest, img_size=32, embed_dims=(8, 16, 32), num_heads=(1, 2, 4), depths=(1, 1, 1), num_classes=CLASSES
    ),
    "crossvit": _timm(
        "crossvit_tiny_240", img_size=48, img_scale=(1.0, 1.0), patch_size=(8, 16), embed_dim=(16, 32),
        depth=((1, 1, 0),), num_heads=(2, 2), mlp_ratio=(2.0, 2.0, 1.0),
    ),
    "coat_lite": _timm("coat_lite_tiny", embed_dims=(8, 16, 24, 32), **_COAT),
    "coat": _timm("coat_tiny", embed_dims=(16, 16, 16, 16), **_COAT),
    "mobilevit": _timm("mobilevit_xxs"),
    "mobilevitv2": _timm("mobilevitv2_050"),
    "davit": _timm("davit_tiny", num_heads=(1, 2, 3, 4), **_FOUR),
    "gcvit": partial(
        gcvit.GlobalContextVit, img_size=64, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4),
        window_size=(4, 4, 4, 2), num_classes=CLASSES,
    ),
    "edgenext": _timm("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2)),
    "volo": partial(
        volo.VOLO, layers=(1, 1, 1, 1), img_size=64, embed_dims=(24, 24, 24, 24), num_heads=(2, 2, 2, 2),
        num_classes=CLASSES,
    ),
    "visformer": _timm("visformer_tiny", img_size=64, init_channels=8, embed_dim=32, depth=(1, 1, 1), num_heads=2),
    "sequencer": _timm("sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(16,) * 4, hidden_sizes=(4,) * 4),
    "fastvit": _timm("fastvit_t8"),
    "efficientvit_mit": _timm("efficientvit_b0"),
    "efficientvit_msra": _timm(
        "efficientvit_m0", img_size=64, embed_dim=(16, 32, 48), num_heads=(2, 2, 2), depth=(1, 1, 1),
        window_size=(4, 4, 4),
    ),
    "iformer": _timm("iformer_s"),
    "shvit": _timm("shvit_s1"),
    "cpubone": _timm("cpubone_nano"),
    "csatv2": _timm("csatv2", img_size=64),
    "repvit": _timm("repvit_m0_9"),
    "efficientvim": _timm("efficientvim_m1"),
    "botnet": _timm("eca_botnext26ts_256", img_size=64),
    "mambaout": _timm("mambaout_femto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "convnext": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "swiftformer": _timm("swiftformer_xs", layers=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32)),
}  # fmt: skip
_HIERARCHICAL_SIZE = {"nest": 32, "crossvit": 48, "efficientformer": 224, "tiny_vit": 224, "sequencer": 224}

_TV = {"num_classes": CLASSES}
_TORCHVISION = [
    Entry(
        "torchvision/VisionTransformer",
        partial(
            vision_transformer.VisionTransformer, image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24,
            mlp_dim=32, **_TV,
        ),
    ),
    Entry(
        "torchvision/SwinTransformer",
        partial(
            swin_transformer.SwinTransformer, patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=[4, 4], **_TV,
        ),
        (64, 64),
        kind="hierarchical",
    ),
    Entry(
        "torchvision/SwinTransformer, v2",
        partial(
            swin_transformer.SwinTransformer, patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=[4, 4], block=swin_transformer.SwinTransformerBlockV2,
            downsample_layer=swin_transformer.PatchMergingV2, **_TV,
        ),
        (64, 64),
        kind="hierarchical",
    ),
    Entry(
        "torchvision/MaxVit",
        partial(
            maxvit.MaxVit, input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[8, 16],
            block_layers=[1, 1], head_dim=4, stochastic_depth_prob=0.0, **_TV,
        ),
        (64, 64),
        kind="hierarchical",
    ),
]  # fmt: skip


def _square(side: int) -> tuple[int, int]:
    return side, side


TIMM = [
    *(
        Entry(
            f"timm/{name}", construct, _square(64 if name in _LARGER else 32),
            kind="other" if name in _NO_ATTENTION else "plain",
        )
        for name, construct in _PLAIN.items()
    ),
    *(
        Entry(f"timm/{name}", construct, _square(_HIERARCHICAL_SIZE.get(name, 64)), kind="hierarchical")
        for name, construct in _HIERARCHICAL.items()
    ),
    *_TORCHVISION,
]  # fmt: skip
