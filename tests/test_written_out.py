"""Parts that a model writes out by hand, or spells in another way, count as the called ones do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.speed.timing import one_thread

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

LINEAR = {
    "as a product": lambda tokens, weight, bias: tokens @ weight.T + bias,
    "added": lambda tokens, weight, bias: F.linear(tokens, weight) + bias,
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


def test_relevance_follows_a_linear_layer_that_is_written_as_a_product():
    """And a bias that is added is a term of a sum to it, which one inside a call is not."""
    models = (with_linear(form, attends=False) for form in ("as a product", "added"))
    assert_same_maps(*models, ["transattr", "abslrp"])


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
        if self.form == "of a product":
            return self.output((tokens @ self.value.weight.T) * gate)
        return self.output(self.value(tokens) * gate)


@pytest.mark.parametrize("form", ["of a product"])
def test_a_gated_product_is_halved_however_it_is_written(form):
    models = (small_vit(depth=2, mlp_layer=partial(Gated, form=each)) for each in (form, "called"))
    assert_same_maps(*models, ["ixg:rule=libra", "attnlrp", "fullgrad:rule=libra", "ixg"])


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
