"""Which class is explained: every way to say it, in one forward pass, image by image.

``SAME`` is for two runs of the same float64 arithmetic on batches of another size, where matrix products may be cut
into other pieces: a few roundings of 1e-16, grown through the blocks; 1e-12 of the largest score leaves room for
that only.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitreous
from small_models import CLASSES, PATCHES, largest_difference, random_images, small_vit
from vitreous.errors import TargetError
from vitreous.inputs.model_io import scale_of
from vitreous.inputs.target import find_class
from vitreous.methods.spelling import cost_of
from vitreous.models import LoadedModel, Preprocessing
from vitreous.speed.timing import one_thread

SAME = 1e-12
# LRP with its original rules divides by numbers near 0, so the kernel that another plan chooses shows: measured 2e-12.
MAGNIFIED = {"lrp": 1e-9}
# All that read one recorded run; LeGrad asks the head once more, the others that run again ask much more.
INFOS = [info for info in vitreous.list_methods() if cost_of(info.name).one_run]
CLASS_SPECIFIC = [info.name for info in INFOS if info.class_specific]
CLASS_AGNOSTIC = [info.name for info in INFOS if not info.class_specific]
METHODS = [
    *(info.name for info in INFOS),
    *("decompx.skipplus", "decompx.skipplus.propagate", "tokentm:gradient=logit", "tokentm:variant=third_party"),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=3, seed=4)


@pytest.fixture(scope="module")
def every_class(model):
    """All methods, images and classes: scores (3, classes, patches)."""
    return vitreous.explain(model, random_images(3), METHODS, target=[list(range(CLASSES))] * 3).scores


def check(scores, expected):
    assert set(scores) == set(expected)
    for name, maps in scores.items():
        assert largest_difference(maps, expected[name]) < MAGNIFIED.get(name, SAME), name


def test_classes_and_images_differ(every_class):
    """Otherwise nothing below could fail."""
    for name in CLASS_SPECIFIC:
        if name == "attcam":  # may clamp to zeros
            continue
        maps = every_class[name]
        assert largest_difference(maps[0, 0], maps[0, 1]) > 0.01, name
        assert largest_difference(maps[0, 0], maps[1, 0]) > 0.01, name


def test_none_is_the_predicted_class(model, every_class):
    found = vitreous.explain(model, random_images(3), METHODS)
    predicted = model(random_images(3)).argmax(dim=1)
    assert torch.equal(found.target, predicted)
    check(found.scores, {name: maps[range(3), predicted] for name, maps in every_class.items()})


ONE_FOR_ALL = [2, np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32), np.array(2)]


@pytest.mark.parametrize("target", ONE_FOR_ALL, ids=lambda target: type(target).__name__)
def test_one_class_for_all_images(model, every_class, target):
    found = vitreous.explain(model, random_images(3), METHODS, target=target)
    assert found.target.tolist() == [2, 2, 2]
    check(found.scores, {name: maps[:, 2] for name, maps in every_class.items()})


ONE_EACH = [
    [4, 0, 2],
    (4, 0, 2),
    torch.tensor([4, 0, 2]),
    torch.tensor([4, 0, 2], dtype=torch.uint8),
    np.array([4, 0, 2]),
    [np.int64(4), np.int64(0), np.int64(2)],
]


@pytest.mark.parametrize("target", ONE_EACH, ids=lambda target: type(target).__name__)
def test_one_class_per_image(model, every_class, target):
    found = vitreous.explain(model, random_images(3), METHODS, target=target)
    assert found.target.tolist() == [4, 0, 2]
    check(found.scores, {name: maps[[0, 1, 2], [4, 0, 2]] for name, maps in every_class.items()})


SEVERAL = [[1, 3], [3, 0], [2, 2]]


@pytest.mark.parametrize("target", [SEVERAL, torch.tensor(SEVERAL), np.array(SEVERAL)], ids=["list", "tensor", "numpy"])
def test_several_classes_per_image_equal_as_many_calls(model, target):
    found = vitreous.explain(model, random_images(3), METHODS, target=target)
    assert found.target.tolist() == SEVERAL
    for place in range(2):
        single = vitreous.explain(model, random_images(3), METHODS, target=[classes[place] for classes in SEVERAL])
        check({name: maps[:, place] for name, maps in found.scores.items()}, single.scores)


def test_one_class_in_a_list_per_image_keeps_its_axis(model, every_class):
    found = vitreous.explain(model, random_images(3), METHODS, target=[[1], [1], [1]])
    check(found.scores, {name: maps[:, 1:2] for name, maps in every_class.items()})


@pytest.mark.parametrize("k", [1, 3, CLASSES])
def test_topk_are_the_most_likely_classes_in_order(model, every_class, k):
    found = vitreous.explain(model, random_images(3), METHODS, topk=k)
    order = model(random_images(3)).argsort(dim=1, descending=True)[:, :k]
    assert torch.equal(found.target, order)
    rows = torch.arange(3)[:, None]
    check(found.scores, {name: maps[rows, order] for name, maps in every_class.items()})


@pytest.mark.parametrize("name", CLASS_AGNOSTIC)
def test_class_agnostic_methods_ignore_the_target(every_class, name):
    maps = every_class[name]
    assert maps.shape == (3, CLASSES, PATCHES)
    assert torch.equal(maps, maps[:, :1].expand_as(maps))


def test_each_class_of_a_class_agnostic_map_is_a_copy_of_its_own(model):
    maps = vitreous.explain(model, random_images(1), ["rollout"], topk=2).scores["rollout"]
    before = maps[0, 1].clone()
    maps[0, 0] = 0
    assert torch.equal(maps[0, 1], before)


def passes(model, **options):
    """How often the first block runs during one call."""
    count = []
    hook = model.blocks[0].register_forward_hook(lambda *_: count.append(1))
    vitreous.explain(model, random_images(3), METHODS, **options)
    hook.remove()
    return len(count)


@pytest.mark.parametrize("options", [{}, {"target": SEVERAL}, {"topk": CLASSES}], ids=["one", "several", "topk"])
def test_all_methods_and_all_targets_share_one_forward_pass(model, options):
    assert passes(model, **options) == 1


def test_a_method_says_the_same_alone_and_in_company(model, every_class):
    for name in METHODS:
        alone = vitreous.explain(model, random_images(3), [name], target=[list(range(CLASSES))] * 3).scores
        check(alone, {name: every_class[name]})


def test_a_method_given_twice_with_blanks_is_one_method(model, every_class):
    methods = ["gae", " gae ", "ixg", "gae"]
    found = vitreous.explain(model, random_images(3), methods, target=[[0, 1]] * 3).scores
    check(found, {name: every_class[name][:, :2] for name in ("gae", "ixg")})


def test_a_batch_gives_what_single_images_give(model, every_class):
    for number, image in enumerate(random_images(3)):
        single = vitreous.explain(model, image[None], METHODS, target=[list(range(CLASSES))]).scores
        check(single, {name: maps[number : number + 1] for name, maps in every_class.items()})


def test_a_single_logit_is_a_yes_or_no_model():
    """Its probability is the sigmoid: dp = p (1 - p) dy, where a softmax over one class would have no gradient."""
    model = small_vit(depth=3, num_classes=1)
    found = vitreous.explain(model, random_images(1), METHODS)
    assert found.target.tolist() == [0]
    assert all(torch.isfinite(maps).all() for maps in found.scores.values())
    probability = float(torch.sigmoid(found.logits))
    weights = model.head.weight.detach().clone()
    # The logit's gradient times p (1 - p) is the gradient of a model whose head is that much smaller.
    with torch.no_grad():
        model.head.weight.copy_(weights * probability * (1 - probability))
    scaled = vitreous.explain(model, random_images(1), ["tokentm:gradient=logit"]).scores["tokentm:gradient=logit"]
    assert found.scores["tokentm"].any()
    assert largest_difference(found.scores["tokentm"], scaled) < SAME


class Wrapped(torch.nn.Module):
    """What users write around a model, without a configuration of its own."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, images):
        return self.inside(images)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, Wrapped, lambda model: Wrapped(Wrapped(model))])
def test_a_wrapper_keeps_what_the_model_inside_says_of_its_outputs(wrap):
    model, images = small_vit(depth=2), random_images()
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    bare, wrapped = (vitreous.explain(each, images, "tokentm", 1) for each in (model, wrap(model)))
    assert wrapped.scale == bare.scale == "sigmoid"
    assert torch.equal(wrapped.probabilities, torch.sigmoid(wrapped.logits))
    assert torch.equal(wrapped.scores["tokentm"], bare.scores["tokentm"])


def test_of_several_configurations_the_outermost_counts():
    deep, shallow = small_vit(depth=1), torch.nn.Identity()
    deep.config = SimpleNamespace(problem_type="regression")
    shallow.config = SimpleNamespace(problem_type="multi_label_classification")
    both = torch.nn.Sequential(Wrapped(deep), shallow)
    assert scale_of(both) == "sigmoid"
    assert scale_of(both[0]) == "value"
    both.config = SimpleNamespace(problem_type="single_label_classification")
    assert scale_of(both) is None
    both.config = SimpleNamespace(problem_type=None)  # says nothing
    assert scale_of(both) == "sigmoid"


NAMES = ("tench", "tabby, tabby cat", "tiger cat", "crate", "Egyptian_Mau")


def named(model):
    preprocessing = Preprocessing((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return LoadedModel("named", model, preprocessing, NAMES)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("tabby cat", [1, 1]),
        ("Tiger_Cat", [2, 2]),
        ("3", [3, 3]),
        (["tench", "tiger cat"], [0, 2]),
        (("tench", 4), [0, 4]),
        (np.array(["tench", "crate"]), [0, 3]),
        ([["tabby", "egyptian mau"], [0, "crate"]], [[1, 4], [0, 3]]),
    ],
    ids=str,
)
def test_classes_are_given_by_name_in_any_nesting(model, target, expected):
    found = vitreous.explain(named(model), random_images(2), "gae", target)
    assert found.target.tolist() == expected
    assert torch.equal(found.scores["gae"], vitreous.explain(model, random_images(2), "gae", expected).scores["gae"])


def test_names_are_those_that_a_network_says_of_itself():
    model = small_vit(depth=1)
    model.config = SimpleNamespace(id2label=dict(enumerate(NAMES)))
    assert vitreous.explain(model, random_images(1), "gae", "tiger cat").target.tolist() == [2]


def test_without_names_a_name_is_refused(model):
    for target in ("cat", ["cat", "dog"], [["cat", 1]] * 2):
        with pytest.raises(TargetError, match=r"'cat' is not a class number, and the names .* are not known"):
            vitreous.explain(model, random_images(2), "gae", target)


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("cat", "did you mean 'tabby cat' or 'tiger cat'\\?$"),  # not crate, whose letters are as alike
        ("tabbi", "did you mean 'tabby'"),
        ("egypt", "did you mean 'Egyptian_Mau'"),
    ],
)
def test_a_class_that_is_not_known_is_answered_with_those_that_contain_the_word(model, word, suggested):
    with pytest.raises(TargetError, match=suggested):
        vitreous.explain(named(model), random_images(1), "gae", word)


def test_more_suggestions_are_counted():
    cats = [f"{kind} cat" for kind in ("tabby", "tiger", "Persian", "Siamese", "Egyptian")]
    with pytest.raises(TargetError, match=r"'tabby cat' or 'tiger cat' or 'Persian cat'\? \(2 more contain it\)"):
        find_class("cat", ["crate", *cats])


def test_several_classes_of_one_image_are_hinted_at(model):
    with pytest.raises(TargetError, match=r"\(2,\) for 1 image: .* several classes of each image give \[\[2, 4\]\]$"):
        vitreous.explain(model, random_images(1), "gae", [2, 4])
    with pytest.raises(TargetError, match=r"\(2,\) for 3 images: .* give \[\[2, 4\]\] \* 3$"):
        vitreous.explain(model, random_images(3), "gae", [2, 4])


def test_public_names_are_listed_before_they_are_used():
    code = "import sys, vitreous; print(*dir(vitreous)); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert listed == sorted(vitreous.__all__)
    assert all(hasattr(vitreous, name) for name in listed)
