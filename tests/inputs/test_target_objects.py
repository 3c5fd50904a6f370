"""Targets as objects: their scores by hand, their labels and spellings, and one plain sentence for each mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import vitreous
from small_models import CLASSES, random_images, small_vit
from vitreous.errors import InputError, TargetError, VitreousError
from vitreous.inputs.model_io import class_scores, embeddings, find_part
from vitreous.inputs.target import restore_target, store_target
from vitreous.inputs.target_objects import parse_target
from vitreous.targets import Box, Class, Contrast, Logit, Output, Pixels, Probability, Query, Similarity, Target, Token

IMAGES = random_images(2)
LOGITS = torch.tensor([[1.0, 3.0, -2.0], [0.5, 0.0, 0.25]], dtype=torch.float64)
MASK = torch.zeros(2, 2, dtype=torch.bool)
MASK[0] = True


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2, seed=5)


class TestScores:
    """What a target makes of an output, without a model."""

    def test_of_classes(self):
        assert torch.equal(Class(1).score(LOGITS), LOGITS[:, 1])
        assert torch.equal(Logit(1).score({"logits": LOGITS}), LOGITS[:, 1])
        assert torch.equal(Contrast(1, 0, weight=2).score((LOGITS, None)), LOGITS[:, 1] - 2 * LOGITS[:, 0])
        assert torch.allclose(Probability(1).score(LOGITS), LOGITS.softmax(dim=1)[:, 1])
        assert torch.allclose(Probability(1, scale="sigmoid").score(LOGITS), LOGITS.sigmoid()[:, 1])
        assert torch.equal(Probability(1, scale="probabilities").score(LOGITS), LOGITS[:, 1])

    def test_of_an_embedding(self):
        reference = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
        expected = LOGITS[:, :2].sum(dim=1) / LOGITS.norm(dim=1) / 2**0.5
        assert torch.allclose(Similarity(reference).score(LOGITS), expected)
        assert torch.allclose(Similarity(reference.numpy()).score({"pooler_output": LOGITS}), expected)
        assert torch.allclose(Similarity(reference).score({"last_hidden_state": LOGITS[:, None]}), expected)

    def test_of_tokens_and_queries(self):
        rows = torch.arange(24, dtype=torch.float64).view(2, 3, 4)
        assert torch.equal(Token(1, 2).score(rows), rows[:, 1, 2])
        assert torch.equal(Token(-1).score({"last_hidden_state": rows}), rows[:, 2].norm(dim=1))
        assert torch.equal(Query(2, 0).score({"pred_logits": rows}), rows[:, 2, 0])

    def test_of_pixels(self):
        maps = torch.arange(24, dtype=torch.float64).view(2, 3, 2, 2)
        assert torch.equal(Pixels(MASK, 1).score(maps), maps[:, 1, 0].sum(dim=1))
        weights = np.array([[0.5, 0], [0, 2.0]])
        assert torch.equal(Pixels(weights, 2).score({"out": maps}), 0.5 * maps[:, 2, 0, 0] + 2 * maps[:, 2, 1, 1])
        assert torch.equal(Pixels(MASK, 0).score({"predicted_depth": maps[:, 0]}), maps[:, 0, 0].sum(dim=1))


class TestLabels:
    """What captions and provenance say."""

    NAMES = ("cat", "big_dog", "tree")

    @pytest.mark.parametrize(
        ("target", "label", "spelling"),
        [
            (Class(1), "big dog", "1"),
            (Class(), "predicted", "predicted"),
            (Logit(1), "logit of big dog", "logit(1)"),
            (Probability(1), "probability of big dog", "probability(1)"),
            (Contrast(1, 0), "big dog rather than cat", "1 vs 0"),
            (Contrast(1, 0, 0.5), "big dog rather than 0.5 x cat", "1 vs 0.5 x 0"),
            (Contrast(), "predicted rather than next", "predicted vs next"),
            (Similarity(torch.ones(3), "a cat"), "similarity to a cat", "similarity(a cat)"),
            (Output(len, "margin"), "margin", "margin"),
            (Output(len), "len", "len"),
            (Token(3, 0), "token 3: cat", "token 3: 0"),
            (Query(3), "query 3", "query 3"),
            (Pixels(MASK, 2), "tree in 2 pixels", "pixels(2, 2)"),
            (Box(0, 0.25, 0.5, 1), "box(0, 0.25, 0.5, 1)", "box(0, 0.25, 0.5, 1)"),
        ],
    )
    def test_with_and_without_names(self, target, label, spelling):
        assert target.label(self.NAMES) == label
        assert str(target) == spelling

    def test_without_names(self):
        assert Contrast(1, 0).label() == "class 1 rather than class 0"

    def test_spelled(self):
        assert parse_target("Cat vs big-dog", self.NAMES) == Contrast(0, 1)
        assert parse_target("2 vs next", None) == Contrast(2)
        assert parse_target("predicted VS tree", self.NAMES) == Contrast(None, 2)
        assert parse_target("tree", self.NAMES) == 2
        assert parse_target("cat vs dog", ("cat vs dog", "dog")) == 0  # a class may be called so


class TestStored:
    """A target in a folder is JSON values and arrays."""

    @pytest.mark.parametrize(
        "target",
        [Class(1), Logit(1), Probability(1, "sigmoid"), Contrast(1, 0, 0.5), Token(3, 0), Query(3, 1), Box(0, 0, 1, 1)],
    )
    def test_plain_ones_come_back(self, target):
        stored, tensors = store_target(target)
        assert restore_target(stored, tensors) == target

    @pytest.mark.parametrize("target", [Pixels(MASK, 1), Similarity(LOGITS[0], "a cat")])
    def test_tensors_come_back(self, target):
        stored, tensors = store_target(target)
        found = restore_target(stored, {name: tensor.clone() for name, tensor in tensors.items()})
        assert found == target
        assert hash(found) == hash(target)
        other = replace(
            target, **{name: -tensor if name == "reference" else ~tensor for name, tensor in tensors.items()}
        )
        assert other != target

    def test_of_a_function_its_description_is_left(self):
        stored, tensors = store_target(Output(lambda output: output[:, 0], "first logit"))
        found = restore_target(stored, tensors)
        assert found.label() == "first logit"
        with pytest.raises(TargetError, match="'first logit' was loaded from a folder"):
            found.score(LOGITS)

    def test_a_kind_that_is_not_known_any_more(self):
        found = restore_target({"kind": "Gone", "fields": {"x": 1}, "tensors": []}, {})
        assert found.label() == "Gone"


class NotANumber(Target):
    def score(self, output):
        return output[:, 0] * float("nan")


def _fails(_output):
    raise KeyError("tokens")


# What is wrong, made when the test runs, and the sentence that says so.
MISTAKES = {
    "two times one class": (lambda: Contrast(1, 1), "a contrast needs two classes, not 1 twice"),
    "one class by name": (lambda: Contrast("cat", "cat"), "a contrast needs two classes, not cat twice"),
    "no weight": (lambda: Contrast(1, 2, weight=float("nan")), "weight of a contrast must be a finite number"),
    "a fraction": (lambda: Class(1.5), "a class must be a whole number or a name, not 1.5"),
    "true": (lambda: Logit(index=True), "a class must be a whole number or a name, not True"),
    "class out of range": (lambda: Contrast(1, 7), "class 7 is not between 0 and 4"),
    "class below 0": (lambda: Contrast(-1, 2), "class -1 is not between 0 and 4"),
    "logit out of range": (lambda: Logit(5), "class 5 is not between 0 and 4"),
    "probability out of range": (lambda: Probability(5), "class 5 is not between 0 and 4"),
    "a name that is not known": (lambda: Contrast("cat", 1), "names of this model's classes are not known"),
    "embedding of another size": (lambda: Similarity(torch.ones(7)), "the reference has 7 channels, and the embedding"),
    "embedding of integers": (lambda: Similarity(torch.ones(5, dtype=torch.int64)), "in floating point, not"),
    "a matrix": (lambda: Similarity(torch.ones(5, 5)), r"not torch.float32 \(5, 5\)"),
    "embedding of NaN": (lambda: Similarity(torch.full((5,), float("nan"))), "holds NaN or infinite"),
    "no function": (lambda: Output(3), "Output takes a function of the model's output, not 3"),
    "a sum": (lambda: Output(lambda y: y.sum(), "total"), r"total must return one number per image.* \(2,\), not \(\)"),
    "all logits": (lambda: Output(lambda y: y, "all"), r"all must return one number per image.*not \(2, 5\)"),
    "a list": (lambda: Output(lambda y: y[:, 0].tolist(), "list"), "list must return one number per image.*not list"),
    "a function that fails": (lambda: Output(_fails, "broken"), r"broken fails on the model's output \(KeyError: 'tok"),
    "NaN": (NotANumber, "NotANumber is NaN for some images"),
    "depends on nothing": (
        lambda: Output(lambda y: torch.ones(len(y), dtype=y.dtype), "one"),
        "one does not depend on the model's output, or not in a way that has a gradient",
    ),
    "detached": (lambda: Output(lambda y: y[:, 0].detach(), "cut"), "cut does not depend on the model's output"),
    "not differentiable": (lambda: Output(lambda y: y.argmax(dim=1), "argmax"), "argmax does not depend on"),
    "no pixels": (lambda: Pixels(torch.zeros(4, 4)), "the mask is empty: it selects no pixel"),
    "mask of four axes": (lambda: Pixels(torch.ones(1, 1, 4, 4)), r"a mask is .*\(height, width\), not \(1, 1, 4, 4\)"),
    "no mask": (lambda: Pixels("mask.png"), "a mask is .* not 'mask.png'"),
    "mask of NaN": (lambda: Pixels(torch.full((4, 4), float("nan"))), "the mask holds NaN"),
    "pixels of a classifier": (lambda: Pixels(MASK, 1), r"needs a dense output .* but the model returned \(2, 5\)"),
    "query of a classifier": (lambda: Query(0), r"needs an output of shape \(batch, queries, classes\), but"),
    "token of a classifier": (lambda: Token(0), r"needs an output of shape \(batch, tokens, channels\), but"),
    "box of a classifier": (lambda: Box(0, 0, 1, 1), "needs an output of shape"),
    "box outside": (lambda: Box(0, 0, 20, 30), "a box is left, top, right and bottom in fractions of the image"),
    "box the wrong way": (lambda: Box(0.5, 0, 0.1, 1), "left < right"),
    "token that is no number": (lambda: Token("a"), "a token must be a whole number"),
    "too few targets": (lambda: [Contrast(0, 1)], "targets for 1 images, and 2 images: a plain list is one target per"),
    "uneven rows": (lambda: [[Contrast(0, 1)], [Contrast(0, 1), Logit(2)]], "every image has equally many targets"),
    "rows and targets": (lambda: [[Contrast(0, 1)], Contrast(0, 1)], "a plain list is one target per image"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_plain_sentence(model, case):
    make, sentence = MISTAKES[case]
    with pytest.raises(TargetError, match=sentence) as caught:
        vitreous.explain(model, IMAGES, ["ixg", "gae"], target=make())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_target_and_topk(model):
    with pytest.raises(TargetError, match="a target or topk, not both"):
        vitreous.explain(model, IMAGES, "ixg", target=Contrast(0, 1), topk=2)


def test_the_predicted_class_against_itself(model):
    predicted = int(model(IMAGES[:1]).argmax())
    with pytest.raises(TargetError, match=f"the predicted one is {predicted} itself"):
        vitreous.explain(model, IMAGES[:1], "ixg", target=Contrast(None, predicted))


def test_values_have_no_probability(model):
    with pytest.raises(TargetError, match="values, which have no probability"):
        vitreous.explain(model, IMAGES, "ixg", target=Probability(1), outputs="value")


def test_one_output_has_no_contrast():
    with pytest.raises(TargetError, match="needs two classes, and this model has one output"):
        vitreous.explain(small_vit(depth=2, num_classes=1), IMAGES, "ixg", target=Contrast(0))


def test_a_target_without_gradient_serves_methods_that_take_none(model):
    """The share of masks under which the class stays the predicted one."""
    stays = Output(lambda y: (y.argmax(dim=1) == 1).to(y.dtype), "predicted")
    found = vitreous.explain(model, IMAGES, "occlusion", target=stays)
    assert set(found.scores["occlusion"].unique().tolist()) <= {-1.0, 0.0, 1.0}
    with pytest.raises(TargetError, match="predicted does not depend"):
        vitreous.explain(model, IMAGES, ["occlusion", "ixg"], target=stays)


class TestParts:
    """Which part of what a model returns is read."""

    HEADS: ClassVar = {"loss": None, "heads": {"cat": LOGITS, "dog": LOGITS[:, :2]}, "features": (LOGITS, [LOGITS + 1])}

    def test_by_name_path_place_and_function(self):
        assert find_part(self.HEADS, "heads.dog") is self.HEADS["heads"]["dog"]
        assert find_part(self.HEADS, "features.1.0") is self.HEADS["features"][1][0]
        assert find_part((1, LOGITS), 1) is LOGITS
        assert find_part((1, LOGITS), -1) is LOGITS
        assert torch.equal(find_part(LOGITS, lambda output: output[:, :1]), LOGITS[:, :1])
        assert find_part(LOGITS, None) is LOGITS

    @pytest.mark.parametrize(
        ("part", "sentence"),
        [
            ("dog", "the model returns no output 'dog': it returned dict of heads"),
            (3, "the model returns no output 3"),
            (2.5, "output must be a name, a number or a function, not 2.5"),
            (lambda output: output["none"], "the function given as output fails on what the model returns"),
        ],
    )
    def test_a_part_that_is_not_there(self, part, sentence):
        output = {"heads": {"cat": LOGITS}, "scores": LOGITS}
        with pytest.raises(InputError, match=sentence):
            find_part(output, part)

    def test_nothing_to_read(self):
        for read in (class_scores, embeddings):
            with pytest.raises(VitreousError, match="but the model returned dict of tokens"):
                read({"tokens": LOGITS[..., None, None]})


class TwoHeads(nn.Module):
    """A model with two classifiers and, if wanted, another input."""

    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=2, seed=5, num_classes=0)
        self.heads = nn.ModuleDict({"cat_head": nn.Linear(24, 3), "dog_head": nn.Linear(24, 4)}).double()

    def forward(self, images):
        features = self.vit(images)
        return {name: head(features) for name, head in self.heads.items()}


def test_one_of_several_heads():
    several = TwoHeads().eval()
    found = vitreous.explain(several, IMAGES, ["ixg", "rise:budget=20"], target=2, output="dog_head")
    assert found.logits.shape == (2, 4)
    assert found.provenance["output"] == "dog_head"
    alone = nn.Sequential(several.vit, several.heads["dog_head"])
    expected = vitreous.explain(alone, IMAGES, ["ixg", "rise:budget=20"], target=2)
    for method in found.methods:
        assert torch.allclose(found.scores[method], expected.scores[method], atol=1e-12)
    contrast = vitreous.explain(several, IMAGES, "ixg", target=Contrast(2, 3), output="dog_head")
    assert torch.allclose(contrast.target_values, found.logits[:, 2] - found.logits[:, 3])
    with pytest.raises(InputError, match=r"returned dict of cat_head \(2, 3\), dog_head \(2, 4\)"):
        vitreous.explain(several, IMAGES, "ixg")
    both = Output(lambda output: output["cat_head"][:, 0] - output["dog_head"][:, 0], "cat rather than dog")
    assert vitreous.explain(several, IMAGES, "ixg", target=both).label() == "cat rather than dog"


class WithAge(nn.Module):
    """A model that takes more than images."""

    def __init__(self):
        super().__init__()
        self.vit = small_vit(depth=2, seed=5)

    def forward(self, images, age):
        return self.vit(images) * age


def test_a_function_that_calls_the_model():
    model = WithAge().eval()
    found = vitreous.explain(
        model, IMAGES, ["ixg", "rise:budget=20"], target=1, call=lambda model, x: model(x, 2.0), outputs="value"
    )
    expected = vitreous.explain(model.vit, IMAGES, ["ixg", "rise:budget=20"], target=1, outputs="value")
    for method in found.methods:
        assert torch.allclose(found.scores[method], 2 * expected.scores[method], atol=1e-12)
    with pytest.raises(InputError, match="call must be a function of the model and its images, not 3"):
        vitreous.explain(model, IMAGES, "ixg", call=3)


def test_a_picture_is_embedded_by_the_model_itself(model):
    other = random_images(1, seed=8)
    found = vitreous.explain(model, IMAGES, "ixg", target=Similarity(other[0]))
    expected = torch.nn.functional.cosine_similarity(model(IMAGES), model(other)).detach()
    assert torch.allclose(found.target_values, expected)
    assert found.targets[0].reference.shape == (CLASSES,)
    given = vitreous.explain(model, IMAGES, "ixg", target=Similarity(model(other)[0].detach()))
    assert torch.allclose(found.scores["ixg"], given.scores["ixg"])


def test_saved_and_loaded(model, tmp_path):
    targets = [[Contrast(0, 1), Similarity(torch.ones(5), "ones"), Output(lambda y: y[:, 0] ** 2, "square"), 3]] * 2
    found = vitreous.explain(model, IMAGES, "ixg", target=targets)
    loaded = vitreous.Explanation.load(found.save(tmp_path / "saved"))
    assert [loaded.label(1, place) for place in range(4)] == [found.label(1, place) for place in range(4)]
    assert torch.equal(loaded.target_values, found.target_values)
    again = vitreous.explain(model, IMAGES, "ixg", target=list(loaded.targets[:2]))
    assert torch.allclose(again.scores["ixg"][0], found.scores["ixg"][0, 0])
    assert torch.allclose(again.scores["ixg"][1], found.scores["ixg"][1, 1])
    with pytest.raises(TargetError, match="'square' was loaded from a folder"):
        vitreous.explain(model, IMAGES, "ixg", target=loaded.targets[2])
