"""Attention masks that depend on the tokens: their gradient counts, however the attention is spelled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import vitreous
from small_models import largest_difference, random_images, randomise, small_vit
from vitreous.errors import UnsupportedModelError
from vitreous.speed.timing import one_thread

# Float64: the same arithmetic in another order, 1e-15 per step; a lost gradient shows far above 1e-10.
EXACT = 1e-10
FORMS = ["fused", "by hand", "multi-head"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


class Masked(nn.Module):
    """Attention whose scores get, by head, a number of the token that is looked at."""

    def __init__(self, form: str, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.called = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mask = nn.Linear(width, heads)

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        batch, count, width = tokens.shape
        mask = self.mask(tokens).permute(0, 2, 1)[:, :, None, :].expand(-1, -1, count, -1)
        if self.form == "multi-head":
            return self.called(tokens, tokens, tokens, attn_mask=mask.flatten(0, 1))[0]
        projected = F.linear(tokens, self.called.in_proj_weight, self.called.in_proj_bias)
        query, key, value = projected.reshape(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.form == "fused":
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
            mixed = (scores + mask).softmax(dim=-1) @ value
        return self.called.out_proj(mixed.transpose(1, 2).reshape(batch, count, width))


def masked(form: str) -> nn.Module:
    model = small_vit(depth=3)
    for block in model.blocks:
        block.attn = Masked(form)
    return randomise(model, 3).double()


def input_times_gradient(model: nn.Module, images: Tensor, target: int) -> Tensor:
    """By autograd alone."""
    streams = []

    def catch(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        streams.append(arguments[0])

    hook = model.blocks[0].register_forward_pre_hook(catch)
    logits = model(images)
    hook.remove()
    (slope,) = torch.autograd.grad(logits[:, target].sum(), streams)
    return (streams[0] * slope).sum(dim=-1)[:, 1:]


@pytest.mark.parametrize("beside", [[], ["decompx"], ["gae"]], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_input_times_gradient_is_that_of_autograd(form, beside):
    """Also where other methods make the recording keep A, or put attention under another rule."""
    model, images = masked(form), random_images()
    found = vitreous.explain(model, images, ["ixg", *beside], 1).scores["ixg"]
    assert largest_difference(found, input_times_gradient(model, images, 1)) < EXACT


@pytest.mark.parametrize("form", ["fused", "multi-head"])
def test_other_methods_give_what_they_give_for_attention_that_is_written_out(form):
    methods = ["gae", "fullgrad", "decompx", "fullgrad:rule=libra", "conservative_lrp", "rollout", "attnlrp", "agcam"]
    found, expected = (vitreous.explain(masked(each), random_images(), methods, 1).scores for each in (form, "by hand"))
    for method in methods:
        assert largest_difference(found[method], expected[method]) < EXACT, method


@pytest.mark.parametrize(
    ("method", "reason"), [("gradtoken", "made of more than q and k"), ("transattr", "is more than softmax")]
)
@pytest.mark.parametrize("form", ["fused", "multi-head"])
def test_what_needs_q_and_k_alone_is_refused(form, method, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        vitreous.explain(masked(form), random_images(1), method)
