"""open_clip's image towers, small, and a zero-shot classifier made of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checks import AGREES, CLASSES, DEPTH, Family, FamilyChecks, randomised
from hooked import Pooling
from torch import Tensor, nn

import vitreous

open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed")

from open_clip.timm_model import TimmModel  # noqa: E402
from open_clip.transformer import QuickGELU, VisionTransformer  # noqa: E402

SMALL = {"image_size": (32, 48), "patch_size": 8, "width": 48, "layers": DEPTH, "heads": 4, "mlp_ratio": 2.0}


def tower(**options: object):
    return partial(VisionTransformer, **{**SMALL, "output_dim": 16, **options})


def pooled(queries: int, **options: object):
    return tower(**{"attentional_pool": True, "attn_pooler_queries": queries, "attn_pooler_heads": 4, **options})


class ZeroShot(nn.Module):
    """Cosine similarity of the image feature with one text feature per class."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        self.class_embeddings = nn.Parameter(torch.randn(CLASSES, width))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.normalize(self.visual(images), dim=-1)
        classes = nn.functional.normalize(self.class_embeddings, dim=-1)
        return self.logit_scale.exp() * features @ classes.T


class SecondPool(nn.Module):
    """A tower with two pooling attentions side by side, of which only the second one's feature is used."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = pooled(3, attentional_pool="parallel", output_dim=SMALL["width"])()

    def forward(self, images: Tensor) -> Tensor:
        return self.visual(images)[:, 0]


class SmallTimmTower(TimmModel):
    """open_clip's adapter round a timm model; the trunk is exchanged for a small one."""

    def __init__(self) -> None:
        import timm

        super().__init__("vit_tiny_patch16_224", embed_dim=16, image_size=(32, 48), pool="token", proj="linear")
        self.trunk = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=(32, 48),
            patch_size=8,
            embed_dim=192,
            depth=DEPTH,
            num_heads=4,
            num_classes=0,
        )


BLOCKS = "transformer.resblocks"
FAMILIES = [
    Family("class_token", tower(), BLOCKS),
    Family("quickgelu_layer_scale", tower(act_layer=QuickGELU, ls_init_value=0.1), BLOCKS),
    Family("average", tower(pool_type="avg", final_ln_after_pool=True), BLOCKS, read="patches"),
    Family("one_query", pooled(1), BLOCKS, read=Pooling()),
    Family("first_of_three_queries", pooled(3), BLOCKS, read=Pooling()),
    Family("average_of_queries", pooled(3, pool_type="avg"), BLOCKS, read=Pooling((1, 2))),
    Family("second_of_two_pools", SecondPool, f"visual.{BLOCKS}", read=Pooling(call=1)),
    Family("own_attention", tower(block_type="custom", qk_norm=True), BLOCKS),
    Family(
        "own_attention_inner_norms",
        tower(block_type="custom", scale_attn_inner=True, scale_attn=True, scale_fc=True, scale_heads=True),
        BLOCKS,
        tokentm=False,
    ),
    Family("timm_tower", SmallTimmTower, "trunk.blocks"),
    Family("zero_shot", lambda: ZeroShot(tower()(), 16), f"visual.{BLOCKS}", gated=True),
    Family("zero_shot_timm", lambda: ZeroShot(SmallTimmTower(), 16), "visual.trunk.blocks", gated=True),
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
class TestOpenClip(FamilyChecks):
    pass


class ImageTower(nn.Module):
    """What a CLIP of two towers says of pictures alone."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.visual = clip.visual

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.visual(images), dim=-1)


def test_of_two_towers_the_one_that_reads_pictures_is_explained() -> None:
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": DEPTH, "head_width": 16}
    text = {"context_length": 8, "vocab_size": 20, "width": 32, "heads": 2, "layers": 2}
    model = randomised(open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))
    images, methods = torch.randn(2, 3, 32, 32).double(), ["rollout", "gae", "tokentm", "gradtoken", "ixg", "decompx"]
    both = vitreous.explain(model, images, methods, [3, 5])
    alone = vitreous.explain(ImageTower(model).eval(), images, methods, [3, 5])
    assert both.grid == (4, 4)
    torch.testing.assert_close(both.logits, alone.logits, **AGREES)
    for method in methods:
        torch.testing.assert_close(both.scores[method], alone.scores[method], **AGREES)
