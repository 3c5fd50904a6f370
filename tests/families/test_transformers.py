"""transformers' Vision Transformers, small, with eager and with fused attention."""

from __future__ import annotations

import pytest
import torch
from checks import CLASSES, DECOMPOSITIONS, DEPTH, RULED_METHODS, Family, FamilyChecks
from hooked import Pooling

import vitreous
from vitreous.tape.runner import ModelRunner

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# transformers' eager attention rounds A to float32 (6e-8) whatever the model's precision; through three blocks that
# grew to 5e-6 at most in these models.
EAGER_ROUNDING = 1e-5
SIZES = {"hidden_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 96}
SQUARE = {**SIZES, "image_size": 32, "patch_size": 8}


def classifier(config_name: str, model_name: str, implementation: str, **options: object):
    """A model built from its configuration alone, with the wanted attention."""

    def build():
        config = getattr(transformers, config_name)(**{**SQUARE, "num_labels": CLASSES, **options})
        return getattr(transformers, model_name)._from_config(config, attn_implementation=implementation)

    return build


def two_towers(config_name: str, model_name: str, implementation: str, **options: object):
    """A classifier whose configuration holds that of a vision tower."""

    def build():
        config = getattr(transformers, config_name)(vision_config={**SQUARE, **options}, num_labels=CLASSES)
        return getattr(transformers, model_name)._from_config(config, attn_implementation=implementation)

    return build


SQUARE_GRID = {"image": (32, 32), "grid": (4, 4)}
WIDE = {"image_size": (32, 48)}


def families(attention: str) -> list[Family]:
    named = {
        "vit": Family("", classifier("ViTConfig", "ViTForImageClassification", attention, **WIDE), "vit.layers"),
        "vit_relu": Family(
            "", classifier("ViTConfig", "ViTForImageClassification", attention, hidden_act="relu", **WIDE), "vit.layers"
        ),
        "vit_python_gelu": Family(
            "",
            classifier("ViTConfig", "ViTForImageClassification", attention, hidden_act="gelu_new", **WIDE),
            "vit.layers",
        ),
        "deit": Family(
            "", classifier("DeiTConfig", "DeiTForImageClassification", attention, **WIDE), "deit.layers", prefix=2
        ),
        "deit_with_teacher": Family(
            "",
            classifier("DeiTConfig", "DeiTForImageClassificationWithTeacher", attention, **WIDE),
            "deit.layers",
            prefix=2,
            read=(0, 1),
        ),
        "dinov2": Family(
            "", classifier("Dinov2Config", "Dinov2ForImageClassification", attention), "dinov2.encoder.layer"
        ),
        "dinov2_swiglu": Family(
            "",
            classifier("Dinov2Config", "Dinov2ForImageClassification", attention, use_swiglu_ffn=True),
            "dinov2.encoder.layer",
            gated=True,
        ),
        "dinov2_registers": Family(
            "",
            classifier("Dinov2WithRegistersConfig", "Dinov2WithRegistersForImageClassification", attention),
            "dinov2_with_registers.encoder.layer",
            prefix=5,
        ),
        "dinov2_registers_swiglu": Family(
            "",
            classifier(
                "Dinov2WithRegistersConfig",
                "Dinov2WithRegistersForImageClassification",
                attention,
                use_swiglu_ffn=True,
            ),
            "dinov2_with_registers.encoder.layer",
            prefix=5,
            gated=True,
        ),
        "beit": Family(
            "",
            classifier(
                "BeitConfig",
                "BeitForImageClassification",
                attention,
                use_relative_position_bias=True,
                layer_scale_init_value=0.1,
                **WIDE,
            ),
            "beit.layers",
            read="patches",
        ),
        "beit_shared_bias": Family(
            "",
            classifier(
                "BeitConfig",
                "BeitForImageClassification",
                attention,
                use_shared_relative_position_bias=True,
                use_mean_pooling=False,
                **WIDE,
            ),
            "beit.layers",
        ),
        "clip_projection": Family(
            "",
            classifier("CLIPVisionConfig", "CLIPVisionModelWithProjection", attention, projection_dim=CLASSES),
            "vision_model.encoder.layers",
            **SQUARE_GRID,
        ),
        "clip_classifier": Family(
            "",
            two_towers("CLIPConfig", "CLIPForImageClassification", attention),
            "vision_model.encoder.layers",
            **SQUARE_GRID,
            read="patches",
        ),
        "siglip_classifier": Family(
            "",
            two_towers("SiglipConfig", "SiglipForImageClassification", attention),
            "vision_model.encoder.layers",
            **SQUARE_GRID,
            prefix=0,
            read="patches",
        ),
        "siglip_classifier_without_pooling_head": Family(
            "",
            two_towers("SiglipConfig", "SiglipForImageClassification", attention, vision_use_head=False),
            "vision_model.encoder.layers",
            **SQUARE_GRID,
            prefix=0,
            read="patches",
        ),
        "siglip_vision": Family(
            "",
            classifier("SiglipVisionConfig", "SiglipVisionModel", attention),
            "encoder.layers",
            **SQUARE_GRID,
            prefix=0,
            read=Pooling(),
        ),
    }
    rounding = EAGER_ROUNDING if attention == "eager" else None
    return [
        Family(**{**vars(case), "name": f"{name}_{attention}", "rounding": rounding}) for name, case in named.items()
    ]


SDPA, EAGER = families("sdpa"), families("eager")
# Each kind of head and of scores; the others with eager attention are compared with the fused ones, below.
WHOLLY_CHECKED = ("vit", "deit_with_teacher", "dinov2_registers_swiglu", "beit", "siglip_vision")


@pytest.mark.parametrize(
    "case", [*SDPA, *(case for case in EAGER if case.name.removesuffix("_eager") in WHOLLY_CHECKED)], ids=str
)
class TestTransformers(FamilyChecks):
    pass


@pytest.mark.parametrize(("fused", "written_out"), list(zip(SDPA, EAGER, strict=True)), ids=str)
def test_written_out_attention_gives_what_fused_gives(fused: Family, written_out: Family) -> None:
    images, target = fused.images(), fused.target()
    runners = [ModelRunner(case.model(), images) for case in (fused, written_out)]
    kept = torch.stack([torch.randperm(fused.patches)[: fused.patches // 2] for _ in images])
    factors = torch.rand(len(images), fused.prefix + fused.patches, dtype=torch.float64)
    for ask in (
        lambda runner: runner.logits(images),
        lambda runner: runner.logits_of_kept(images, kept),
        lambda runner: runner.logits_of_damped(images, factors),
    ):
        expected, found = map(ask, runners)
        torch.testing.assert_close(found, expected, **written_out.agrees)
    assert not runners[1]._cannot_drop  # really dropped, not hidden at full cost
    methods = [*fused.methods, "ixg", "decompx", "attcam", "gradsam.propagate", *DECOMPOSITIONS, *RULED_METHODS]
    expected = vitreous.explain(fused.model(), images, methods, target)
    found = vitreous.explain(written_out.model(), images, methods, target)
    for method in methods:
        torch.testing.assert_close(found.scores[method], expected.scores[method], **written_out.agrees)


class ReadsTheClassToken(torch.nn.Module):
    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, torch.nn.Linear(SIZES["hidden_size"], CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images).last_hidden_state[:, 0])


def test_tokens_for_detection_behind_the_patches_are_no_patches() -> None:
    config = transformers.YolosConfig(**{**SQUARE, "image_size": [32, 32]}, num_detection_tokens=5)
    model = ReadsTheClassToken(transformers.YolosModel(config)).double().eval()
    images, embedded = torch.randn(1, 3, 32, 32, dtype=torch.float64), []
    found = vitreous.explain(model, images, "ixg", 1)
    with model.backbone.embeddings.register_forward_hook(lambda *given: embedded.append(given[2])):
        (gradient,) = torch.autograd.grad(model(images)[:, 1].sum(), embedded)
    assert found.grid == (4, 4)
    # Float64: the same products; the class token stands before the patches, five tokens behind them.
    expected = (embedded[0] * gradient).sum(dim=-1)[:, 1:17]
    torch.testing.assert_close(found.scores["ixg"], expected.detach(), rtol=1e-9, atol=1e-12)
