"""Completeness: under the Libra rule inputs and biases times gradient add up to the logit, whatever the model's parts.

Sums over tokens include the prefix tokens, so they are taken of whole maps, not of the public ones.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from timm.layers import GELUTanh, GluMlp, RmsNorm, SwiGLU
from timm.models.eva import Eva
from timm.models.metaformer import SquaredReLU, StarReLU
from torch import nn
from torch.nn import functional as F  # noqa: N812

import vitreous
from small_models import largest_difference, random_images, randomise, small_vit
from vitreous.errors import UnsupportedModelError
from vitreous.speed.timing import one_thread
from whole_maps import all_token_scores

# Float64: the sum of some hundred signed terms of 1e-16 each, up to a thousand times as large as the logit.
COMPLETE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


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


class Softened(nn.Module):
    """A feed-forward part whose activation reaches its second layer by a detour."""

    def __init__(self, in_features: int, hidden_features: int, form: str, **_) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, in_features)
        self.norm, self.form = nn.LayerNorm(hidden_features), form

    def forward(self, tokens):
        hidden = torch.sigmoid(self.first(tokens))
        if self.form == "norm":
            return self.second(self.norm(hidden))
        if self.form == "product":
            return hidden @ self.second.weight.T
        if self.form == "row":
            product = torch.addmm(self.second.bias, hidden.view(-1, hidden.shape[-1]), self.second.weight.T)
            return product.view_as(tokens)
        return self.second(hidden) + torch.tanh(tokens)


class DynamicTanh(nn.Module):
    """DyT (Zhu et al., CVPR 2025), in the place of a norm: tanh(a x) w + b."""

    def __init__(self, width: int, **_) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, tokens):
        return torch.tanh(self.alpha * tokens) * self.weight + self.bias


class Changed(nn.Module):
    """Saturating activations that constants are multiplied with or added to."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, values):
        if self.form == "scaled tanh":
            return 1.7159 * torch.tanh(values * 2 / 3)
        return torch.sigmoid(values) - 0.5 if self.form == "shifted sigmoid" else 1 - 3 * torch.sigmoid(values)


class Convolved(nn.Module):
    """A feed-forward part with a convolution between its layers: over the grid of patches, or of tokens in a row."""

    def __init__(self, in_features: int, hidden_features: int, form: str, **_) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, in_features)
        grid = nn.Conv2d(hidden_features, hidden_features, 3, padding=1, groups=hidden_features)
        self.filter = grid if form == "grid" else nn.Conv1d(hidden_features, hidden_features, 3, padding=1)
        self.form = form

    def forward(self, tokens):
        hidden = self.first(tokens)
        if self.form == "row":
            return self.second(F.gelu(self.filter(hidden.mT).mT))
        if self.form == "row of activations":
            return self.second(self.filter(torch.sigmoid(hidden).mT).mT)
        patches = self.filter(hidden[:, 1:].mT.unflatten(-1, (4, 4))).flatten(2).mT
        return self.second(F.gelu(torch.cat([hidden[:, :1], patches], dim=1)))


class ConvolvedHead(nn.Module):
    """TS-CAM: a convolution makes a map for each class, and its mean is the class's score."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = small_vit(depth=2, num_classes=0, global_pool="")
        self.head = randomise(nn.Conv2d(24, 5, 3, padding=1)).double()

    def forward(self, images):
        tokens = self.visual(images)[:, 1:]
        return self.head(tokens.mT.unflatten(-1, (4, 4))).mean(dim=(2, 3))


class WeighedTokens(nn.Module):
    """A head that adds up tokens by a softmax over them: of a linear layer (CCT), or of a gated one (ABMIL)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.visual, self.form = small_vit(depth=2, num_classes=0, global_pool=""), form
        parts = {"score": nn.Linear(24, 1), "tanh": nn.Linear(24, 24), "gate": nn.Linear(24, 24)}
        self.parts = randomise(nn.ModuleDict(parts)).double()
        self.head = randomise(nn.Linear(24, 5)).double()

    def forward(self, images):
        tokens = self.visual(images)
        if self.form == "CCT":
            weights = F.softmax(self.parts["score"](tokens), dim=1)
            return self.head((weights.transpose(-1, -2) @ tokens).squeeze(-2))
        patches = tokens[:, 1:]
        hidden = torch.tanh(self.parts["tanh"](patches)) * torch.sigmoid(self.parts["gate"](patches))
        return self.head((self.parts["score"](hidden).softmax(1) * patches).sum(dim=1))


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
    "tanh": partial(small_vit, act_layer=nn.Tanh),
    "sigmoid": partial(small_vit, act_layer=nn.Sigmoid),
    "hard sigmoid": partial(small_vit, act_layer=nn.Hardsigmoid),
    "softplus": partial(small_vit, act_layer=partial(nn.Softplus, beta=2)),
    "softsign": partial(small_vit, act_layer=nn.Softsign),
    "log of sigmoid": partial(small_vit, act_layer=nn.LogSigmoid),
    "tanhshrink": partial(small_vit, act_layer=nn.Tanhshrink),
    "squared ReLU": partial(small_vit, act_layer=SquaredReLU),
    "StarReLU": partial(small_vit, act_layer=StarReLU),
    **{
        f"sigmoid, then {form}": partial(small_vit, mlp_layer=partial(Softened, form=form))
        for form in ("norm", "product", "row", "sum")
    },
    **{
        f"convolution, {form}": partial(small_vit, mlp_layer=partial(Convolved, form=form))
        for form in ("grid", "row", "row of activations")
    },
    "convolution as head": ConvolvedHead,
    **{f"weighed tokens, {form}": partial(WeighedTokens, form) for form in ("CCT", "ABMIL")},
    "DyT": partial(small_vit, norm_layer=DynamicTanh),
    **{
        form: partial(small_vit, act_layer=partial(Changed, form))
        for form in ("scaled tanh", "shifted sigmoid", "sigmoid taken from 1")
    },
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


@cache
def model_of(name: str) -> nn.Module:
    """The same model for every test: none changes it, and its architecture is found once."""
    return MODELS[name]()


def missing(model: nn.Module, spelling: str) -> float:
    """How far a whole map's sum is from the logit, as a part of it; the worst of two images and two classes."""
    images = random_images()
    found = [all_token_scores(model, images, spelling, target) for target in (0, 3)]
    return max(float(((scores.sum(dim=1) - logits) / logits).abs().max()) for scores, logits in found)


@pytest.mark.parametrize("name", MODELS)
def test_libra_fullgrad_is_complete_from_any_layer(name):
    for layer in (0, 1):
        assert missing(model_of(name), f"fullgrad:rule=libra,layer={layer}") < COMPLETE


@pytest.mark.parametrize("name", ["LayerScale", "SwiGLU", "EVA-02", "unit feature, norm"])
def test_plain_fullgrad_is_not(name):
    """Otherwise completeness would prove nothing about the rule."""
    assert missing(model_of(name), "fullgrad") > 0.1


@pytest.mark.parametrize("name", GATED_OR_UNIT)
def test_the_frozen_rule_misses_gated_products_and_unit_lengths(name):
    """What the Libra rule adds to the frozen one."""
    assert missing(model_of(name), "fullgrad:rule=frozen") > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_decompx_with_biases_is_complete(name):
    assert missing(model_of(name), "decompx:bias=token") < COMPLETE
    assert missing(model_of(name), "decompx:bias=equal") < COMPLETE


@pytest.mark.parametrize("name", ["pre-norm", "LayerScale", "RMSNorm", "averaged patches"])
def test_decompx_is_input_times_gradient_under_the_frozen_rule_where_nothing_is_gated(name):
    model, images = model_of(name), random_images()
    found, frozen = (vitreous.explain(model, images, each, 1).scores[each] for each in ("decompx", "ixg:rule=frozen"))
    assert torch.equal(found, frozen)


@pytest.mark.parametrize("name", [name for name in PLAIN_MODELS if not name.startswith("written-out")])
def test_conservative_fullgrad_is_complete_by_the_residue_of_activations(name):
    """GELU has its own gradient there, so this holds only if what that leaves out of GELU is counted, and rightly."""
    assert missing(model_of(name), "fullgrad:rule=conservative") < COMPLETE


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


@pytest.mark.parametrize("spelling", ["decompx", "decompx:bias=token", "decompx.skipplus", "attnlrp", "fullgrad"])
def test_constants_behind_an_activation_are_those_of_the_next_layer(spelling):
    """1 - 3 sigmoid(u), then W and a bias, is sigmoid(u), then -3 W and another bias."""
    apart, folded = small_vit(act_layer=partial(Changed, "1 - 3 sigmoid")), small_vit(act_layer=nn.Sigmoid)
    for block in folded.blocks:
        layer = block.mlp.fc2
        layer.bias.data += layer.weight.data.sum(dim=1)
        layer.weight.data *= -3
    found, expected = (all_token_scores(model, random_images(), spelling, 1)[0] for model in (apart, folded))
    # Float64; products in another order.
    assert largest_difference(found, expected) < 1e-11


def test_a_gate_stays_one_whatever_constants_do_to_it():
    """u (tanh(u) / 2 + 1 / 2) is u sigmoid(2 u): what is divided and then added to still weighs u."""

    class ByTanh(nn.Module):
        def forward(self, values):
            return values * (torch.tanh(values) / 2 + torch.full_like(values, 0.5))

    class BySigmoid(nn.Module):
        def forward(self, values):
            return values * torch.sigmoid(2 * values)

    for spelling in ("decompx", "ixg:rule=frozen", "decompx:bias=token", "fullgrad:rule=libra"):
        found, expected = (
            all_token_scores(small_vit(act_layer=form), random_images(), spelling, 1)[0] for form in (ByTanh, BySigmoid)
        )
        assert largest_difference(found, expected) < 1e-12, spelling
