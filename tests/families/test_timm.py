"""Every kind of timm Vision Transformer, small."""

from __future__ import annotations

import pytest
import torch
from checks import AGREES, CLASSES, DEPTH, RULED_METHODS, Family, FamilyChecks
from hooked import Pooling
from torch import nn

import vitreous

timm = pytest.importorskip("timm", reason="timm is not installed")

from timm.layers import QuickGELU, RmsNorm, SwiGLUPacked  # noqa: E402
from timm.models.vision_transformer import ResPostBlock  # noqa: E402

SMALL = {"embed_dim": 48, "depth": DEPTH, "num_heads": 4, "img_size": (32, 48), "patch_size": 8, "num_classes": CLASSES}


def small(name: str, **options: object):
    """A named timm model, built small."""
    return lambda: timm.create_model(name, **{**SMALL, **options})


def vit(**options: object):
    return small("vit_base_patch16_224", **options)


CLIP = "vit_base_patch32_clip_quickgelu_224"
DINOV2 = {"init_values": 1.0, "reg_tokens": 4, "no_embed_class": True}
EVA02 = "eva02_base_patch14_224"

FAMILIES = [
    Family("vit", vit()),
    Family("vit_other_grid", vit(img_size=(24, 56)), image=(24, 56), grid=(3, 7)),
    Family("vit_dynamic_size", vit(img_size=32, dynamic_img_size=True), image=(40, 24), grid=(5, 3)),
    Family("vit_dynamic_pad", vit(dynamic_img_size=True, dynamic_img_pad=True), image=(30, 45)),
    Family("vit_average", vit(global_pool="avg"), read="patches"),
    Family("vit_average_no_class", vit(global_pool="avg", class_token=False), prefix=0, read="patches"),
    Family("vit_average_of_all_tokens", vit(global_pool="avg", pool_include_prefix=True), read=range(25)),
    Family("vit_attention_pooled", vit(global_pool="map"), read=Pooling()),
    Family("vit_attention_pooled_no_class", vit(global_pool="map", class_token=False), prefix=0, read=Pooling()),
    Family("clip_quickgelu", small(CLIP)),
    Family("clip_quickgelu_plain_norm", vit(act_layer=QuickGELU, pre_norm=True)),
    Family("siglip", small("vit_base_patch16_siglip_224"), prefix=0, read=Pooling()),
    Family("layer_scale", vit(init_values=0.1)),
    Family("qk_norm", vit(qk_norm=True)),
    Family("inner_norms", vit(scale_attn_norm=True, scale_mlp_norm=True), tokentm=False),
    Family("rms_norm", vit(norm_layer=RmsNorm, qk_norm=True)),
    Family("registers", vit(reg_tokens=4, no_embed_class=True), prefix=5),
    Family("registers_average", vit(reg_tokens=4, global_pool="avg"), prefix=5, read="patches"),
    Family("dinov2", small("vit_small_patch14_dinov2")),
    Family("dinov2_swiglu_registers", vit(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, **DINOV2), prefix=5, gated=True),
    Family("deit", small("deit_tiny_patch16_224")),
    Family("deit_distilled", small("deit_tiny_distilled_patch16_224"), prefix=2, read=(0, 1)),
    Family("deit3", small("deit3_small_patch16_224")),
    Family("res_post_blocks", vit(block_fn=ResPostBlock), tokentm=False),
    Family("eva", small("eva_giant_patch14_224"), read="patches"),
    Family("eva_class_token", small("eva_giant_patch14_224", global_pool="token")),
    Family("eva02", small(EVA02), read="patches", gated=True),
    Family(
        "eva02_inner_norms",
        small(EVA02, scale_mlp=True, scale_attn_inner=True),
        read="patches",
        tokentm=False,
        gated=True,
    ),
    Family("eva02_plain_mlp_norms", small(EVA02, scale_mlp=False, qkv_fused=False), read="patches", gated=True),
    Family("eva02_post_norm", small(EVA02, use_post_norm=True), read="patches", tokentm=False, gated=True),
    Family("dinov3", small("vit_small_patch16_dinov3", global_pool="token"), prefix=5),
    Family("dinov3_average", small("vit_small_patch16_dinov3"), prefix=5, read="patches"),
    Family("beit", small("beit_base_patch16_224"), read="patches"),
    Family(
        "beit_shared_bias",
        small("beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True, global_pool="token"),
    ),
    Family("beitv2", small("beitv2_base_patch16_224", init_values=0.1), read="patches"),
    Family("relpos", small("vit_relpos_base_patch16_224"), prefix=0, read="patches"),
    Family("relpos_class_token", small("vit_relpos_base_patch16_cls_224")),
    Family("relpos_shared", small("vit_srelpos_small_patch16_224"), prefix=0, read="patches"),
    Family(
        "relpos_res_post",
        small("vit_relpos_base_patch16_clsgap_224", block_fn=timm.models.vision_transformer_relpos.ResPostRelPosBlock),
        read="patches",
        tokentm=False,
    ),
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
class TestTimm(FamilyChecks):
    def test_written_out_attention_gives_the_fused_maps(self, case: Family) -> None:
        model, images, target = case.own_model(), case.images(), case.target()
        methods = [*case.methods, "ixg", "decompx", "attcam", "gradsam.propagate", *RULED_METHODS]
        fused = vitreous.explain(model, images, methods, target)
        switched = [module for module in model.modules() if getattr(module, "fused_attn", False)]
        assert len(switched) >= DEPTH
        for module in switched:
            module.fused_attn = False
        written_out = vitreous.explain(model, images, methods, target)
        for method in methods:
            torch.testing.assert_close(written_out.scores[method], fused.scores[method], **AGREES)
