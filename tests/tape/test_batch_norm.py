"""Batch normalisation in evaluation is a scale and a shift for every channel; the shift counts as a bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import CLASSES, largest_difference, random_images, small_vit
from vitreous.errors import UnsupportedModelError
from whole_maps import all_token_scores

WIDTH, HIDDEN = 24, 16
TARGET = torch.tensor([1, 3])
SPELLINGS = ["decompx:bias=token", "decompx:bias=equal", "fullgrad:rule=libra", "fullgrad:rule=conservative"]
# Float64: sums of some hundred signed terms of 1e-16, up to a thousand times as large as the logit.
COMPLETE = 1e-9


def batch_norm(width: int, *, affine: bool = True, **options: bool) -> nn.BatchNorm1d:
    """One with statistics and weights that do something."""
    generator = torch.Generator().manual_seed(width)
    norm = nn.BatchNorm1d(width, affine=affine, **options).double()
    values = [torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(4)]
    if norm.track_running_stats:
        norm.running_mean, norm.running_var = values[0], values[1].exp()
    if affine:
        norm.weight.data, norm.bias.data = 1 + 0.3 * values[2], values[3]
    return norm.eval()


def linear(given: int, made: int) -> nn.Linear:
    """A layer with weights of order 1."""
    generator = torch.Generator().manual_seed(given + made)
    layer = nn.Linear(given, made).double()
    layer.weight.data = torch.randn(made, given, generator=generator, dtype=torch.float64) / given**0.5
    layer.bias.data = torch.randn(made, generator=generator, dtype=torch.float64)
    return layer


def scale_and_shift(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """The norm as one factor and one summand for every channel."""
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.detach()
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach()


def folded_before(norm: nn.BatchNorm1d, layer: nn.Linear) -> nn.Linear:
    """layer(norm(x)) as one layer."""
    scale, shift = scale_and_shift(norm)
    one = nn.Linear(layer.in_features, layer.out_features).double()
    one.weight.data, one.bias.data = layer.weight.detach() * scale, layer.bias.detach() + layer.weight.detach() @ shift
    return one


def folded_behind(layer: nn.Linear, norm: nn.BatchNorm1d) -> nn.Linear:
    """norm(layer(x)) as one layer."""
    scale, shift = scale_and_shift(norm)
    one = nn.Linear(layer.in_features, layer.out_features).double()
    one.weight.data, one.bias.data = scale[:, None] * layer.weight.detach(), scale * layer.bias.detach() + shift
    return one


def with_head(head: nn.Module, pooling: str) -> nn.Module:
    """A small model with another head."""
    model = small_vit(global_pool=pooling)
    model.head = head
    return model.eval()


def heads(kind: str) -> tuple[nn.Module, nn.Module]:
    """A head with the norm in it, and one that says the same without."""
    if kind == "between two layers":
        first, norm, last = linear(WIDTH, HIDDEN), batch_norm(HIDDEN), linear(HIDDEN, CLASSES)
        return nn.Sequential(first, norm, nn.ReLU(), last), nn.Sequential(folded_behind(first, norm), nn.ReLU(), last)
    norm, last = batch_norm(WIDTH, affine=kind == "linear probe"), linear(WIDTH, CLASSES)
    return nn.Sequential(norm, last), folded_before(norm, last)


@pytest.mark.parametrize("pooling", ["token", "avg"])
@pytest.mark.parametrize("kind", ["linear probe", "without weights", "between two layers"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_in_the_head_it_counts_as_the_layer_that_it_can_be_folded_into(spelling: str, kind: str, pooling: str) -> None:
    whole, folded = (with_head(head, pooling) for head in heads(kind))
    images = random_images()
    found, logits = all_token_scores(whole, images, spelling, TARGET)
    expected, same_logits = all_token_scores(folded, images, spelling, TARGET)
    assert largest_difference(logits, same_logits) < 1e-12
    assert largest_difference(found, expected) < 1e-11  # the same products, multiplied in another order
    assert largest_difference(found.sum(dim=1), logits) < COMPLETE


class OverTokens(nn.Module):
    """A norm of (batch, tokens, channels) over each channel: batch normalisation, or its scale and shift by hand."""

    def __init__(self, norm: nn.BatchNorm1d, form: str) -> None:
        super().__init__()
        self.norm, self.form = norm, form
        self.scale, self.shift = scale_and_shift(norm)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.form == "by hand":
            return tokens * self.scale + self.shift
        if self.form == "all tokens in one row":
            return self.norm(tokens.flatten(0, 1)).view_as(tokens)
        return self.norm(tokens.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("form", ["channels in the middle", "all tokens in one row"])
@pytest.mark.parametrize("spelling", ["decompx:bias=token", "fullgrad:rule=libra", "fullgrad:rule=conservative"])
def test_in_a_block_its_shift_belongs_to_the_token_that_it_is_added_to(spelling: str, form: str) -> None:
    found = []
    for way in (form, "by hand"):
        model = small_vit()
        for block in model.blocks:
            block.norm2 = OverTokens(batch_norm(WIDTH), way)
        found.append(all_token_scores(model.eval(), random_images(), spelling, TARGET))
    (scores, logits), (expected, _) = found
    assert largest_difference(scores, expected) < 1e-11
    assert largest_difference(scores.sum(dim=1), logits) < COMPLETE


def test_without_statistics_of_its_own_what_counts_as_a_bias_is_not_known() -> None:
    model = with_head(
        nn.Sequential(batch_norm(WIDTH, track_running_stats=False), linear(WIDTH, CLASSES)), pooling="token"
    )
    with pytest.raises(UnsupportedModelError, match="over the images of a batch"):
        vitreous.explain(model, random_images(), "fullgrad:rule=libra", TARGET)
