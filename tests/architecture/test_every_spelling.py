"""What is recorded of a model does not depend on how it is written: values, gradients and maps, against plain autograd.

The reference is written out in tensor operations and shares no code with the models; its values have a graph, so that
true gradients can be asked for.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import vitreous
from spelling_reference import DEPTH, Run, images, reference, weights
from spelling_variants import ALL, SPELLINGS, build
from vitreous.architecture import find_architecture
from vitreous.errors import RefusedMethodsError
from vitreous.tape import GradientNeeds, Needs, Pass, Plan, record

# Float64: sums in another order through three blocks. A wrong tensor, a wrong order of heads or a missing term is off
# by about 1.
AGREES = {"rtol": 1e-9, "atol": 1e-10}
TARGET = torch.tensor([1, 3])
LAYERS = frozenset(range(DEPTH))
PLAIN = Pass("plain", "logit")
# A is nowhere in these: it is divided by the sums behind the values, or there are two streams.
WITHOUT_ATTENTION = {("plain", "divided_behind_the_values"), ("plain", "two_streams")}
WITHOUT_STREAM = {("plain", "two_streams")}
READ = [pair for pair in ALL if pair not in WITHOUT_STREAM]
ATTENDED = [pair for pair in ALL if pair not in WITHOUT_ATTENTION]


@cache
def written_out(variant: str) -> Run:
    """The reference of a variant; its graph is kept."""
    return reference(weights(), images(), variant)


@cache
def model_of(variant: str, name: str) -> nn.Module:
    """The same model for every test: none changes it, and its architecture is found once."""
    return build(variant, name, weights())


@cache
def fused_maps(variant: str) -> dict[str, Tensor]:
    """The maps of the first spelling, one method at a time."""
    first = model_of(variant, next(iter(SPELLINGS[variant])))
    return {method: vitreous.explain(first, images(), method, TARGET).scores[method] for method in METHODS}


def gradients_of(run, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run.logits.gather(1, TARGET[:, None]).sum(), wanted, retain_graph=True)


@pytest.mark.parametrize(("variant", "name"), READ, ids=lambda value: value)
def test_blocks_and_stream(variant, name):
    pictures, model, run = images(), model_of(variant, name), written_out(variant)
    architecture = find_architecture(model, pictures)
    assert architecture.depth == DEPTH
    tokens = frozenset(range(DEPTH))
    needs = Needs(tokens=tokens, gradients={PLAIN: GradientNeeds(tokens=tokens)})
    with record(model, architecture, pictures, Plan(DEPTH, needs)) as tape:
        found = tape.backward(PLAIN, TARGET, needs.gradients[PLAIN])
        assert tape.layout.grid == (4, 4)
        for layer, expected in enumerate(gradients_of(run, run.x[:-1])):
            torch.testing.assert_close(tape.tokens(layer), run.x[layer].detach(), **AGREES)
            torch.testing.assert_close(found.tokens[layer], expected, **AGREES)


@pytest.mark.parametrize(("variant", "name"), ATTENDED, ids=lambda value: value)
def test_attention_and_its_gradient(variant, name):
    """A, v, and dy/dA = (dy/dO) vᵀ of every head."""
    pictures, model, run = images(), model_of(variant, name), written_out(variant)
    architecture = find_architecture(model, pictures)
    needs = Needs(attention=LAYERS, gradients={PLAIN: GradientNeeds(attention=LAYERS)})
    with record(model, architecture, pictures, Plan(DEPTH, needs)) as tape:
        assert tape.other_attention is None
        found = tape.backward(PLAIN, TARGET, needs.gradients[PLAIN])
        for layer, expected in enumerate(gradients_of(run, run.attention)):
            call = tape.attention(layer)
            torch.testing.assert_close(call.rows(slice(None)), run.attention[layer].detach(), **AGREES)
            torch.testing.assert_close(call.value, run.v[layer].detach(), **AGREES)
            gradient = found.outputs[layer] @ call.value.transpose(-2, -1)
            torch.testing.assert_close(gradient, expected, **AGREES)


# What reads all parts of a block: W_O, both norms, W_V, q and k, rules, tokens that are dropped.
METHODS = [
    "tokentm",
    "gradtoken",
    "decompx.skipplus",
    "gae",
    "ixg",
    "gradcam",
    "globenc",
    "fullgrad:rule=libra",
    "alti",
]
METHODS += ["rise:by=drop,budget=4", "atman:budget=4"]


@pytest.mark.parametrize(
    ("variant", "name"), [pair for pair in ATTENDED if pair[0] == "plain"], ids=lambda value: value
)
def test_maps_are_those_of_the_fused_spelling(variant, name):
    """The same function has the same maps, or a method is refused; it is never served with another map."""
    pictures, model = images(), model_of(variant, name)
    for method in METHODS:
        expected = fused_maps(variant)[method]
        try:
            found = vitreous.explain(model, pictures, method, TARGET).scores[method]
        except RefusedMethodsError:
            # Where x and x + f(x) are interpolated, what reaches the stream is no linear map of the heads by itself.
            assert name == "sum_lerp", method
            continue
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))
