"""FullGrad: the authors' numbers, and completeness: under the Libra rule inputs and biases add up to the logit.

Sums over tokens include the prefix tokens, so they are taken of whole maps, not of the public ones.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from timm.layers import GELUTanh, GluMlp, RmsNorm, SwiGLU
from timm.models.eva import Eva
from torch import nn
from torch.nn import functional as F  # noqa: N812

import vitreous
from small_models import golden_model, largest_difference, one_thread, random_images, randomise, small_vit
from test_golden import DEPTH, PATCHES, TOLERANCE, assert_agrees, family, golden, model_images_targets
from vitreous.errors import UnsupportedModelError
from whole_maps import all_token_scores, opened

# Float64: the sum of some hundred signed terms of 1e-16 each, up to a thousand times as large as the logit.
COMPLETE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


# Goldens --------------------------------------------------------------------------------------------------------------


def whole(spelling: str) -> tuple[np.ndarray, np.ndarray]:
    """Whole maps and logits of the golden model, as the goldens store them: (class, image, token)."""
    model, images, targets = model_images_targets()
    found = [all_token_scores(model, images, spelling, target) for target in targets.unbind(dim=1)]
    return tuple(torch.stack(part).numpy() for part in zip(*found, strict=True))


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", range(DEPTH))
def test_fullgrad_from_every_layer_and_how_much_it_misses(layer):
    scores, logits = whole(f"fullgrad:layer={layer}")
    assert_same(scores, family(f"blocks__{layer}__FGrad_s:sum"))
    assert_same(scores.sum(axis=-1) - logits, family(f"blocks__{layer}__FGrad_completeness_error"))
    assert_agrees(f"fullgrad:layer={layer}", family(f"blocks__{layer}__FGrad_s:sum")[..., PATCHES])


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("fullgrad_plus", "CAT_s:sum_sum_FGrad_s:sum"),
        ("fullgrad.plus", "CAT_s:sum_sum_FGrad_s:sum"),
        ("fullgrad.skipplus", "CAT_s:sum_sum_f2_FGrad_s:sum"),
        ("fullgrad_plus.skipplus", "CAT_s:sum_sum_f2_FGrad_s:sum"),
        ("fullgrad.plus:start=2", "CAT_s:sum_sum_f2_FGrad_s:sum"),
    ],
)
def test_every_bias_counts_once(spelling, key):
    assert_same(whole(spelling)[0], family(key))
    assert_agrees(spelling, family(key)[..., PATCHES])


def test_biases_alone_from_the_first_block_and_behind_the_last():
    everything = whole("fullgrad")[0] - whole("ixg")[0]
    assert_same(everything, family("FGrad_s:sum_start"))
    model, images, targets = model_images_targets()
    for number, target in enumerate(targets.unbind(dim=1)):
        with opened(model, images, "fullgrad", target) as (recipe, view):
            behind = view.biases(recipe.readout.backward, DEPTH).numpy()
        assert_same(behind, family("FGrad_s:sum_end")[number])


@pytest.mark.parametrize("layer", range(DEPTH))
def test_decompx_with_biases_sums_to_the_logit_and_its_bias_token_is_theirs(layer):
    with_bias, logits = whole(f"decompx:bias=token,layer={layer}")
    without = whole(f"decompx:layer={layer}")[0]
    stored, (_, _, targets) = golden("decompx_vit_skipplus_authors")[f"decompx_vector_f{layer}"], model_images_targets()
    bias_token = np.stack([[stored[image, 17, targets[image, k]] for image in range(3)] for k in range(2)])
    assert_same((with_bias - without).sum(axis=-1), bias_token)
    np.testing.assert_allclose(with_bias.sum(axis=-1), logits, rtol=COMPLETE)


# The other entries of that golden file that no other test reads.


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize(
    ("method", "key"),
    [("ixg:channels=l2", "CAT_s:L2_layers"), ("gradient:channels=sum", "PatchGrad_s:sum_layers")],
)
def test_channels_as_a_length_or_a_sum(method, key, layer):
    assert_agrees(f"{method},layer={layer}", family(key)[:, layer, :, PATCHES])


def test_every_row_of_attcam_of_the_skipplus_authors():
    model, images, targets = model_images_targets()
    for number, target in enumerate(targets.unbind(dim=1)):
        for layer in range(DEPTH):
            with opened(model, images, f"attcam:convention=skipplus,layer={layer}", target) as (recipe, view):
                matrix = recipe.readout.matrix(view, layer, slice(None)).mean(dim=1).numpy()
            assert_same(matrix, family("AttnWHeadGrad_layers")[number, layer])


# Completeness ---------------------------------------------------------------------------------------------------------


class WrittenOut(nn.Module):
    """Activations that models write out by hand."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, values):
        if self.form == "quick":
            return values * torch.sigmoid(1.702 * values)
        if self.form == "tanh":
            inner = 0.79788456 * (values + 0.044715 * torch.pow(values, 3.0))
            return 0.5 * values * (1.0 + torch.tanh(inner))
        return values * 0.5 * (1.0 + torch.erf(values / 2**0.5))


class HandNorm(nn.Module):
    """RMSNorm by hand; ``root`` and ``power`` divide where others multiply by the inverse root."""

    def __init__(self, width: int, form: str = "rsqrt", **_) -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.ones(width)), form

    def forward(self, tokens):
        variance = tokens.pow(2).mean(-1, keepdim=True) + 1e-6
        if self.form == "rsqrt":
            return tokens * torch.rsqrt(variance) * self.weight
        return tokens / (variance.sqrt() if self.form == "root" else torch.pow(variance, 0.5)) * self.weight


class AddedBias(nn.Linear):
    """A linear layer that adds its bias by hand."""

    def forward(self, tokens):
        return F.linear(tokens, self.weight) + self.bias


class UnitFeature(nn.Module):
    """CLIP without its text tower: a feature of unit length against given directions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.visual, self.form = small_vit(depth=2, num_classes=12), form
        generator = torch.Generator().manual_seed(3)
        self.directions = nn.Parameter(torch.randn(12, 5, generator=generator, dtype=torch.float64))

    def forward(self, images):
        feature = self.visual(images)
        lengths = {
            "norm": lambda: feature.norm(dim=-1, keepdim=True),
            "linalg.norm": lambda: torch.linalg.norm(feature, dim=-1, keepdim=True),
            "vector_norm": lambda: torch.linalg.vector_norm(feature, dim=-1, keepdim=True),
            "root of squares": lambda: feature.square().sum(-1, keepdim=True).sqrt(),
            "power of squares": lambda: torch.pow(torch.sum(torch.pow(feature, 2), dim=-1, keepdim=True), 0.5),
        }
        unit = F.normalize(feature, dim=-1) if self.form == "normalize" else feature / lengths[self.form]()
        return 100 * unit @ self.directions


def eva02(**options) -> nn.Module:
    """EVA-02: SwiGLU, rotary positions, a norm inside the feed-forward part."""
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    parts = {"swiglu_mlp": True, "scale_mlp": True, "use_rot_pos_emb": True}
    return randomise(Eva(**settings, **parts, **options)).double().eval()


def with_added_biases() -> nn.Module:
    model = small_vit(depth=2)
    for block in model.blocks:
        block.mlp.fc1.__class__ = AddedBias
    return model


PLAIN_MODELS = {
    "pre-norm": partial(small_vit, init_values=None),
    "LayerScale": small_vit,
    "q and k normalised": partial(small_vit, qk_norm=True),
    "registers": partial(small_vit, reg_tokens=3),
    "averaged patches": partial(small_vit, global_pool="avg"),
    "pooled by attention": partial(small_vit, global_pool="map"),
    "as many heads as tokens": partial(small_vit, num_heads=17, embed_dim=34, qk_norm=True),
    "RMSNorm": partial(small_vit, norm_layer=RmsNorm),
    "RMSNorm by inverse root": partial(small_vit, norm_layer=HandNorm),
    "RMSNorm by root": partial(small_vit, norm_layer=partial(HandNorm, form="root")),
    "RMSNorm by power": partial(small_vit, norm_layer=partial(HandNorm, form="power")),
    "biases added by hand": with_added_biases,
    "a gate that is only a gate": partial(small_vit, mlp_layer=GluMlp, act_layer=nn.Sigmoid),
    "ReLU": partial(small_vit, act_layer=nn.ReLU),
    "tanh GELU": partial(small_vit, act_layer=GELUTanh),
    "QuickGELU": partial(small_vit, act_layer=partial(WrittenOut, "quick")),
    "written-out tanh GELU": partial(small_vit, act_layer=partial(WrittenOut, "tanh")),
    "written-out GELU": partial(small_vit, act_layer=partial(WrittenOut, "erf")),
}
GATED_OR_UNIT = {
    "SwiGLU": partial(small_vit, mlp_layer=SwiGLU),
    "packed GLU": partial(small_vit, mlp_layer=GluMlp),
    "EVA-02": eva02,
    "EVA-02, q, k and v apart": partial(eva02, qkv_fused=False),
    "EVA-02, norm inside attention": partial(eva02, scale_attn_inner=True),
    **{
        f"unit feature, {form}": partial(UnitFeature, form)
        for form in ("normalize", "norm", "linalg.norm", "vector_norm", "root of squares", "power of squares")
    },
}
MODELS = PLAIN_MODELS | GATED_OR_UNIT


def missing(model: nn.Module, spelling: str) -> float:
    """How far a whole map's sum is from the logit, as a part of it; the worst of two images and two classes."""
    images = random_images()
    found = [all_token_scores(model, images, spelling, target) for target in (0, 3)]
    return max(float(((scores.sum(dim=1) - logits) / logits).abs().max()) for scores, logits in found)


@pytest.mark.parametrize("name", MODELS)
def test_libra_fullgrad_is_complete_from_any_layer(name):
    model = MODELS[name]()
    for layer in (0, 1):
        assert missing(model, f"fullgrad:rule=libra,layer={layer}") < COMPLETE


@pytest.mark.parametrize("name", ["LayerScale", "SwiGLU", "EVA-02", "unit feature, norm"])
def test_plain_fullgrad_is_not(name):
    """Otherwise completeness would prove nothing about the rule."""
    assert missing(MODELS[name](), "fullgrad") > 0.1


@pytest.mark.parametrize("name", GATED_OR_UNIT)
def test_decompx_with_biases_misses_gated_products_and_unit_lengths(name):
    """What the Libra rule adds to the frozen one."""
    assert missing(GATED_OR_UNIT[name](), "decompx:bias=token") > 0.1


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_decompx_with_biases_is_complete_elsewhere(name):
    assert missing(PLAIN_MODELS[name](), "decompx:bias=token") < COMPLETE


@pytest.mark.parametrize("name", [name for name in PLAIN_MODELS if not name.startswith("written-out")])
def test_conservative_fullgrad_is_complete_by_the_residue_of_activations(name):
    """GELU has its own gradient there, so this holds only if what that leaves out of GELU is counted, and rightly."""
    assert missing(PLAIN_MODELS[name](), "fullgrad:rule=conservative") < COMPLETE


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_a_written_out_gelu_is_refused_where_its_residue_is_not_known(form):
    model = small_vit(act_layer=partial(WrittenOut, form))
    with pytest.raises(UnsupportedModelError, match="rule=plain, but it is under rule=libra"):
        vitreous.explain(model, random_images(), "fullgrad")


@pytest.mark.parametrize("rule", ["plain", "libra", "conservative"])
def test_a_written_out_quickgelu_has_the_residue_of_one_function(rule):
    """Against an activation that is one call: silu(1.702 u) / 1.702 is the same function."""

    class Sigmoid(nn.Module):
        def forward(self, values):
            return F.silu(1.702 * values) / 1.702

    spelling = f"fullgrad:rule={rule}"
    models = [small_vit(act_layer=partial(WrittenOut, "quick")), small_vit(act_layer=Sigmoid)]
    by_hand, called = (all_token_scores(model, random_images(), spelling, 1)[0] for model in models)
    assert largest_difference(by_hand, called) < 1e-12


def test_a_hand_written_norm_counts_as_the_called_one():
    """No part of it is an activation, so nothing of it is a bias under any rule."""
    spellings = [f"fullgrad:rule={rule}" for rule in ("plain", "libra", "conservative", "attnlrp")]
    by_hand = small_vit(norm_layer=HandNorm)
    called = small_vit(norm_layer=partial(RmsNorm, eps=1e-6))
    called.load_state_dict(by_hand.state_dict())
    for spelling in spellings:
        one, other = (all_token_scores(model, random_images(), spelling, 1)[0] for model in (by_hand, called))
        assert largest_difference(one, other) < 1e-10, spelling


# Where biases go ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["fullgrad", "fullgrad:rule=libra", "fullgrad_plus", "decompx:bias=token"])
def test_without_biases_fullgrad_is_input_times_gradient(spelling):
    """ReLU, which has no residue, and no bias anywhere."""
    model = small_vit(act_layer=nn.ReLU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and not name.startswith("patch_embed"):
                parameter.zero_()
    other = {"fullgrad": "ixg", "fullgrad:rule=libra": "ixg:rule=libra", "fullgrad_plus": "cat"}.get(
        spelling, "decompx"
    )
    one, two = (all_token_scores(model, random_images(), each, 1)[0] for each in (spelling, other))
    assert largest_difference(one, two) < 1e-12


@pytest.mark.parametrize("pooled", [False, True])
def test_the_heads_bias_goes_to_the_tokens_it_reads(pooled):
    model = small_vit(global_pool="avg" if pooled else "token")
    before, _ = all_token_scores(model, random_images(), "fullgrad", 1)
    with torch.no_grad():
        model.head.bias[1] += 16
    after, _ = all_token_scores(model, random_images(), "fullgrad", 1)
    expected = torch.zeros(17, dtype=torch.float64)
    expected[slice(1, 17) if pooled else slice(0, 1)] = 1.0 if pooled else 16.0
    torch.testing.assert_close(after - before, expected.expand(2, -1))


def test_as_many_images_as_tokens_are_not_mixed_up():
    """Tokens first and batch first look alike then."""
    layer = nn.TransformerEncoderLayer(24, 3, 48, activation="gelu", norm_first=True)

    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 24, 8, 8)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(24), enable_nested_tensor=False)
            self.head = nn.Linear(24, 5)

        def forward(self, images):
            tokens = self.embed(images).flatten(2).permute(2, 0, 1)
            return self.head(self.encoder(tokens).transpose(0, 1).mean(dim=1))

    model = randomise(TokensFirst()).double().eval()
    images = random_images(16)
    together, _ = all_token_scores(model, images, "fullgrad:rule=libra", 1)
    alone, _ = all_token_scores(model, images[:3], "fullgrad:rule=libra", 1)
    assert largest_difference(together[:3], alone) < 1e-12


def test_many_methods_share_the_noted_biases():
    model, images = golden_model()
    spellings = ["fullgrad", "fullgrad:layer=2", "fullgrad_plus:rule=libra", "fullgrad.skipplus", "ixg", "gae"]
    together = vitreous.explain(model, images, spellings).scores
    for spelling in spellings:
        alone = vitreous.explain(model, images, spelling).scores[spelling]
        assert largest_difference(together[spelling], alone) < 1e-12
