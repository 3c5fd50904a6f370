"""Large batches: explained in parts of bounded size, with the numbers of one run."""

from __future__ import annotations

import pytest
import torch

import vitreous
from operations import count_operations
from small_models import CLASSES, largest_difference, random_images, small_vit
from vitreous.api import run_methods
from vitreous.api.run_methods import batch_parts
from vitreous.errors import InputError, TargetError, UnsupportedModelError
from vitreous.methods import list_methods
from vitreous.speed.timing import one_thread

TOKENS = 17  # of one image of small_vit
IMAGES = 5
# Matrix products of another size add up in another order: 1e-16 per step in float64, amplified in methods that divide
# by small sums or run the model some hundred times.
EXACT = 1e-9
QUICK = {
    "integrated_gradients": "integrated_gradients:steps=3",
    "smoothgrad": "smoothgrad:samples=3",
    "iia": "iia:points=3",
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2, seed=4)


@pytest.fixture
def two_at_once(monkeypatch):
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 2 * TOKENS)


def runs_of(model, job) -> list[int]:
    """How many images the model was run on, each time it ran through."""
    seen: list[int] = []
    with model.register_forward_hook(lambda _module, given, _output: seen.append(len(given[0]))):
        job()
    return seen


def spelled(name: str) -> str:
    info = next(info for info in list_methods() if info.name == name)
    if name in QUICK:
        return QUICK[name]
    return f"{name}:budget=20" if "budget" in info.options else name


def test_parts_are_nearly_equal_and_bounded(model, two_at_once):
    del two_at_once
    assert batch_parts(model, random_images(IMAGES)) == [slice(0, 1), slice(1, 3), slice(3, 5)]
    assert batch_parts(model, random_images(4)) == [slice(0, 2), slice(2, 4)]
    assert batch_parts(model, random_images(2)) == [slice(0, 2)]


def test_a_batch_that_fits_is_one_run(model):
    assert batch_parts(model, random_images(IMAGES)) == [slice(0, IMAGES)]


def test_an_image_larger_than_the_bound_is_run_alone(model, monkeypatch):
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 3)
    assert batch_parts(model, random_images(2)) == [slice(0, 1), slice(1, 2)]


def test_a_model_whose_embedding_fails_says_so_itself(model, two_at_once):
    del two_at_once
    with pytest.raises(InputError, match="cannot take images of 40 x 40"):
        vitreous.explain(model, torch.zeros(3, 3, 40, 40, dtype=torch.float64), "gae")


def test_the_model_is_run_on_bounded_parts(model, monkeypatch):
    images = random_images(IMAGES)
    vitreous.explain(model, images, "gae")  # the first time, the patch grid is checked on other images
    assert runs_of(model, lambda: vitreous.explain(model, images, ["gae", "ixg"], topk=2)) == [IMAGES]
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 2 * TOKENS)
    assert runs_of(model, lambda: vitreous.explain(model, images, ["gae", "ixg"], topk=2)) == [1, 2, 2]


@pytest.mark.parametrize("name", [info.name for info in list_methods()])
def test_every_method_gives_the_numbers_of_one_run(model, monkeypatch, name):
    images, spelling = random_images(IMAGES), spelled(name)
    classes = torch.tensor([[number % CLASSES, (2 * number + 1) % CLASSES] for number in range(IMAGES)])
    whole = vitreous.explain(model, images, spelling, classes)
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 2 * TOKENS)
    split = vitreous.explain(model, images, spelling, classes)
    assert split.scores[spelling].shape == whole.scores[spelling].shape
    assert largest_difference(split.scores[spelling], whole.scores[spelling]) < EXACT
    assert largest_difference(split.logits, whole.logits) < EXACT
    assert torch.equal(split.target, whole.target)


@pytest.mark.parametrize(
    "asked",
    [{}, {"topk": 3}, {"target": 2}, {"target": [4, 3, 2, 1, 0]}, {"target": [[number] for number in range(5)]}],
)
def test_targets_are_those_of_one_run(model, monkeypatch, asked):
    images = random_images(IMAGES)
    whole = vitreous.explain(model, images, ["gae", "rollout"], **asked)
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 2 * TOKENS)
    split = vitreous.explain(model, images, ["gae", "rollout"], **asked)
    assert torch.equal(split.target, whole.target)
    for method in whole.methods:
        assert largest_difference(split.scores[method], whole.scores[method]) < EXACT


@pytest.mark.parametrize("target", [[1, 2], [0, 1, 2, 3, CLASSES], [[1, 2]]])
def test_wrong_targets_are_refused_as_for_one_run(model, monkeypatch, target):
    images = random_images(IMAGES)
    with pytest.raises(TargetError) as whole:
        vitreous.explain(model, images, "gae", target)
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 2 * TOKENS)
    with pytest.raises(TargetError) as split:
        vitreous.explain(model, images, "gae", target)
    assert str(split.value) == str(whole.value)


def test_memory_is_that_of_a_part(monkeypatch):
    images = random_images(12)
    model = small_vit(depth=6)  # so that what is recorded is more than the pictures that are drawn of all images

    def peak() -> int:
        return count_operations(model, images, lambda: vitreous.explain(model, images, "gae")).peak_bytes

    whole = peak()
    monkeypatch.setattr(run_methods, "TOKENS_AT_ONCE", 2 * TOKENS)
    assert peak() < whole / 3  # a sixth, and what does not grow with the images of a run


@pytest.mark.usefixtures("two_at_once")
def test_what_the_outputs_are_is_settled_once_for_all_parts(model):
    ended = torch.nn.Sequential(model, torch.nn.Softmax(-1)).eval()
    with pytest.warns(UserWarning, match="taken as probabilities") as caught:
        found = vitreous.explain(ended, random_images(IMAGES), ["gae"])
    assert len(caught) == 1
    assert found.outputs == "probabilities"


@pytest.mark.usefixtures("two_at_once")
def test_an_exception_of_ones_own_in_the_embedding_of_a_large_batch_is_one_sentence():
    model = small_vit(depth=2, seed=4)

    def explode(*_):
        raise LookupError("in the embedding")

    model.patch_embed.register_forward_hook(explode)
    with pytest.raises(UnsupportedModelError, match=r"fails when it runs \(LookupError: in the embedding\)"):
        vitreous.explain(model, random_images(IMAGES), ["gae"])
