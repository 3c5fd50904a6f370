"""Class activation maps: the authors' numbers, the pytorch-grad-cam package, and what the papers say of special cases.

Goldens are float64 and agree to 1e-8 absolute, as in ``test_golden``. Grad-CAM++ has values up to 283 there, and its
denominators nearly vanish: 1e-8 is then 4e-11 of the value.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import Block

import vitreous
from golden_numbers import DEPTH, PATCHES, TOLERANCE, assert_agrees, family, golden, ours
from small_models import CLASSES, largest_difference, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.speed.peers import CLASSES as GRAD_CAM_CLASSES
from vitreous.speed.timing import one_thread

# The same float64 arithmetic in another order: some hundred roundings of 1e-16.
SAME = 1e-12
# pytorch-grad-cam: its own arithmetic is float64 here, but it hands maps on as float32, which keeps 7 digits.
SINGLE = 1e-6


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


# Goldens --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "name"), GRAD_CAM_CLASSES.items())
def test_pytorch_grad_cam_at_the_last_first_norm(method, name):
    raw = golden("pytorch_grad_cam_norm1_last")[f"{name}_raw_4x4"].reshape(2, 3, 16)
    assert_agrees(method, raw.clip(min=0))
    if method != "gradcam_elementwise":
        assert (raw < 0).any()
        assert_agrees(f"{method}:relu=no", raw)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("gradcam:convention=skipplus", "GCAM_s:sum_layers"),
        ("xgradcam:convention=skipplus", "XCAM_s:sum_layers"),
        ("xgradcam_abs:convention=skipplus", "XACAM_s:sum_layers"),
        ("gradcampp:convention=skipplus,gradients=all", "PCAM_s:sum_layers"),
        ("gradcampp:convention=skipplus", "PRCAM_gradrelu_s:sum_layers"),
    ],
)
def test_cams_of_the_skipplus_authors(method, key):
    stored = family(key)[..., PATCHES]
    for layer in range(DEPTH):
        assert_agrees(f"{method},layer={layer}", stored[:, layer])
    name, options = method.split(":")
    assert_agrees(f"{name}.plus:{options}", stored.sum(axis=1))
    assert_agrees(f"{name}.skipplus:{options}", stored[:, DEPTH // 2 :].sum(axis=1))


# The package ----------------------------------------------------------------------------------------------------------


@cache
def small_model():
    return small_vit(), random_images()


def package_maps(name: str, layer: int, target: int) -> np.ndarray:
    """Maps of the pytorch-grad-cam package before its ReLU and scaling, (batch, patches)."""
    package = pytest.importorskip("pytorch_grad_cam")
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    def grid(tokens):
        return tokens[:, 1:].reshape(len(tokens), 4, 4, -1).permute(0, 3, 1, 2)

    model, images = small_model()
    with getattr(package, name)(model, [model.blocks[layer].norm1], reshape_transform=grid) as cam:
        cam.compute_cam_per_layer = lambda *_: ()  # it would clamp and scale to 0..1
        cam.aggregate_multi_layers = lambda _: None
        targets = [ClassifierOutputTarget(target)] * len(images)
        cam(images, targets)
        activations, gradients = (
            [values.numpy() for values in part]
            for part in (cam.activations_and_grads.activations, cam.activations_and_grads.gradients)
        )
        slopes = gradients[0] if gradients else None
        return cam.get_cam_image(images, None, targets, activations[0], slopes, eigen_smooth=False).reshape(
            len(images), 16
        )


@pytest.mark.parametrize("layer", [1, -1])
@pytest.mark.parametrize(("method", "name"), GRAD_CAM_CLASSES.items())
def test_agrees_with_the_package(method, name, layer):
    expected = torch.from_numpy(package_maps(name, layer, 2))
    relu = "" if method == "gradcam_elementwise" else ",relu=no"
    spelling = f"{method}:layer={layer}{relu}"
    found = vitreous.explain(*small_model(), spelling, 2).scores[spelling]
    assert largest_difference(found, expected) < SAME
    clamped = vitreous.explain(*small_model(), f"{method}:layer={layer}", 2).scores[f"{method}:layer={layer}"]
    assert largest_difference(clamped, expected.clamp(min=0)) < SAME


def test_eigencam_agrees_with_the_package_but_for_the_sign():
    expected = torch.from_numpy(package_maps("EigenCAM", -1, 0)).double()
    found = vitreous.explain(*small_model(), "eigencam:relu=no").scores["eigencam:relu=no"]
    signs = (found * expected).sum(dim=1, keepdim=True).sign()
    assert largest_difference(found * signs, expected) < SINGLE
    assert (found.amax(dim=1) == found.abs().amax(dim=1)).all()
    clamped = vitreous.explain(*small_model(), "eigencam").scores["eigencam"]
    assert torch.equal(clamped, found.clamp(min=0))


# Special cases --------------------------------------------------------------------------------------------------------


@cache
def linear_model():
    """Blocks that add nothing, an average over patches and a linear head: gradients are the same at every token."""
    model = small_vit(global_pool="avg", class_token=False, final_norm=False, fc_norm=False)
    with torch.no_grad():
        for block in model.blocks:
            block.ls1.gamma.zero_()
            block.ls2.gamma.zero_()
    return model


def test_cams_are_cam_where_the_head_reads_an_average():
    """Grad-CAM sec. 3: with average pooling and a linear head it is CAM, Σ_k w_k A_k, up to 1/patches.

    HiResCAM's (sec. 3.2) and XGrad-CAM's (sec. 3) papers say the same of theirs.
    """
    model, images = linear_model(), random_images()
    methods = [f"{name}:convention=skipplus" for name in ("gradcam", "hirescam", "xgradcam", "xgradcam_abs")]
    scores = vitreous.explain(model, images, methods, 3).scores
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(images))
        expected = tokens @ model.head.weight[3] / tokens.shape[1]
    for method in methods:
        # The small constant in a denominator, 1e-7 against sums of order 1 to 10, is all that differs.
        assert largest_difference(scores[method], expected) < 1e-5, method
    assert largest_difference(scores[methods[0]], expected) < SAME


def test_hirescam_of_block_inputs_is_input_times_gradient():
    model, images = small_model()
    for layer in range(4):
        one, other = f"hirescam:convention=skipplus,layer={layer}", f"ixg:layer={layer}"
        scores = vitreous.explain(model, images, [one, other], 1).scores
        assert torch.equal(scores[one], scores[other])


def test_xgradcam_conserves_what_hirescam_sums_to():
    """XGrad-CAM's axiom of conservation (eq. 4): both maps have the sum Σ A G."""
    one, other = "xgradcam:relu=no", "hirescam:relu=no"
    scores = vitreous.explain(*small_model(), [one, other], 1).scores
    # 1e-7 in denominators of order 0.01 and more, times terms that cancel.
    torch.testing.assert_close(scores[one].sum(dim=1), scores[other].sum(dim=1), rtol=1e-3, atol=1e-5)


def test_positive_and_negative_parts_add_up_to_hirescam():
    """G A = G^+ A - (-G)^+ A, and -G is the gradient of the negated head; likewise (G A)^+ - (-G A)^+."""
    model, images = small_model()
    negated = small_vit()
    with torch.no_grad():
        negated.head.weight.neg_()
    for method in ("layercam:relu=no", "gradcam_elementwise"):
        there, back = (vitreous.explain(each, images, method, 1).scores[method] for each in (model, negated))
        expected = vitreous.explain(model, images, "hirescam:relu=no", 1).scores["hirescam:relu=no"]
        assert largest_difference(there - back, expected) < SAME


# Spellings ------------------------------------------------------------------------------------------------------------


def test_signed_where_the_map_is():
    spellings = ["gradcam", "gradcam:relu=no", "gradcam:convention=skipplus", "gradcam:convention=skipplus,relu=yes"]
    explanation = vitreous.explain(*small_model(), spellings)
    assert [explanation.signed[spelling] for spelling in spellings] == [False, True, True, False]
    for spelling in spellings:
        assert bool((explanation.scores[spelling] < 0).any()) == explanation.signed[spelling]


@pytest.mark.parametrize("rule", ["frozen", "libra", "attnlrp", "conservative"])
def test_cams_take_rules(rule):
    spelling = f"xgradcam_abs:relu=no,layer=1,rule={rule}"
    plain = "xgradcam_abs:relu=no,layer=1"
    scores = vitreous.explain(*small_model(), [spelling, plain]).scores
    assert largest_difference(scores[spelling], scores[plain]) > 1e-2


def test_eigencam_has_no_gradient_to_put_under_a_rule():
    with pytest.raises(MethodError, match="unknown option 'rule'"):
        vitreous.explain(*small_model(), "eigencam:rule=libra")


def test_attcam_of_the_skipplus_authors():
    stored = family("AttnWHeadGrad_layers")[..., 0, PATCHES]
    for layer in range(DEPTH):
        assert_agrees(f"attcam:convention=skipplus,layer={layer}", stored[:, layer])
    assert (stored < 0).any()
    np.testing.assert_allclose(ours("attcam"), stored[:, -1].clip(min=0), rtol=0, atol=TOLERANCE)


def test_classes_differ_but_for_eigencam():
    for method in ("gradcam_elementwise", "eigencam"):
        scores = vitreous.explain(*small_model(), method, [list(range(CLASSES))] * 2).scores[method]
        assert torch.equal(scores[:, 0], scores[:, 1]) == (method == "eigencam")


class UnnamedNorms(Block):
    """A pre-norm block whose norms nobody would look for under their names."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.one, self.two = self.norm1, self.norm2
        del self.norm1, self.norm2

    def forward(self, tokens, **_):
        tokens = tokens + self.attn(self.one(tokens))
        return tokens + self.mlp(self.two(tokens))


def test_norms_of_any_name_are_the_first_norms():
    named, methods = small_vit(init_values=None), ["gradcam", "gradcam:convention=skipplus", "layercam", "eigencam"]
    unnamed = small_vit(init_values=None, block_fn=UnnamedNorms)
    for mine, theirs in zip(unnamed.blocks, named.blocks, strict=True):
        mine.attn, mine.mlp, mine.one, mine.two = theirs.attn, theirs.mlp, theirs.norm1, theirs.norm2
    for part in ("patch_embed", "cls_token", "pos_embed", "norm", "head"):
        setattr(unnamed, part, getattr(named, part))
    found, expected = (vitreous.explain(model, random_images(), methods, 1).scores for model in (unnamed, named))
    for method in methods:
        torch.testing.assert_close(found[method], expected[method], rtol=1e-12, atol=1e-14)  # the same operations
