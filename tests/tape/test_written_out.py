"""Parts that a model writes out by hand, or spells in another way, count as the called ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.architecture import find_architecture
from vitreous.speed.timing import one_thread
from vitreous.tape import Needs, Plan, record

# Float64: the same arithmetic in another order, 1e-15 per step; a part that is not heard shows far above 1e-10.
EXACT = 1e-10


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def assert_same_maps(one: nn.Module, other: nn.Module, spellings: list[str]) -> None:
    """Two models that compute the same have the same maps."""
    other.load_state_dict(one.state_dict())
    found, expected = (vitreous.explain(model, random_images(), spellings, 1).scores for model in (one, other))
    for spelling in spellings:
        assert largest_difference(found[spelling], expected[spelling]) < EXACT, spelling


# Linear layers --------------------------------------------------------------------------------------------------------


def added_to(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    output = bias.expand(*tokens.shape[:-1], -1).clone()
    output += F.linear(tokens, weight)
    return output


def in_one_row(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, tokens.reshape(-1, tokens.shape[-1]), weight.T).view(*tokens.shape[:-1], -1)


LINEAR = {
    "as a product": lambda tokens, weight, bias: tokens @ weight.T + bias,
    "added": lambda tokens, weight, bias: F.linear(tokens, weight) + bias,
    "added in place": lambda tokens, weight, bias: F.linear(tokens, weight).add_(bias),
    "added to it": added_to,
    "added by name": lambda tokens, weight, bias: F.linear(tokens, weight).add(other=bias),
    "everything by name": lambda tokens, weight, bias: torch.add(input=F.linear(tokens, weight), other=bias),
    "added half": lambda tokens, weight, bias: torch.add(F.linear(tokens, weight), 2 * bias, alpha=0.5),
    "taken away": lambda tokens, weight, bias: F.linear(tokens, weight) - (-bias),
    "taken from": lambda tokens, weight, bias: bias - F.linear(tokens, -weight),
    "all tokens in one row": in_one_row,
}


class WrittenLinear(nn.Linear):
    form = "as a product"

    def forward(self, tokens):
        return LINEAR[self.form](tokens, self.weight, self.bias)


def with_linear(form: str, *, attends: bool = True) -> nn.Module:
    """Linear layers in the feed-forward part, where no attention module runs, and inside the attention."""
    model = small_vit(depth=2)
    for block in model.blocks:
        for layer in (block.mlp.fc1, block.attn.proj) if attends else (block.mlp.fc1,):
            layer.__class__, layer.form = WrittenLinear, form
    return model


@pytest.mark.parametrize("form", LINEAR)
def test_a_written_out_linear_layer_has_its_bias(form):
    spellings = ["fullgrad:rule=libra", "fullgrad", "decompx:bias=token", "attnlrp"]
    assert_same_maps(with_linear(form), small_vit(depth=2), spellings)


@pytest.mark.parametrize("form", ["as a product", "added"])
def test_relevance_follows_a_linear_layer_that_is_written_as_a_product(form):
    """Also where its bias is added by itself."""
    assert_same_maps(with_linear(form, attends=False), small_vit(depth=2), ["transattr", "abslrp"])


class Gated(nn.Module):
    """A gated feed-forward part."""

    def __init__(self, in_features: int, hidden_features: int, form: str = "called", **_) -> None:
        super().__init__()
        self.form = form
        self.gate, self.value, self.output = (
            nn.Linear(*sizes, bias=False)
            for sizes in (*[(in_features, hidden_features)] * 2, (hidden_features, in_features))
        )

    def forward(self, tokens):
        gate = F.silu(self.gate(tokens))
        return self.output(PRODUCTS[self.form](tokens, self.value.weight, gate))


def in_place(tokens: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    product = F.linear(tokens, weight)
    product *= gate
    return product


def into_the_gate(tokens: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    gate.mul_(F.linear(tokens, weight))
    return gate


PRODUCTS = {
    "called": lambda tokens, weight, gate: F.linear(tokens, weight) * gate,
    "of a product": lambda tokens, weight, gate: (tokens @ weight.T) * gate,
    "in place": in_place,
    "into the gate": into_the_gate,
    "by name": lambda tokens, weight, gate: torch.mul(gate, other=F.linear(tokens, weight)),
    "multiply": lambda tokens, weight, gate: torch.multiply(gate, F.linear(tokens, weight)),
}


@pytest.mark.parametrize("form", PRODUCTS)
def test_a_gated_product_is_halved_however_it_is_written(form):
    models = (small_vit(depth=2, mlp_layer=partial(Gated, form=each)) for each in (form, "called"))
    assert_same_maps(*models, ["ixg:rule=libra", "attnlrp", "fullgrad:rule=libra", "ixg"])


class SigmoidGated(nn.Module):
    """A feed-forward part in which the sigmoid only weighs."""

    def __init__(self, in_features: int, hidden_features: int, form: str = "called", **_) -> None:
        super().__init__()
        self.form = form
        self.input, self.output = nn.Linear(in_features, 2 * hidden_features), nn.Linear(hidden_features, in_features)

    def forward(self, tokens):
        both = self.input(tokens)
        stream, gate = both.chunk(2, dim=-1)
        gate = torch.sigmoid(gate)
        if self.form == "glu":
            return self.output(F.glu(both))
        if self.form == "in place":
            stream = stream.clone()
            stream *= gate
            return self.output(stream)
        if self.form == "into the gate":
            gate *= stream
            return self.output(gate)
        return self.output(stream * gate)


@pytest.mark.parametrize("form", ["glu", "in place", "into the gate"])
def test_a_sigmoid_weighs_however_the_product_is_written(form):
    models = (small_vit(depth=2, mlp_layer=partial(SigmoidGated, form=each)) for each in (form, "called"))
    assert_same_maps(*models, ["ixg:rule=libra", "attnlrp", "fullgrad:rule=libra", "decompx", "fullgrad"])


class WrittenScores(nn.Module):
    """timm's attention with its scores written out."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, tokens, **_):
        batch, count, width = tokens.shape
        query, key, value = self.inner.qkv(tokens).reshape(batch, count, 3, 3, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1)
        if self.form == "times":
            scores *= self.inner.scale
        else:
            scores.div_(1 / self.inner.scale)
            scores += torch.zeros(count, dtype=scores.dtype)
        if self.form == "by head":
            scores *= torch.ones(3, 1, 1, dtype=scores.dtype)
        return self.inner.proj((scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, count, width))


def with_scores(form: str) -> nn.Module:
    model = small_vit(depth=2)
    for block in model.blocks:
        block.attn = WrittenScores(block.attn, form)
    return model


@pytest.mark.parametrize("form", ["times", "divided", "by head"])
def test_scores_may_be_scaled_in_place(form):
    methods = ["attnlrp", "gae:rule=attnlrp", "agcam", "ixg", "transattr"]
    found, expected = (
        vitreous.explain(model, random_images(), methods, 1).scores for model in (with_scores(form), small_vit(depth=2))
    )
    for method in methods:
        assert largest_difference(found[method], expected[method]) < EXACT, method


def test_a_projection_between_scores_and_softmax_does_not_hide_the_keys():
    """A table that is multiplied with a constant there is not q kᵀ."""

    class Attention(nn.Module):
        def __init__(self, inner: nn.Module, *, projects: bool) -> None:
            super().__init__()
            self.inner, self.projects = inner, projects
            self.table = nn.Parameter(torch.randn(17, 4, dtype=torch.float64))
            self.columns = nn.Parameter(torch.randn(4, 17, dtype=torch.float64))

        def forward(self, tokens, **_):
            batch, count, width = tokens.shape
            query, key, value = self.inner.qkv(tokens).reshape(batch, count, 3, 3, -1).permute(2, 0, 3, 1, 4)
            before = self.table @ self.columns
            scores = query @ key.transpose(-2, -1) * self.inner.scale
            scores = scores + (self.table @ self.columns if self.projects else before)
            return self.inner.proj((scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, count, width))

    models = [small_vit(depth=2), small_vit(depth=2)]
    for model, projects in zip(models, (True, False), strict=True):
        for block in model.blocks:
            block.attn = Attention(block.attn, projects=projects)
    assert_same_maps(*models, ["gradtoken", "attnlrp", "gae", "ixg"])


# Norms ----------------------------------------------------------------------------------------------------------------


def centred(tokens: Tensor) -> Tensor:
    return tokens - tokens.mean(-1, keepdim=True)


def divided_by_both(tokens: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(tokens, -1, correction=0, keepdim=True)
    return (tokens - mean) / deviation


LAYER_NORMS = {
    "deviation": lambda tokens: centred(tokens) / tokens.std(-1, unbiased=False, keepdim=True),
    "deviation and mean": divided_by_both,
    "times 1/deviation": lambda tokens: centred(tokens) * (1 / torch.std(tokens, -1, correction=0, keepdim=True)),
    "times 1/root": lambda tokens: centred(tokens) * (1 / tokens.var(-1, correction=0, keepdim=True).add(0).sqrt()),
    "kept from 0": lambda tokens: centred(tokens) * tokens.std(-1, False, True).clamp(min=1e-9).add(0).reciprocal(),  # noqa: FBT003
    "normalize": lambda tokens: F.normalize(centred(tokens), dim=-1) * tokens.shape[-1] ** 0.5,
}
RMS_NORMS = {
    "normalize": lambda tokens: F.normalize(tokens, dim=-1) * tokens.shape[-1] ** 0.5,
    "norm": lambda tokens: tokens / (tokens.norm(dim=-1, keepdim=True) * tokens.shape[-1] ** -0.5),
    "vector_norm": lambda tokens: (
        tokens * (tokens.shape[-1] ** 0.5 / torch.linalg.vector_norm(tokens, dim=-1, keepdim=True))
    ),
}


class WrittenNorm(nn.Module):
    def __init__(self, width: int, function: Callable[[Tensor], Tensor], **_) -> None:
        super().__init__()
        self.weight, self.bias, self.function = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.ones(width)),
            function,
        )

    def forward(self, tokens):
        return self.function(tokens) * self.weight + self.bias


def root_mean_square(tokens: Tensor) -> Tensor:
    return F.rms_norm(tokens, tokens.shape[-1:], eps=0.0)


NORMED = ["decompx", "ixg:rule=libra", "attnlrp", "conservative_lrp", "ixg", "fullgrad:rule=libra", "fullgrad"]


@pytest.mark.parametrize("form", LAYER_NORMS)
def test_a_written_out_layer_norm_counts_as_the_called_one(form):
    by_hand = small_vit(depth=2, norm_layer=partial(WrittenNorm, function=LAYER_NORMS[form]))
    assert_same_maps(by_hand, small_vit(depth=2, norm_layer=partial(nn.LayerNorm, eps=0.0)), NORMED)


@pytest.mark.parametrize("form", RMS_NORMS)
def test_a_written_out_rms_norm_counts_as_the_called_one(form):
    models = (
        small_vit(depth=2, norm_layer=partial(WrittenNorm, function=each))
        for each in (RMS_NORMS[form], root_mean_square)
    )
    assert_same_maps(*models, NORMED)


# Attention in half precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_written_out_matrix_in_half_precision_is_not_rounded_again(dtype):
    """A is as the model rounded it; what is made of it has float32's digits, 1e-7 per step, not 4e-3 or 5e-4."""
    model, images = small_vit(dtype=dtype), random_images(dtype=dtype)
    for block in model.blocks:
        block.attn.fused_attn = False
    architecture = find_architecture(model, images)
    with record(model, architecture, images, Plan(4, Needs(attention=frozenset(range(4))))) as tape:
        matrices = [tape.attention(layer).rows(slice(None)).double() for layer in range(4)]
    assert tape.attention(0).matrix.dtype == dtype
    patches = slice(1, None)
    rollout = torch.eye(17, dtype=torch.float64)
    for matrix in matrices:
        rollout = (rollout + matrix.mean(dim=1) @ rollout) / 2
    found = vitreous.explain(model, images, ["raw_attention", "rollout", "ixg", "attixg"]).scores
    expected = {
        "raw_attention": matrices[-1].mean(dim=1)[:, 0, patches],
        "rollout": rollout[:, 0, patches],
        "attixg": found["ixg"] * matrices[0].mean(dim=(1, 2))[:, patches],
    }
    for spelling, maps in expected.items():
        assert largest_difference(found[spelling], maps) < 1e-5, spelling
