"""Layers that have no gradient, quantised ones above all, are noticed, and nothing is read of gradients past them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import vitreous
from small_models import random_images, small_vit
from vitreous.errors import UnsupportedModelError
from vitreous.methods.spelling import parse

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*quantize")

TARGET = torch.tensor([1, 4])

_LIBRARY = torch.library.Library("vitreous_tests", "DEF")
_LIBRARY.define("forward_only(Tensor x, Tensor weight, Tensor bias) -> Tensor")
_LIBRARY.impl("forward_only", lambda x, weight, bias: nn.functional.linear(x.detach(), weight, bias), "CPU")


@torch.library.custom_op("vitreous_tests::no_formula", mutates_args=())
def no_formula(x: Tensor) -> Tensor:
    return x.clone()


def quantised(model: nn.Module, *, head: bool) -> nn.Module:
    smaller = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    if not head:
        smaller.head = copy.deepcopy(model.head)
    return smaller


class Kernel(nn.Linear):
    """A linear layer by an operator that was registered for the forward pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.vitreous_tests.forward_only(x, self.weight.detach(), self.bias.detach())


class RoundedByHand(nn.Linear):
    """A linear layer on numbers of eight bits; what comes out has never been in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 16).round().clamp(-128, 127).to(torch.int8).to(x.dtype) / 16)


class WithoutFormula(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(no_formula(x))


class Harmless(nn.Linear):
    """A linear layer among much that has no gradient and should have none."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = x.abs().amax() * 2
        largest = torch.maximum(largest, x.detach().amax()) + x.new_zeros(()) + torch.zeros_like(x).amax()
        visible = (x < 2 * largest) & (x.argmax(dim=-1, keepdim=True) >= 0) & x.isfinite()
        values, places = x.sort(dim=-1)
        unsorted = torch.empty_like(x).scatter(-1, places, values)
        one = torch.ones(()).type_as(x) * torch.ones(x.shape[-1]).to(x).view_as(x[0, 0]).expand_as(x)
        return super().forward(one * torch.where(visible, unsorted, torch.full_like(x, 0.0)))


def with_layer(kind: type[nn.Linear], block: int, place: str = "mlp.fc1") -> tuple[nn.Module, nn.Module]:
    """A small model, and the same with a layer of another kind in one of its blocks."""
    plain = small_vit()
    other = copy.deepcopy(plain)
    other.blocks[block].get_submodule(place).__class__ = kind
    return plain, other


def scores(model: nn.Module, method: str, images: Tensor) -> Tensor:
    return vitreous.explain(model, images, method, TARGET).scores[method]


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize(
    "method",
    [
        *("ixg", "cat", "decompx", "decompx.skipplus", "attnlrp", "conservative_lrp", "fullgrad", "gae", "gradtoken"),
        *("gradcam", "integrated_gradients", "smoothgrad", "iia", "tam"),
    ],
)
def test_quantised_blocks_have_no_gradient(method, pool):
    model = quantised(small_vit(dtype=torch.float32, global_pool=pool), head=False)
    with pytest.raises(UnsupportedModelError, match=r"its linear_dynamic\(\) in block 3 has no gradient \(a quantised"):
        scores(model, method, random_images(dtype=torch.float32))


def test_what_a_refusal_promises_on_quantised_blocks_works():
    model, images = quantised(small_vit(dtype=torch.float32), head=False), random_images(dtype=torch.float32)
    with pytest.raises(UnsupportedModelError) as refusal:
        scores(model, "ixg", images)
    served = str(refusal.value).partition("Methods that work on it: ")[2].split(", ")
    assert {"raw_attention", "rollout"} <= set(served)
    assert not any(parse(method).needs(4).gradients for method in served)
    one_run = [method for method in served if not parse(method).readout.runs_again]
    for method in one_run:
        assert scores(model, method, images).isfinite().all()


@pytest.mark.parametrize("method", ["rollout", "ixg", "decompx", "attnlrp", "conservative_lrp", "agcam"])
def test_a_quantised_head_does_not_show_which_tokens_it_reads(method):
    model = quantised(small_vit(dtype=torch.float32), head=True)
    with pytest.raises(
        UnsupportedModelError, match=r"which tokens the head .* linear_dynamic\(\) behind its blocks has"
    ):
        scores(model, method, random_images(dtype=torch.float32))


@pytest.mark.parametrize("kind", [Kernel, RoundedByHand])
@pytest.mark.parametrize("place", ["attn.qkv", "attn.proj", "mlp.fc1"])
def test_gradients_are_read_behind_a_kernel_that_has_none_but_not_past_it(kind, place):
    plain, model = with_layer(kind, block=1, place=place)
    images = random_images()
    for method in ("ixg", "decompx", "gae", "ixg:layer=1"):
        with pytest.raises(UnsupportedModelError, match=r"its (forward_only|to)\(\) in block 1 has no gradient"):
            scores(model, method, images)
    if kind is Kernel:  # the same numbers in float64, and the same operations behind
        for method in ("rollout", "ixg:layer=2", "gradtoken", "decompx:layer=2"):
            torch.testing.assert_close(scores(model, method, images), scores(plain, method, images), rtol=0, atol=0)


def test_an_operator_without_formula_is_named():
    _, model = with_layer(WithoutFormula, block=1)
    with pytest.raises(UnsupportedModelError, match=r"an operator without one \(.*vitreous_tests.no_formula"):
        scores(model, "ixg", random_images())


@pytest.mark.parametrize("place", ["attn.qkv", "mlp.fc1"])
@pytest.mark.parametrize("method", ["ixg", "cat", "gae", "decompx", "attnlrp", "fullgrad"])
def test_constants_places_and_comparisons_are_no_cut(method, place):
    plain, model = with_layer(Harmless, block=1, place=place)
    images = random_images()
    # Sorting and putting back changes no number and adds gradients up in another order at most.
    torch.testing.assert_close(scores(model, method, images), scores(plain, method, images), rtol=1e-12, atol=1e-14)
