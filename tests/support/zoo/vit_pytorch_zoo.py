"""Every model of vit-pytorch that takes one picture and gives class scores.

Left out, for they fail by themselves in this version: LocalViT, the distillable T2T-ViT and efficient ViT, and the
unfused form of simple_flash_attn_vit.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import nn

from zoo.entry import CLASSES, Entry

_SIZE = {"dim": 24, "depth": 2, "heads": 3, "mlp_dim": 32, "dim_head": 8}
_VIT = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, **_SIZE}
_FOUR = {"dim": (8, 12, 16, 20), "depth": (1, 1, 1, 1), "num_classes": CLASSES}


def _of(file: str, name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(f"vit_pytorch.{file}"), name)(**options)


def _vit(file: str, name: str = "ViT", *, without: tuple[str, ...] = (), **options: object) -> Callable[[], nn.Module]:
    """A model with the usual options."""
    return _of(file, name, **{key: value for key, value in {**_VIT, **options}.items() if key not in without})


def _inner() -> nn.Module:
    """A transformer of another package, as the classes take that are given one."""
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _given_transformer(file: str, name: str, **options: object) -> Callable[[], nn.Module]:
    """A model around the transformer above."""

    def build() -> nn.Module:
        settings = {"image_size": 32, "num_classes": CLASSES, "dim": 24, "transformer": _inner()}
        return getattr(import_module(f"vit_pytorch.{file}"), name)(**settings, **options)

    return build


def _given_own_transformer() -> nn.Module:
    inner = import_module("vit_pytorch.vit").Transformer(24, 2, 3, 8, 32)
    settings = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, "dim": 24}
    return import_module("vit_pytorch.efficient").ViT(transformer=inner, **settings)


def _adapter() -> nn.Module:
    memory = import_module("vit_pytorch.learnable_memory_vit")
    return memory.Adapter(vit=memory.ViT(**_VIT), num_classes=CLASSES, num_memories_per_layer=3)


_ND = {"ndim": 2, "input_shape": 32}
_T2T = {"t2t_layers": ((3, 2), (3, 2))}
_CCT = {"num_classes": CLASSES, "embedding_dim": 24, "num_layers": 2, "num_heads": 3, "mlp_ratio": 2.0}
_LOOPED = {"pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1, "loop_depth": 2}

_PLAIN = {
    "vit.ViT": _vit("vit"),
    "vit.ViT, mean": _vit("vit", pool="mean"),
    "simple_vit.SimpleViT": _vit("simple_vit", "SimpleViT"),
    "simple_flash_attn_vit.SimpleViT": _vit("simple_flash_attn_vit", "SimpleViT"),
    "simple_vit_with_qk_norm.SimpleViT": _vit("simple_vit_with_qk_norm", "SimpleViT"),
    "simple_vit_with_register_tokens.SimpleViT": _vit("simple_vit_with_register_tokens", "SimpleViT"),
    "simple_vit_with_patch_dropout.SimpleViT": _vit("simple_vit_with_patch_dropout", "SimpleViT"),
    "simple_vit_with_fft.SimpleViT": _vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=8),
    "simple_vit_with_value_residual.SimpleViT": _vit("simple_vit_with_value_residual", "SimpleViT"),
    "simple_vit_with_hyper_connections.SimpleViT": _vit(
        "simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=2
    ),
    "simple_vit_with_relative_proj_pos_bias.SimpleViT": _vit("simple_vit_with_relative_proj_pos_bias", "SimpleViT"),
    "simple_vit_with_sparse_gating.SimpleViT": _vit("simple_vit_with_sparse_gating", "SimpleViTWithSparseGating"),
    "simple_vit_with_specialized_cls.SimpleViT": _vit("simple_vit_with_specialized_cls", "SimpleViT"),
    "simple_vit_attn_residual.SimpleViT": _vit("simple_vit_attn_residual", "SimpleViTAttnResidual"),
    "simple_vit_orthog_residual_update.SimpleViT": _vit("simple_vit_orthog_residual_update", "SimpleViT"),
    "attn_residual_with_dca_simple_vit.SimpleViT": _vit("attn_residual_with_dca_simple_vit", "SimpleViT"),
    "simple_uvit.SimpleUViT": _vit("simple_uvit", "SimpleUViT"),
    "deepvit.DeepViT": _vit("deepvit", "DeepViT"),
    "cait.CaiT": _vit("cait", "CaiT", cls_depth=2),
    "distill.DistillableViT": _vit("distill", "DistillableViT"),
    "efficient.ViT": _given_transformer("efficient", "ViT", patch_size=8),
    "efficient.ViT, own transformer": _given_own_transformer,
    "t2t.T2TViT": _vit("t2t", "T2TViT", without=("patch_size",), **_T2T),
    "parallel_vit.ViT": _vit("parallel_vit"),
    "learnable_memory_vit.ViT": _vit("learnable_memory_vit"),
    "learnable_memory_vit.Adapter": _adapter,
    "vit_for_small_dataset.ViT": _vit("vit_for_small_dataset"),
    "vit_with_keel_post_ln.ViT": _vit("vit_with_keel_post_ln"),
    "vit_with_decorr.ViT": _vit("vit_with_decorr"),
    "vit_with_patch_dropout.ViT": _vit("vit_with_patch_dropout"),
    "vit_detpool.ViTDetPool": _vit("vit_detpool", "ViTDetPool"),
    "vit_5.ViT": _vit("vit_5"),
    "normalized_vit.nViT": _vit("normalized_vit", "nViT"),
    "jumbo_vit.JumboViT": _vit("jumbo_vit", "JumboViT", jumbo_cls_k=2),
    "looped_vit.LoopedViT": _vit("looped_vit", "LoopedViT", without=("depth",), **_LOOPED),
    "mp3.ViT": _vit("mp3"),
    "rvt.RvT": _vit("rvt", "RvT"),
    "vit_nd.ViTND": _vit("vit_nd", "ViTND", without=("image_size",), **_ND),
    "vit_nd_rotary.ViTND": _vit("vit_nd_rotary", "ViTND", without=("image_size",), **_ND),
    "vit_nd_pope.ViTND": _vit("vit_nd_pope", "ViTND", without=("image_size",), **_ND),
    "cct.CCT": _of("cct", "CCT", img_size=32, n_conv_layers=1, kernel_size=3, stride=2, padding=1, **_CCT),
    "ats_vit.ViT": _vit("ats_vit", max_tokens_per_depth=(12, 8)),
    "vit_with_patch_merger.ViT": _vit("vit_with_patch_merger", patch_merge_layer=1, patch_merge_num_tokens=4),
    "jet_vit.JetViT": _vit("jet_vit", "JetViT", window_size=4),
    "xcit.XCiT": _vit("xcit", "XCiT", cls_depth=1),
    "look_vit.LookViT": _of(
        "look_vit", "LookViT", image_size=32, num_classes=CLASSES, patch_size=8, highres_patch_size=4, dim=24, depth=2,
        heads=3, dim_head=8, cross_attn_heads=3, cross_attn_dim_head=8,
    ),
}  # fmt: skip
_HIERARCHICAL = {
    "pit.PiT": (_vit("pit", "PiT", depth=(1, 1)), 32),
    "nest.NesT": (
        _of("nest", "NesT", image_size=32, patch_size=4, num_classes=CLASSES, dim=12, heads=3, num_hierarchies=2,
            block_repeats=(1, 1), dim_head=8),
        32,
    ),
    "levit.LeViT": (
        _of("levit", "LeViT", image_size=64, num_classes=CLASSES, stages=2, dim=(16, 24), depth=1, heads=(2, 3),
            mlp_mult=2, dim_key=8, dim_value=8),
        64,
    ),
    "cvt.CvT": (
        _of("cvt", "CvT", num_classes=CLASSES, s1_emb_dim=8, s2_emb_dim=12, s3_emb_dim=16, s1_depth=1, s2_depth=1,
            s3_depth=1, s2_heads=2, s3_heads=2),
        64,
    ),
    "twins_svt.TwinsSVT": (
        _of("twins_svt", "TwinsSVT", num_classes=CLASSES, s1_emb_dim=8, s2_emb_dim=12, s3_emb_dim=16, s4_emb_dim=20,
            s3_depth=1, s4_depth=1, s1_local_patch_size=4, s2_local_patch_size=4, s3_local_patch_size=2,
            s4_local_patch_size=2, s1_global_k=4, s2_global_k=4, s3_global_k=2, s4_global_k=2),
        64,
    ),
    "regionvit.RegionViT": (_of("regionvit", "RegionViT", window_size=2, **_FOUR), 64),
    "crossformer.CrossFormer": (
        _of("crossformer", "CrossFormer", global_window_size=(4, 4, 2, 1), local_window_size=2, depth=(1, 1, 1, 1),
            dim=(32, 32, 64, 64), num_classes=CLASSES),
        64,
    ),
    "scalable_vit.ScalableViT": (
        _of("scalable_vit", "ScalableViT", num_classes=CLASSES, dim=8, depth=(1, 1), heads=(2, 2),
            reduction_factor=(2, 1), window_size=(4, None)),
        32,
    ),
    "sep_vit.SepViT": (
        _of("sep_vit", "SepViT", num_classes=CLASSES, dim=8, dim_head=4, depth=(1, 1), heads=(2, 2), window_size=7),
        56,
    ),
    "max_vit.MaxViT": (
        _of("max_vit", "MaxViT", num_classes=CLASSES, dim=8, dim_head=4, depth=(1, 1), window_size=4), 64,
    ),
    "max_vit_with_registers.MaxViT": (
        _of("max_vit_with_registers", "MaxViT", num_classes=CLASSES, dim=8, dim_head=4, depth=(1, 1), window_size=4),
        64,
    ),
    "mobile_vit.MobileViT": (
        _of("mobile_vit", "MobileViT", image_size=(64, 64), dims=[16, 16, 16], num_classes=CLASSES,
            channels=[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16]),
        64,
    ),
    "cross_vit.CrossViT": (
        _of("cross_vit", "CrossViT", image_size=32, num_classes=CLASSES, sm_dim=16, lg_dim=24, sm_patch_size=4,
            lg_patch_size=8, depth=1, sm_enc_heads=2, lg_enc_heads=2, sm_enc_mlp_dim=24, lg_enc_mlp_dim=24,
            lg_enc_depth=2, cross_attn_heads=2, cross_attn_depth=1, sm_enc_dim_head=8, lg_enc_dim_head=8,
            cross_attn_dim_head=8),
        32,
    ),
}  # fmt: skip

_FLOAT32 = ("crossformer.CrossFormer",)  # it makes float32 positions in every pass

VIT_PYTORCH = [
    *(Entry(f"vit_pytorch/{name}", construct) for name, construct in _PLAIN.items()),
    *(
        Entry(
            f"vit_pytorch/{name}", construct, (size, size), kind="hierarchical",
            dtype=torch.float32 if name in _FLOAT32 else torch.float64,
        )
        for name, (construct, size) in _HIERARCHICAL.items()
    ),
]  # fmt: skip
