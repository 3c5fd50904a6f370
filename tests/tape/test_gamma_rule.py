"""AttnLRP with the gamma rule: both kinds of layers by plain loops, the whole model by lxt and zennit."""

from __future__ import annotations

import importlib
from types import MethodType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import vitreous
from small_models import largest_difference, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.speed.peers import LXT
from vitreous.tape.rules import RULES, own_rules
from vitreous.tape.rules.gradient_rules import EmbeddingCall, LinearCall
from vitreous.tape.rules.lrp import gamma_rule

# Float64: sums of some dozens of terms in another order.
SAME = {"rtol": 1e-11, "atol": 1e-12}


def relevance_by_loops(inputs: Tensor, weight: Tensor, bias: Tensor, relevance: Tensor, gamma: float) -> Tensor:
    """The generalised gamma rule for one row, term by term: R_i = sum_j share_ji R_j / sum of all shares."""
    found = torch.zeros_like(inputs)
    for j in range(len(weight)):
        sign = 1 if float(weight[j] @ inputs + bias[j]) > 0 else -1
        terms = [float(w * x) for w, x in zip(weight[j], inputs, strict=True)]
        shares = [term * (1 + gamma) if term * sign > 0 else term for term in terms]
        constant = float(bias[j]) * (1 + gamma if float(bias[j]) * sign > 0 else 1)
        for i, share in enumerate(shares):
            found[i] += share * relevance[j] / (sum(shares) + constant)
    return found


def test_a_linear_layer_is_the_sum_over_its_terms():
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((6, 5), (6,)))
    inputs, gradient = (torch.randn(3, size, generator=generator, dtype=torch.float64) for size in (5, 6))
    (slope,) = gamma_rule(0.3, 0.0, "attnlrp").backward_call(LinearCall(weight, bias), (inputs,), gradient)
    output = inputs @ weight.T + bias
    expected = [relevance_by_loops(x, weight, bias, r, 0.3) for x, r in zip(inputs, gradient * output, strict=True)]
    torch.testing.assert_close(slope * inputs, torch.stack(expected), **SAME)


def test_a_patch_embedding_is_a_linear_layer_on_every_patch():
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((4, 3, 2, 2), (4,)))
    pixels = torch.randn(1, 3, 4, 4, generator=generator, dtype=torch.float64)
    gradient = torch.randn(1, 4, 2, 2, generator=generator, dtype=torch.float64)

    def convolve(picture: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(picture, kernel, stride=2)

    call = EmbeddingCall(lambda picture: F.conv2d(picture, weight, bias, stride=2), weight, convolve)
    (slope,) = gamma_rule(0.0, 0.25, "attnlrp").backward_call(call, (pixels,), gradient)
    relevance = gradient * call.function(pixels)
    expected = torch.zeros_like(pixels)
    for row in range(2):
        for column in range(2):
            window = (0, slice(None), slice(2 * row, 2 * row + 2), slice(2 * column, 2 * column + 2))
            flat = relevance_by_loops(
                pixels[window].flatten(), weight.flatten(1), bias, relevance[0, :, row, column], 0.25
            )
            expected[window] = flat.view(3, 2, 2)
    torch.testing.assert_close(slope * pixels, expected, **SAME)


@pytest.mark.parametrize("gamma", [0.05, 1.0, 100.0])
def test_without_bias_all_relevance_arrives(gamma):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    inputs, gradient = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (5, 7))
    (slope,) = gamma_rule(gamma, 0.0, "attnlrp").backward_call(LinearCall(weight, None), (inputs,), gradient)
    torch.testing.assert_close((slope * inputs).sum(1), (gradient * (inputs @ weight.T)).sum(1), **SAME)


def test_an_output_of_0_has_no_relevance_and_breaks_nothing():
    weight = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    inputs, gradient = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    (slope,) = gamma_rule(0.5, 0.0, "attnlrp").backward_call(LinearCall(weight, None), (inputs,), gradient)
    assert bool((slope == 0).all())


def test_gamma_0_is_the_gradient_of_attnlrp():
    """At the first block the same numbers as ``attnlrp``; the map is read at the pixels, which another rule leaves."""
    model, images = small_vit(), random_images()
    plain, none = "attnlrp", "attnlrp_gamma:linear=0,convolution=0"
    scores = vitreous.explain(model, images, [plain, none, "attnlrp_gamma"], 3).scores
    # Relevance of the embedding's bias and of the positions is lost on the way from the tokens to the pixels.
    with torch.no_grad():
        model.pos_embed.zero_()
        model.patch_embed.proj.bias.zero_()
    again = vitreous.explain(model, images, [plain, none], 3).scores
    assert largest_difference(again[none], again[plain]) < 1e-10
    assert largest_difference(scores["attnlrp_gamma"], scores[none]) > 0.1


@pytest.mark.parametrize("softmax", ["attnlrp", "constant"])
@pytest.mark.parametrize(("linear", "convolution"), [(0.05, 0.25), (1.0, 100.0), (0.0, 0.1)])
def test_agrees_with_lxt_and_zennit(monkeypatch, softmax, linear, convolution):
    """The authors' program: lxt's patches, and zennit's gamma rule changed by lxt, on the modules of timm's model."""
    if LXT.problem:
        pytest.skip(LXT.problem)
    rules = pytest.importorskip("zennit.rules", reason="zennit comes with vitreous[peers]")
    composites = importlib.import_module("zennit.composites")
    core = importlib.import_module("zennit.core")
    patches = LXT.load()
    changed = importlib.import_module("lxt.efficient.zennit_patches")
    model, images = small_vit(), random_images()
    name = f"attnlrp_gamma:linear={linear},convolution={convolution},softmax={softmax},resolution=pixel"
    found = vitreous.explain(model, images, name, 3).scores[name]

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = MethodType(patches.layer_norm_forward, module)
        elif isinstance(module, nn.GELU):
            module.original_forward = module.forward
            module.forward = MethodType(patches.non_linear_forward, module)
    wrap = patches.wrap_attention_forward if softmax == "attnlrp" else patches.cp_wrap_attention_forward
    fused = F.scaled_dot_product_attention
    wrapped = wrap(lambda _, *args, **kwargs: fused(*args, **kwargs))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: wrapped(None, *args, **kwargs))
    monkeypatch.setattr(core.BasicHook, "forward", changed.forward)
    monkeypatch.setattr(core.BasicHook, "backward", changed.backward)
    # Both add a small number to every denominator, 1e-6 by default; ours needs none.
    layers = [(nn.Conv2d, rules.Gamma(convolution, 1e-13)), (nn.Linear, rules.Gamma(linear, 1e-13))]
    pixels = images.clone().requires_grad_()
    model.requires_grad_(requires_grad=False)
    with composites.LayerMapComposite(layers).context(model) as hooked:
        hooked(pixels)[:, 3].sum().backward()
    expected = (pixels * pixels.grad).sum(dim=1).flatten(1).detach()
    # lxt divides by inputs kept 1e-10 away from 0, and these may be as small as 1e-4.
    assert largest_difference(found, expected) < 1e-6


def test_settings_are_no_rules_of_users():
    vitreous.methods.spelling.parse("attnlrp_gamma:linear=0.7")
    assert "attnlrp_gamma_0.7_0.25" in RULES
    assert not own_rules()


def test_a_negative_gamma_is_refused():
    with pytest.raises(MethodError, match="from 0 up"):
        vitreous.methods.spelling.parse("attnlrp_gamma:linear=-1")
