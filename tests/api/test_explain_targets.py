"""Targets that are objects: every method explains their number, by the passes that classes have.

``SAME`` is for two runs of the same float64 arithmetic in another order: a few roundings of 1e-16, grown through the
blocks and, in LRP, by divisions; 1e-9 of the largest score leaves room for that only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import vitreous
from few_evaluations import with_few
from literal import attention as literal_attention
from literal.forward import gradients
from literal.forward import run as literal_run
from small_models import CLASSES, PATCHES, largest_difference, random_images, small_vit
from vitreous.errors import TargetError
from vitreous.targets import Class, Contrast, Logit, Output, Probability, Similarity, Target

SAME = 1e-9
LINEAR = ["ixg", "cat", "attixg", "attcat", "fullgrad", "fullgrad_plus", "decompx", "decompx.skipplus.propagate"]
LINEAR += ["attnlrp", "conservative_lrp", "lrp", "ixg:rule=libra", "integrated_gradients"]
ALL = [info.name for info in vitreous.list_methods()]
REFERENCE = torch.linspace(-1, 1, CLASSES, dtype=torch.float64)


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=3, seed=7)


@pytest.fixture(scope="module")
def images():
    return random_images(2, seed=3)


class Entropy(Target):
    """A target of one's own."""

    def score(self, output):
        return -(output.softmax(dim=1) * output.log_softmax(dim=1)).sum(dim=1)


# By name: the target, and its number written out for the logits (classes,) of one image.
SCALARS = {
    "logit": (Logit(2), lambda y: y[2]),
    "probability": (Probability(2), lambda y: y[2].exp() / y.exp().sum()),
    "contrast": (Contrast(1, 3), lambda y: y[1] - y[3]),
    "weighted contrast": (Contrast(1, 3, weight=0.6), lambda y: y[1] - 0.6 * y[3]),
    "similarity": (Similarity(REFERENCE), lambda y: (y @ REFERENCE) / y.norm() / REFERENCE.norm()),
    "function": (Output(lambda y: y[:, 0] * y[:, 1].sin()), lambda y: y[0] * y[1].sin()),
    "own": (Entropy(), lambda y: -(y.softmax(0) * y.log_softmax(0)).sum()),
}


def literal(model, image, scalar):
    """A pass written out step by step, of which the number is the only output."""
    record = literal_run(model, image)
    record.logits = scalar(record.logits)[None]
    return record


@pytest.mark.parametrize("name", SCALARS)
def test_maps_are_those_of_autograd_on_the_number(model, images, name):
    target, scalar = SCALARS[name]
    methods = ["ixg", "gradient", "gae", "gradsam", "attcam", "attcat"]
    found = vitreous.explain(model, images, methods, target=target)
    for number, image in enumerate(images):
        record = literal(model, image, scalar)
        assert float(found.target_values[number]) == pytest.approx(float(record.logits.detach()), rel=1e-12)
        (gradient,) = gradients(record.logits[0], record.tokens[:1])
        tokens, prefix = record.tokens[0], record.prefix
        expected = {
            "ixg": (tokens * gradient).sum(dim=1)[prefix:],
            "gradient": gradient.norm(dim=1)[prefix:],
            "gae": literal_attention.gae(record, 0),
            "gradsam": literal_attention.gradsam(record, 0),
            "attcam": literal_attention.attcam(record, 0),
            "attcat": literal_attention.attcat(record, 0),
        }
        for method, maps in expected.items():
            assert largest_difference(found.scores[method][number], maps.reshape(-1)[-PATCHES:]) < SAME, method


class Scored(nn.Module):
    """A model that returns the number of a target."""

    def __init__(self, model, score):
        super().__init__()
        self.model, self.score = model, score

    def forward(self, images):
        return self.score(self.model(images))[:, None]


# Relevance rules have none for the subtraction in a score that is part of the model; the other rules treat a softmax
# or division in it.
RELEVANCE = {"abslrp", "lrp", "plrp", "transattr", "lrp_rollout"}
RULED = {*RELEVANCE, "attnlrp", "conservative_lrp", "decompx"}


@pytest.mark.parametrize("name", ["contrast", "own"])
def test_every_method_explains_the_number_as_if_the_model_returned_it(model, images, name):
    target, _ = SCALARS[name]
    left_out = RELEVANCE if name == "contrast" else RULED
    methods = [with_few(method) for method in ALL if method not in left_out]
    found = vitreous.explain(model, images, methods, target=target)
    expected = vitreous.explain(Scored(model, target.score), images, methods, target=0, outputs="value")
    for method in methods:
        assert largest_difference(found.scores[method], expected.scores[method]) < SAME, method


@pytest.mark.parametrize("weight", [1.0, 0.6])
def test_a_contrast_is_the_difference_of_maps_for_linear_methods(model, images, weight):
    found = vitreous.explain(model, images, LINEAR, target=[[Contrast(1, 3, weight=weight), 1, 3]] * 2).scores
    for method in LINEAR:
        contrast, one, other = found[method].unbind(dim=1)
        assert largest_difference(contrast, one - weight * other) < SAME, method


def test_relevance_of_a_contrast_is_conserved(model, images):
    """All of DecompX with its biases adds up to the difference of the logits, as it does to a logit."""
    scores = {}
    for target in (Contrast(1, 3), 1, 3):
        scores[str(target)] = vitreous.explain(model, images, "fullgrad:rule=libra", target=target)
    whole = scores["1 vs 3"].scores["fullgrad:rule=libra"]
    parts = [scores[name].scores["fullgrad:rule=libra"] for name in ("1", "3")]
    assert largest_difference(whole.sum(dim=1), (parts[0] - parts[1]).sum(dim=1)) < SAME


def test_the_gradient_of_a_probability_is_p_times_the_contrast_with_the_expected_logit(model, images):
    """dp_c = p_c (dy_c - sum_j p_j dy_j), and these methods are linear in the gradient at the logits.

    So the softmax is differentiated as it is, whatever the rule: it is no part of the model.
    """
    every = vitreous.explain(model, images, LINEAR, target=[list(range(CLASSES))] * 2)
    found = vitreous.explain(model, images, LINEAR, target=Probability(2))
    likely = every.logits.softmax(dim=1)
    for method in LINEAR:
        if method == "integrated_gradients":  # differentiates at other points
            continue
        expected = torch.einsum("bj,bjp->bp", likely, every.scores[method])
        expected = likely[:, 2, None] * (every.scores[method][:, 2] - expected)
        assert largest_difference(found.scores[method], expected) < SAME, method


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_probability_near_one_is_explained_in_half_precision(dtype):
    """Its gradient, some 1e-7, is below what float16 holds: it is scaled before it enters the model."""
    model, images = small_vit(depth=2), random_images(2)
    with torch.no_grad():
        predicted = int(model(images)[0].argmax())
        model.head.bias[predicted] += 17
        assert 1 - model(images)[0].softmax(0)[predicted] < 1e-6
    exact = vitreous.explain(model, images, "ixg", target=Probability(predicted)).scores["ixg"]
    found = vitreous.explain(model.to(dtype), images.to(dtype), "ixg", target=Probability(predicted)).scores["ixg"]
    # Both have 8 to 11 bits: maps agree in their pattern, in size as far as the probability itself does.
    assert torch.corrcoef(torch.stack([exact[0], found[0].double()]))[0, 1] > 0.995
    assert 0.5 < found[0].abs().max() / exact[0].abs().max() < 2


def test_a_sure_model_keeps_the_digits_of_its_gradient():
    """In float32 1 - p would be 0 where p is 1 - 1e-9."""
    single = small_vit(depth=2, seed=1, dtype=torch.float32)
    with torch.no_grad():
        single.head.bias[2] += 21
    images = random_images(1, dtype=torch.float32)
    found = vitreous.explain(single, images, "ixg", target=Probability(2)).scores["ixg"]
    expected = vitreous.explain(single.double(), images.double(), "ixg", target=Probability(2)).scores["ixg"]
    assert bool(found.any())
    assert largest_difference(found, expected) < 1e-3  # float32 logits near 20 are known to 2e-6; p follows e^y


@pytest.mark.parametrize("method", ["tokentm", "rise", "gae", "abslrp", "vitcx"])
def test_class_is_what_a_number_is(model, images, method):
    found = vitreous.explain(model, images, method, target=Class(2))
    expected = vitreous.explain(model, images, method, target=2)
    assert torch.equal(found.scores[method], expected.scores[method])
    assert torch.equal(found.target, expected.target)
    assert torch.equal(found.logits, expected.logits)


def test_logit_and_probability_settle_what_a_method_explains(model, images):
    probability = vitreous.explain(model, images, "tokentm", target=2).scores["tokentm"]
    logit = vitreous.explain(model, images, "tokentm:gradient=logit", target=2).scores["tokentm:gradient=logit"]
    both = vitreous.explain(model, images, "tokentm", target=[[Logit(2), Probability(2), 2]] * 2).scores["tokentm"]
    assert largest_difference(both[:, 0], logit) < SAME
    assert largest_difference(both[:, 1], probability) < SAME
    assert largest_difference(both[:, 2], probability) < SAME


def test_no_target_is_the_predicted_class(model, images):
    found = vitreous.explain(model, images, "gae", target=Class())
    assert torch.equal(found.scores["gae"], vitreous.explain(model, images, "gae").scores["gae"])


def test_next_is_the_most_likely_class_besides(model, images):
    logits = model(images).detach()
    order = logits.argsort(dim=1, descending=True)
    found = vitreous.explain(model, images, "ixg", target=[[Contrast(), Contrast(int(order[0, 3]))]] * 2)
    spelled = vitreous.explain(model, images, "ixg", target="predicted vs next")
    assert torch.equal(spelled.scores["ixg"], found.scores["ixg"][:, 0])
    for image in range(2):
        best, second = order[image, :2].tolist()
        assert found.label(image, 0) == f"class {best} rather than class {second}"
        given = int(order[0, 3])
        assert found.targets[found.class_index(image, 1) - CLASSES] == Contrast(given, best)
        expected = vitreous.explain(model, images[image : image + 1], "ixg", target=Contrast(best, second))
        assert largest_difference(found.scores["ixg"][image, 0], expected.scores["ixg"][0]) < SAME


def test_each_image_may_have_targets_of_its_own(model, images):
    rows = [[Contrast(0, 1), Logit(4)], [Similarity(REFERENCE), Contrast(2, 3)]]
    together = vitreous.explain(model, images, ["ixg", "gae", "rise", "legrad"], target=rows)
    for image, row in enumerate(rows):
        for place, target in enumerate(row):
            alone = vitreous.explain(model, images[image : image + 1], ["ixg", "gae", "legrad"], target=target)
            for method in alone.methods:
                assert largest_difference(together.scores[method][image, place], alone.scores[method][0]) < SAME
            assert float(together.target_values[image, place]) == pytest.approx(float(alone.target_values[0]))


def test_parts_of_a_large_batch_keep_their_targets(model, monkeypatch):
    from vitreous.api import run_methods

    many = random_images(5, seed=9)
    targets = [Contrast(0, 1), Contrast(2, 1), Logit(3), Contrast(0, 1), Output(lambda y: y[:, 4] ** 2, "square")]
    whole = vitreous.explain(model, many, ["ixg", "occlusion"], target=targets)
    monkeypatch.setattr(run_methods, "batch_parts", lambda *_: [slice(0, 2), slice(2, 5)])
    parts = vitreous.explain(model, many, ["ixg", "occlusion"], target=targets)
    assert [parts.label(image) for image in range(5)] == [whole.label(image) for image in range(5)]
    assert parts.label(4) == "square"
    assert torch.equal(parts.target, whole.target)
    for method in whole.methods:
        assert largest_difference(parts.scores[method], whole.scores[method]) < SAME


def test_a_class_agnostic_method_gives_every_target_the_same_map(model, images):
    found = vitreous.explain(model, images, "rollout", target=[[Contrast(0, 1), Logit(2)]] * 2).scores["rollout"]
    assert torch.equal(found[:, 0], found[:, 1])


def test_eight_contrasts_cost_one_forward_pass_and_eight_backward_passes(model, images):
    contrasts = [*(Contrast(c, d) for c in range(3) for d in range(3, 5)), Contrast(3, 4), Contrast(4, 0)]
    vitreous.explain(model, images, ["ixg", "gae"], target=Contrast(0, 1))  # the first run is traced besides
    passes = {"forward": 0, "backward": 0}

    def count(_module, _inputs, output):
        passes["forward"] += 1
        output.register_hook(lambda _gradient: passes.update(backward=passes["backward"] + 1))

    with model.blocks[-1].register_forward_hook(count):
        found = vitreous.explain(model, images, ["ixg", "gae"], target=[contrasts] * 2)
    assert len(found.targets) == 8
    # One backward pass per target, and one that shows which tokens the head reads.
    assert passes == {"forward": 1, "backward": 9}


def test_names_of_classes():
    from vitreous.models import LoadedModel, Preprocessing

    names = ("wall", "tabby, tabby cat", "tiger_cat", "dog", "tree")
    loaded = LoadedModel("pets", small_vit(depth=2), Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3), names)
    images = random_images(1)
    found = vitreous.explain(loaded, images, "ixg", target=Contrast("tabby cat", "tiger cat"))
    assert found.label() == "tabby, tabby cat rather than tiger cat"
    spelled = vitreous.explain(loaded, images, "ixg", target="tabby vs Tiger Cat")
    assert torch.equal(spelled.scores["ixg"], found.scores["ixg"])
    assert found.provenance["targets"] == ["1 vs 2"]
    with pytest.raises(TargetError, match="no class 'tiger'; did you mean 'tiger_cat'"):
        vitreous.explain(loaded, images, "ixg", target="tabby vs tiger")


def test_selecting_an_image_keeps_its_target(model, images):
    found = vitreous.explain(model, images, "ixg", target=[Contrast(0, 1), Contrast(2, 3)])
    for image in range(2):
        one = found.select(image)
        assert one.label() == found.label(image)
        assert len(one.targets) == 1
        assert one.value(one.class_index()) == found.value(found.class_index(image), image)
    assert "classes" not in repr(replace(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    half = small_vit(depth=2, dtype=dtype)
    found = vitreous.explain(half, random_images(1, dtype=dtype), ["ixg", "gae"], target=[[Contrast(0, 1), 0, 1]])
    contrast, one, other = found.scores["ixg"][0]
    # Numbers of 8 or 11 bits, added over 24 channels of which most cancel.
    assert largest_difference(contrast, one - other) < 0.2
