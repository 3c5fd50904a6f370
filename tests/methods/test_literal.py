"""Methods against slow, literal transcriptions of their papers' equations (``tests/support/literal``), in float64.

Both sides do the same arithmetic in another order, so they may differ by rounding only: some 1e-15 per step, a few
hundred steps and sums of some hundred terms. ``EXACT`` allows 1e-10 of the largest score, five digits more than that,
and would notice any term that is missing, doubled or taken from the wrong layer.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

import vitreous
from literal import attention, decompx, forward, gradtoken, tokentm
from small_models import CLASSES, largest_difference, random_images, small_case, small_vit
from vitreous.speed.timing import one_thread
from vitreous.tape.rules.gradient_rules import ElementwiseCall, FrozenRule

EXACT = 1e-10

MODELS = {
    "even depth": {"depth": 4, "seed": 1},
    "odd depth, registers": {"depth": 3, "seed": 2, "reg_tokens": 2, "no_embed_class": True},
    "registers with positions, no LayerScale": {"depth": 3, "seed": 3, "reg_tokens": 3, "init_values": None},
}
TARGETS = (0, 3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def case(request):
    """A model, two images, and the literal forward pass of each."""
    model, pictures = small_case(**MODELS[request.param])
    return model, pictures, [forward.run(model, picture) for picture in pictures]


def check(case, literals) -> None:
    """Each spelling's ``literal(record, target)`` gives what vitreous gives, for both images and both targets."""
    model, pictures, records = case
    found = vitreous.explain(model, pictures, list(literals), target=[TARGETS] * len(pictures))
    for spelling, literal in literals.items():
        expected = [torch.stack([literal(record, target) for target in TARGETS]) for record in records]
        assert largest_difference(found.scores[spelling], torch.stack(expected)) < EXACT, spelling


def test_the_literal_forward_pass_is_the_model(case):
    model, pictures, records = case
    logits = torch.stack([record.logits for record in records])
    assert largest_difference(logits, model(pictures)) < 1e-12


def test_the_models_tell_images_classes_and_patches_apart(case):
    """Otherwise agreement would mean little: wrong rows or classes could look right."""
    model, pictures, _ = case
    scores = vitreous.explain(model, pictures, ["gae", "decompx"], target=[[0, 3], [0, 3]]).scores
    for maps in scores.values():
        flat = maps.flatten(0, 1)
        spread = flat.std(dim=1, keepdim=True)
        assert (spread > 0.01 * flat.abs().amax(dim=1, keepdim=True)).all()
        for first, second in itertools.combinations(flat, 2):
            assert largest_difference(first, second) > 0.01


def test_raw_attention_and_rollout(case):
    literals = {"raw_attention": lambda record, _: attention.raw_attention(record)}
    literals["rollout"] = lambda record, _: attention.rollout(record)
    literals["rollout:start=1"] = lambda record, _: attention.rollout(record, 1)
    check(case, literals)


@pytest.mark.parametrize("name", ["attcam", "gae", "gradsam", "attcat"])
def test_gradient_attention_methods(case, name):
    check(case, {name: getattr(attention, name)})


def test_attcam_is_compared_where_it_is_not_zero(case):
    """Where all heads have a negative mean gradient AttCAM is zero, and agreement on zeros alone proves nothing."""
    assert any(attention.attcam(record, target).any() for record in case[2] for target in TARGETS)


TOKENTM = [
    "",
    "gradient=logit",
    "components=baseline",
    "components=af",
    "components=af_l",
    "necc=rescaled",
    "gradient=logit,components=af_l",
    "gradient=logit,components=baseline",
    "depth=1",
    "depth=2",
    "depth=2,necc=rescaled,gradient=logit",
    "depth=3",
]


@pytest.mark.parametrize("options", TOKENTM, ids=lambda options: options or "defaults")
def test_tokentm(case, options):
    given = dict(item.split("=") for item in options.split(",") if item)
    if "depth" in given:
        given["depth"] = int(given["depth"])
    spelling = f"tokentm:{options}" if options else "tokentm"
    check(case, {spelling: lambda record, target: tokentm.tokentm(case[0], record, target, **given)})


PROPAGATIONS = ("none", "rollout_elementwise", "rollout_matrix", "average_elementwise", "average_matrix")


@pytest.mark.parametrize("propagation", PROPAGATIONS)
def test_gradtoken(case, propagation):
    """Both head integrations and all depths of propagation."""
    literals = {}
    for heads, depth in itertools.product(("relu_average", "average"), (None, 0, 1, 2)):
        options = {"propagation": propagation, "heads": heads} | ({} if depth is None else {"depth": depth})
        spelling = "gradtoken:" + ",".join(f"{name}={value}" for name, value in options.items())
        literals[spelling] = partial(gradtoken.gradtoken, **options)
    check(case, literals)


def test_gradtoken_defaults_are_variant_4_ii(case):
    check(case, {"gradtoken": gradtoken.gradtoken})


@pytest.fixture(scope="module")
def decompositions(case):
    """For every image and start layer: token parts (n, classes) and bias part (classes,)."""
    model, _, records = case
    with torch.no_grad():
        return [[decompx.decompx(model, record, start) for start in range(record.depth)] for record in records]


def test_the_literal_decomposition_adds_up_to_the_logits(case, decompositions):
    _, _, records = case
    for record, by_start in zip(records, decompositions, strict=True):
        for tokens, bias in by_start:
            assert largest_difference(tokens.sum(dim=0) + bias, record.logits) < 1e-12


def every_class(case, spelling):
    model, pictures, _ = case
    return vitreous.explain(model, pictures, [spelling], target=[list(range(CLASSES))] * len(pictures)).scores[spelling]


def patches_of(case, parts):
    """(n, classes) -> (classes, patches)."""
    return parts[case[2][0].prefix :].T


def test_decompx_from_every_start_layer(case, decompositions):
    for start in range(case[2][0].depth):
        expected = torch.stack([patches_of(case, by_start[start][0]) for by_start in decompositions])
        assert largest_difference(every_class(case, f"decompx:layer={start}"), expected) < EXACT
        if start == 0:
            assert largest_difference(every_class(case, "decompx"), expected) < EXACT


def test_decompx_with_every_bias_shared_equally(case):
    model, _, records = case
    for start in range(records[0].depth):
        with torch.no_grad():
            parts = [decompx.decompx(model, record, start, shared=True) for record in records]
        assert all((bias == 0).all() for _, bias in parts)
        expected = torch.stack([patches_of(case, tokens) for tokens, _ in parts])
        assert largest_difference(every_class(case, f"decompx:bias=equal,layer={start}"), expected) < EXACT


@pytest.mark.parametrize(
    ("aggregation", "first_layer"),
    [
        ("plus", lambda depth: 0),
        ("skipplus", lambda depth: (depth + 1) // 2),
        ("skipplus:half=floor", lambda depth: depth // 2),
    ],
    ids=["plus", "skipplus", "skipplus as the program has it"],
)
def test_decompx_aggregations(case, decompositions, aggregation, first_layer):
    first = first_layer(case[2][0].depth)
    expected = torch.stack(
        [sum(patches_of(case, tokens) for tokens, _ in by_start[first:]) for by_start in decompositions]
    )
    assert largest_difference(every_class(case, f"decompx.{aggregation}"), expected) < EXACT


@pytest.mark.parametrize(
    "methods", [["decompx"], ["decompx.skipplus", "gae", "tokentm"], ["decompx", "ixg", "gae.plus"]]
)
def test_the_frozen_rule_leaves_the_logits_unchanged(case, methods):
    """1e-12 of the largest logit: attention may be computed by another kernel than the model's own."""
    model, pictures, _ = case
    assert largest_difference(vitreous.explain(model, pictures, methods).logits, model(pictures)) < 1e-12


@pytest.mark.parametrize(("function", "slope"), [(torch.nn.functional.gelu, 0.5), (torch.nn.functional.relu, 0.0)])
def test_the_gate_at_zero_is_the_slope_there(function, slope):
    """f(u)/u is 0/0 at 0, which real images reach; its limit is f'(0)."""
    call = ElementwiseCall(torch.tensor([-1.0, 0.0, -0.0, 2.0]), function, slope)
    gates = FrozenRule().backward_activation(call, torch.ones(4))
    expected = [float(function(torch.tensor(-1.0))) / -1, slope, slope, float(function(torch.tensor(2.0))) / 2]
    assert torch.equal(gates, torch.tensor(expected))


def test_hidden_units_that_are_exactly_zero_leave_the_decomposition_exact():
    model = small_vit(depth=2, seed=6)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc1.weight[::3] = 0
            block.mlp.fc1.bias[::3] = 0
    pictures = random_images(1)
    record = forward.run(model, pictures[0])
    assert (record.hidden[0] == 0).any()
    with torch.no_grad():
        expected, _ = decompx.decompx(model, record, 0)
    found = vitreous.explain(model, pictures, ["decompx"], target=2).scores["decompx"][0]
    assert largest_difference(found, expected[record.prefix :, 2]) < EXACT
