"""Spellings: ``name[.aggregation...][:option=value,...]``; what is equal, what is refused, and that all of them run.

``SAME`` compares sums of the same float64 numbers in another order: 1e-12 of the largest score.
"""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
import torch

import vitreous
from few_evaluations import with_few
from literal import forward
from small_models import PATCHES, largest_difference, random_images, small_vit
from vitreous.errors import MethodError, VitreousError
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel
from vitreous.models.preprocessing import Preprocessing
from vitreous.speed.timing import one_thread

SAME = 1e-12
INFOS = {info.name: info for info in vitreous.list_methods()}
DEPTH = 5  # odd, so that the two halves of SkipPLUS differ


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=DEPTH, seed=5, reg_tokens=1)


@pytest.fixture(scope="module")
def ask(model):
    """Scores of one or several spellings for two images and two classes."""

    def explain(*spellings):
        scores = vitreous.explain(model, random_images(2), spellings, target=[[0, 2], [3, 1]]).scores
        return scores[spellings[0]] if len(spellings) == 1 else [scores[spelling] for spelling in spellings]

    return explain


# What is equal --------------------------------------------------------------------------------------------------------

EQUAL = [
    ("gae.rollout", "gae"),
    ("gae.plus", "gradsam"),
    ("gradsam.plus", "gradsam"),
    ("gradsam.rollout", "gae"),
    ("ixg.plus", "cat"),
    ("cat:layer=0", "ixg"),
    ("attixg.plus", "attcat"),
    ("attixg:rule=frozen", "attcat:layer=0,rule=frozen"),
    ("raw_attention.rollout", "rollout"),
    ("rollout:layer=-1", "raw_attention"),
    ("raw_attention:layer=4", "raw_attention"),
    ("rollout:residual=half", "rollout"),
    ("gae:residual=add", "gae"),
    ("rollout:start=0", "rollout"),
    ("rollout:depth=5", "rollout"),
    ("attcam:layer=4", "attcam"),
    ("ixg:layer=0", "ixg"),
    ("ixg:layer=-5", "ixg"),
    ("ixg:rule=plain", "ixg"),
    ("ixg:rule=frozen", "decompx"),
    ("cat:rule=frozen", "decompx.plus"),
    ("cat.skipplus:rule=frozen", "decompx.skipplus"),
    ("decompx.plus:start=0", "decompx.plus"),
    ("decompx.skipplus:half=ceil", "decompx.skipplus"),
    ("decompx.skipplus:half=ceil", "decompx.plus:start=3"),
    ("decompx.skipplus:half=floor", "decompx.plus:start=2"),
    ("gae.skipplus", "gae.plus:start=-2"),
    ("tokentm:gradient=probability,components=af_l_necc,necc=paper,variant=paper", "tokentm"),
    ("tokentm:depth=5", "tokentm"),
    ("tokentm:start=0,residual=default", "tokentm"),
    ("tokentm:residual=add", "tokentm"),
    ("tokentm:components=baseline,start=0,residual=none", "tokentm:components=baseline"),
    ("tam.rollout:start=0,steps=20", "tam"),
    ("gradtoken:propagation=average_matrix,heads=relu_average", "gradtoken"),
    ("gradtoken:depth=4", "gradtoken"),
    ("gradtoken:depth=0", "gradtoken:propagation=none"),
    ("gradtoken:layer=-1", "gradtoken"),
    (" gae: start = 1 , depth = 2 ", "gae:depth=2,start=1"),
]


@pytest.mark.parametrize(("spelling", "other"), EQUAL)
def test_two_spellings_of_one_thing(ask, spelling, other):
    found, expected = ask(spelling.strip()), ask(other)
    assert expected.any()
    assert largest_difference(found, expected) < SAME


DIFFERENT = [
    ("decompx.skipplus:half=floor", "decompx.skipplus"),
    ("decompx.plus", "decompx.skipplus"),
    ("rollout:start=1", "rollout"),
    ("rollout:depth=4", "rollout"),
    ("rollout:residual=none", "rollout"),
    ("gae", "gradsam"),
    ("ixg", "decompx"),
    ("ixg", "ixg:layer=1"),
    ("attixg", "attixg:rule=frozen"),
    ("attcat", "attcat:pairing=next"),
    ("gradtoken:depth=1", "gradtoken"),
    ("tokentm:depth=3", "tokentm"),
    ("tokentm:start=1", "tokentm"),
    ("decompx.skipplus.propagate", "decompx.skipplus"),
    *itertools.combinations(
        ["tokentm", "tokentm:gradient=logit", "tokentm:necc=rescaled", "tokentm:variant=third_party"]
        + [f"tokentm:components={name}" for name in ("baseline", "af", "af_l")],
        2,
    ),
    *itertools.combinations(
        [
            f"gradtoken:propagation={propagation},heads={heads}"
            for propagation in INFOS["gradtoken"].options["propagation"].choices
            for heads in ("relu_average", "average")
        ],
        2,
    ),
]


def test_options_make_a_difference(ask):
    """An option that is read but not used would pass all tests of equality."""
    spellings = list(dict.fromkeys(spelling for pair in DIFFERENT for spelling in pair))
    scores = dict(zip(spellings, ask(*spellings), strict=True))
    for spelling, other in DIFFERENT:
        # Compared as directions, so that a mere factor does not count as a difference.
        one, two = (scores[name].flatten() / scores[name].norm() for name in (spelling, other))
        assert (one - two).norm() > 1e-3, (spelling, other)


@pytest.mark.parametrize("name", ["ixg", "decompx", "gae", "raw_attention", "attcam", "attixg", "gradient", "tokentm"])
def test_plus_is_the_sum_of_the_layers(ask, name):
    layers = ask(*(f"{name}:layer={layer}" for layer in range(DEPTH)))
    # Against the largest layer: in the last block all that a patch does goes through a LayerNorm, which is blind to the
    # length of its input, so that input x gradient is 0 there but for LayerNorm's epsilon and rounding.
    scale = max(layer.abs().max() for layer in layers)
    for start in range(DEPTH):
        assert (ask(f"{name}.plus:start={start}") - sum(layers[start:])).abs().max() < SAME * scale


@pytest.mark.parametrize("spelling", ["decompx.skipplus", "ixg", "gae"])
def test_propagate_multiplies_by_the_average_attention_of_the_lower_blocks(model, ask, spelling):
    """GradToken's eq. 13 for any map: (1/B) times the sum over all blocks but the last, between patches."""
    before, after = ask(spelling, f"{spelling}.propagate")
    for number, image in enumerate(random_images(2)):
        record = forward.run(model, image)
        total = sum(forward.mean(record.attention[block]) for block in range(DEPTH - 1))
        patches = slice(record.prefix, None)
        expected = before[number] @ (total / DEPTH)[patches, patches].T
        assert largest_difference(after[number], expected) < 1e-10  # another implementation of the forward pass


def test_defaults_of_one_block():
    """A model of one block: halves, products and lower attention are all of or nothing of it."""
    model = small_vit(depth=1)
    names = ["decompx", "decompx.plus", "decompx.skipplus", "decompx.skipplus.propagate", "gae", "gradsam"]
    scores = vitreous.explain(model, random_images(1), names).scores
    for name in names[1:4]:
        assert torch.equal(scores[name], scores["decompx"]), name
    assert largest_difference(scores["gae"], scores["gradsam"]) < SAME
    with_nothing_below = vitreous.explain(model, random_images(1), ["gradtoken", "gradtoken:propagation=none"]).scores
    assert torch.equal(*with_nothing_below.values())


# What runs ------------------------------------------------------------------------------------------------------------


def all_combinations():
    for info in INFOS.values():
        combining = [name for name in info.aggregations if name != "propagate"]
        for aggregation in ["", *combining]:
            path = f"{info.name}.{aggregation}" if aggregation else info.name
            yield path
            if "propagate" in info.aggregations:
                yield f"{path}.propagate"


@pytest.fixture(scope="module")
def every_map(model):
    """Few evaluations each: in a thousand of them nothing else is run than in twelve."""
    return vitreous.explain(model, random_images(2), every_spelling())


def every_spelling():
    return [with_few(spelling) for spelling in all_combinations()]


def test_every_method_with_every_aggregation_it_lists_gives_finite_maps(every_map):
    spellings = every_spelling()
    assert len(spellings) > 50
    assert list(every_map.scores) == spellings
    for spelling, maps in every_map.scores.items():
        assert maps.shape == (2, PATCHES), spelling
        assert torch.isfinite(maps).all(), spelling


FOR_TEXTS = {("baseline", "pad"), ("baseline", "mask")}


@pytest.mark.parametrize(("option", "value"), sorted(FOR_TEXTS))
def test_values_for_texts_are_refused_on_pictures(model, option, value):
    with pytest.raises(VitreousError, match="text"):
        vitreous.explain(model, random_images(1), f"integrated_gradients:{option}={value}")


def test_every_value_of_every_option_runs(model):
    spellings = [
        with_few(f"{info.name}:{name}={value}")
        for info in INFOS.values()
        for name, option in info.options.items()
        for value in option.choices or (("2", "3") if option.kind is int else ("0.25", "0.5"))
        if (name, value) not in FOR_TEXTS
    ]
    # Loaded by name, so that it is known what black is.
    loaded = LoadedModel("small", model, Preprocessing((32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), None)
    for spelling, maps in vitreous.explain(loaded, random_images(1), spellings).scores.items():
        assert torch.isfinite(maps).all(), spelling


def test_unsigned_methods_have_no_negative_scores(every_map):
    standard_scores = {with_few(name) for name in ("twoscale", "refined")}  # 0 is the mean patch, tested there
    for spelling, maps in every_map.scores.items():
        if not every_map.signed[spelling] and spelling not in standard_scores:
            assert (maps >= 0).all(), spelling


def test_signed_methods_do_have_negative_scores(ask):
    names = [with_few(name) for name, info in INFOS.items() if info.signed]
    for name, maps in zip(names, ask(*names), strict=True):
        assert (maps < 0).any(), name
    assert parse("gradtoken:heads=average").signed
    assert not parse("gradtoken").signed


def test_the_result_is_named_as_it_was_asked_for(model):
    spellings = ["gae", "gae.rollout", "ixg:layer=1", "decompx.skipplus.propagate:half=floor"]
    assert list(vitreous.explain(model, random_images(1), spellings).scores) == spellings


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = {
    "gea": "no method 'gea'; did you mean gae",
    "GAE": "did you mean gae",
    "tokentn": "did you mean tokentm",
    "grad_token": "did you mean gradtoken",
    "xyzzy": "there is no method 'xyzzy'",
    "": "there is no method",
    ".plus": "there is no method ''",
    "gae plus": "there is no method 'gae plus'",
    "gae.": "there is no aggregation ''",
    "gae..plus": "there is no aggregation ''",
    "gae.skiplus": "no aggregation 'skiplus'; did you mean skipplus",
    "gae.plus.rollout": "plus and rollout both combine layers",
    "decompx.plus.skipplus": "plus and skipplus both combine layers",
    "gae.plus.plus": "plus and plus both combine layers",
    "ixg.rollout": "a rollout multiplies matrices between tokens",
    "decompx.rollout": "a rollout multiplies matrices between tokens",
    "gradtoken.rollout": "a rollout multiplies matrices between tokens",
    "gradtoken.propagate": "it propagates already",
    "gradtoken.plus.propagate": "it propagates already",
    "ixg.propagate.propagate": "propagate comes once, and last",
    "decompx.propagate.skipplus": "propagate comes once, and last",
    "gae:": "option=value",
    "gae:,": "option=value",
    "gae:start=1,": "option=value",
    "gae:start": "option=value, not 'start'",
    "gae:start=": "option=value, not 'start='",
    "gae:=1": "option=value, not '=1'",
    "gae:start=1,start=2": "'start' is given twice",
    "gae:start=1, start=1": "'start' is given twice",
    "gae:start=one": "not a whole number",
    "gae:start=1.5": "not a whole number",
    "gae:start==1": "not a whole number",
    "gae:start=1:depth=2": "not a whole number",
    "lime:ridge=nan": "ridge=nan is not a finite number",
    "lime:width=inf": "width=inf is not a finite number",
    "vitcx:noise=-Infinity": "not a finite number",
    "atman:similarity=1e999": "not a finite number",
    "rise:seed=9223372036854775808": "out of range: whole numbers have 64 bits",
    "smoothgrad:seed=-99999999999999999999": "out of range",
    "gae:begin=1": "unknown option 'begin'; it takes rule, start, depth, residual",
    "gae:strat=1": "did you mean start",
    "gae.plus:layer=1": "unknown option 'layer'",
    "gae:layer=1,start=1": "unknown option 'start'",
    "gae.skipplus:start=1": "unknown option 'start'",
    "decompx:rule=plain": "unknown option 'rule'",
    "gae:residual=double": "not one of default, add, half, none",
    "decompx.skipplus:half=up": "not one of ceil, floor",
    "ixg:rule=frosen": "did you mean frozen",
    "tokentm:gradient=prob": "not one of probability, logit; did you mean probability",
    "tokentm:components=af,necc=rescaled": "has no effect",
    "tokentm:variant=third_party,necc=rescaled": "has no effect",
    "tokentm:variant=third_party,components=af": "no ablations",
    "tokentm:residual=none": "residual=none has no effect: the identity is part of both updates",
    "tokentm.rollout:residual=half": "residual=half has no effect",
    "tokentm:variant=third_party,residual=none": "residual=none has no effect",
    "tokentm:components=baseline,start=1": "start=1 has no effect: the baseline is the first block's attention alone",
    "tokentm:components=baseline,depth=2": "depth=2 has no effect",
    "tokentm:components=baseline,residual=add": "residual=add has no effect",
    **{
        f"{name}.{added}": f"{name} cannot be followed by .{added}: what it does at the end of its product"
        for name in ("tam", "bi_token", "bi_head")
        for added in ("plus", "skipplus")
    },
    "tam:layer=1": "unknown option 'layer'; it takes steps, start, depth, residual",
    "gradtoken:propagation=rollout": "not one of none, rollout_elementwise",
    "gradtoken:heads=max": "not one of relu_average, average",
}


def check_message(message, spelling, reason):
    assert reason in message
    assert "\n" not in message
    assert repr(spelling) in message  # with ten methods asked for, this says which one is meant


@pytest.mark.parametrize("spelling", REFUSED)
def test_spellings_that_mean_nothing(spelling):
    with pytest.raises(MethodError) as caught:
        parse(spelling)
    check_message(str(caught.value), spelling, REFUSED[spelling])


FLOATS = [
    (info.name, option) for info in INFOS.values() for option, known in info.options.items() if known.kind is float
]


@pytest.mark.parametrize(("name", "option"), FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_option_takes_what_is_not_finite(name, option, value):
    with pytest.raises(MethodError, match="finite"):
        parse(f"{name}:{option}={value}")


COUNTS = [
    (info.name, name)
    for info in INFOS.values()
    for name, option in info.options.items()
    if option.kind is int and name not in {"seed", "layer", "depth"}
]


def test_every_option_that_sets_a_cost_has_an_upper_bound():
    assert len(COUNTS) > 15
    without = [f"{name}:{option}" for name, option in COUNTS if INFOS[name].options[option].most is None]
    assert without == []


@pytest.mark.parametrize(("name", "option"), COUNTS)
def test_absurd_costs_are_refused_in_one_sentence(name, option):
    most = INFOS[name].options[option].most
    for value in (most + 1, 2**63 - 1):
        with pytest.raises(MethodError, match=f"{option}={value} is more than {most:,}, the most that {option} may be"):
            parse(f"{name}:{option}={value}")


def test_reading_a_spelling_takes_no_memory_that_grows_with_it():
    """The points of two integrals were all laid out before anybody had asked a model."""
    tracemalloc.start()
    try:
        for spelling in ("iia:points=100", "dix:points=100", "rise:budget=100000", "smoothgrad:samples=100000"):
            parse(spelling)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert not any(isinstance(value, torch.Tensor) for value in vars(parse("iia:points=100").readout).values())


def test_masks_that_would_not_fit_into_memory_are_refused():
    with pytest.raises(MethodError, match="lower cells or budget"):
        parse("rise:cells=1000,budget=1000")


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_outermost_seeds_work(model, seed):
    spelling = f"rise:budget=2,seed={seed}"
    assert vitreous.explain(model, random_images(1), spelling).scores[spelling].isfinite().all()


REFUSED_BY_DEPTH = {
    "gae:start=5": "start=5 does not exist: the model has 5 blocks, 0 to 4",
    "gae:start=-6": "start=-6 does not exist",
    "ixg:layer=5": "layer=5 does not exist: the model has 5 blocks, 0 to 4",
    "ixg:layer=-6": "layer=-6 does not exist",
    "ixg.plus:start=5": "start=5 does not exist",
    "tokentm:depth=6": "depth=6 is not between 1 and 5",
    "tokentm:depth=0": "depth=0 is not between 1 and 5",
    "rollout:start=3,depth=3": "depth=3 is not between 1 and 2",
    "gradtoken:depth=5": "depth=5 is not between 0 and 4",
    "gradtoken:depth=-1": "depth=-1 is not between 0 and 4",
}


@pytest.mark.parametrize("spelling", REFUSED_BY_DEPTH)
def test_layers_that_the_model_does_not_have(model, spelling):
    with pytest.raises(MethodError) as caught:
        vitreous.explain(model, random_images(1), ["gae", spelling])
    check_message(str(caught.value), spelling, REFUSED_BY_DEPTH[spelling])


def test_a_wrong_spelling_is_refused_before_the_model_runs(model):
    ran = []
    hook = model.register_forward_pre_hook(lambda *_: ran.append(1))
    for spelling in ("gea", "ixg:layer=5"):
        with pytest.raises(MethodError):
            vitreous.explain(model, random_images(1), ["gae", spelling])
    hook.remove()
    assert not ran
