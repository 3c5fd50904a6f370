"""ViTs as people write them have the maps of the same function written plainly, and that one has those of autograd."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

import vitreous
from own_attention import Attention, with_attention
from own_models import MODELS
from own_reference import SCALE, Function, PlainViT, images, weights
from vitreous.errors import RefusedMethodsError, UnsupportedModelError

TARGET = torch.tensor([1, 3])
METHODS = ("tokentm", "gradtoken", "gae", "decompx.skipplus", "ixg", "rollout", "attnlrp", "transattr", "globenc")
# Float64: sums in another order through two blocks. A wrong order of heads, tokens or terms is off by about 1.
EXACT = 1e-9
# Relevance is divided by sums that are nearly 0 and multiplied with them again, which enlarges rounding.
RELEVANCE = 1e-7
# By model, methods that the plain spelling serves and this one does not, and why.
OTHERWISE_SERVED = {
    "LinearAttention": (
        {*METHODS} - {"ixg", "transattr"},
        "neither fused nor written as q kᵀ, softmax, A v",
    ),
    "Cosine": ({"transattr"}, r"no relevance rule for its norm\(\); a norm has one as .* F.normalize"),
}
# The functions that a method does not serve in any spelling.
_MORE_THAN_SOFTMAX = ({"transattr"}, "is more than softmax")
NOT_SERVED = {
    Function(attention="sigmoid"): _MORE_THAN_SOFTMAX,
    Function(attention="sink"): _MORE_THAN_SOFTMAX,
    Function(attention="linear"): _MORE_THAN_SOFTMAX,
    Function(positions="rotated"): ({"transattr"}, "rotated positions"),
    Function(norm="rms", feed="swiglu", positions="rotated"): ({"transattr"}, "rotated positions"),
    Function(pooling="weighed"): ({"transattr"}, "depends on the tokens"),
}
NOT_READ = {"TokensInOneRow": "the residual stream of TokensInOneRow has images and tokens in one axis"}


def built(name: str) -> nn.Module:
    return MODELS[name][1](weights()).eval()


def logits_of(output: object) -> Tensor:
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output


@functools.cache
def plain_maps(function: Function) -> tuple[dict[str, Tensor], dict[str, str]]:
    return maps(PlainViT(function, weights()).eval())


def maps(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The maps that a model has, and why it does not have the others."""
    found = vitreous.supported(model, images(), list(METHODS))
    scores = vitreous.explain(model, images(), list(found.methods), TARGET).scores
    return dict(scores), dict(found.refused)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_same_function(name):
    with torch.no_grad():
        found, expected = logits_of(built(name)(images())), PlainViT(MODELS[name][0], weights())(images())
    assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_READ])
def test_its_maps_are_those_of_the_plain_spelling(name):
    function = MODELS[name][0]
    expected, refused_plainly = plain_maps(function)
    found, refused = maps(built(name))
    for method in METHODS:
        if method in expected and method in found:
            tolerance = RELEVANCE if method == "transattr" else EXACT
            difference = float((found[method] - expected[method]).abs().max() / expected[method].abs().max())
            assert difference < tolerance, method
    allowed, reason = OTHERWISE_SERVED.get(name, (set(), ""))
    assert refused.keys() - refused_plainly.keys() == allowed
    for method in allowed:
        with pytest.raises(RefusedMethodsError, match=reason):
            vitreous.explain(built(name), images(), method)


@pytest.mark.parametrize("function", sorted({function for function, _ in MODELS.values()}, key=str), ids=str)
def test_the_plain_spelling_has_the_maps_of_autograd(function):
    """x_0 times its gradient; of a class token's model also rollout and GAE, by products of whole matrices."""
    model = PlainViT(function, weights()).eval()
    found, refused = plain_maps(function)
    assert refused.keys() == NOT_SERVED.get(function, (set(), ""))[0]
    assert all(NOT_SERVED[function][1] in why for why in refused.values())
    logits = model(images())
    output = logits.gather(1, TARGET[:, None]).sum()
    slope, *slopes = torch.autograd.grad(output, [model.stream, *model.matrices])
    products = (model.stream * slope).sum(dim=-1)[:, function.prefix :]
    close(found["ixg"], products)
    if function.pooling == "first":
        one = torch.eye(model.stream.shape[1], dtype=torch.float64)
        rollout = gae = one
        for whole, slope_of_whole in zip(model.matrices, slopes, strict=True):
            matrix, gradient = (part[..., -len(one) :] for part in (whole, slope_of_whole))  # without learned keys
            rollout = (matrix.mean(dim=1) + one) / 2 @ rollout  # rows that do not sum to 1 are left as they are
            gae = gae + (gradient * matrix).clamp(min=0).mean(dim=1) @ gae
        close(found["rollout"], rollout[:, 0, function.prefix :])
        close(found["gae"], gae[:, 0, function.prefix :])


def close(found: Tensor, expected: Tensor) -> None:
    expected = expected.detach()
    assert float((found - expected).abs().max() / expected.abs().max()) < EXACT


@pytest.mark.parametrize("name", NOT_READ)
def test_a_model_that_is_not_read_says_why(name):
    with pytest.raises(UnsupportedModelError, match=NOT_READ[name]):
        vitreous.explain(built(name), images(), "ixg")


class SinglePrecisionSoftmax(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax((q @ k.mT * SCALE).float(), dim=-1).to(v.dtype) @ v


class HalfPrecisionAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.bfloat16() for part in self.split(x))
        return self.merge(F.scaled_dot_product_attention(q, k, v).to(x.dtype))


# Of the largest score: numbers of 24 bits, and of 8; nothing of a map may get lost besides.
@pytest.mark.parametrize(("attention", "tolerance"), [(SinglePrecisionSoftmax, 1e-5), (HalfPrecisionAttention, 0.1)])
def test_islands_of_lower_precision(attention, tolerance):
    methods = ["gae", "ixg", "rollout", "decompx.skipplus", "gradtoken", "attnlrp", "tokentm"]
    found = vitreous.explain(with_attention(attention)(weights()).eval(), images(), methods, TARGET).scores
    expected, _ = plain_maps(Function())
    for method in methods:
        difference = float((found[method] - expected[method]).abs().max() / expected[method].abs().max())
        assert difference < tolerance, method
