"""A user's mistake gets one sentence of its own type, whatever layer would have noticed it otherwise."""

from __future__ import annotations

from contextlib import suppress
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitreous
from small_models import CLASSES, random_images, small_vit
from vitreous.errors import InputError, MethodError, ModelError, TargetError, UnsupportedModelError, VitreousError
from vitreous.models import LoadedModel, Preprocessing
from vitreous.speed.timing import one_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2)


def refused(error, pattern, *arguments, **options):
    """The call is refused by exactly this type, in one line that says why."""
    with pytest.raises(VitreousError, match=pattern) as caught:
        vitreous.explain(*arguments, **options)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


GOOD = random_images()
WITH_NAN = GOOD.clone()
WITH_NAN[1, 2, 3, 4] = float("nan")
WITH_INFINITY = GOOD.clone()
WITH_INFINITY[0, 0, 0, 0] = -float("inf")

IMAGES = {
    "one image without a batch": (GOOD[0], r"\(batch, 3, height, width\), not \(3, 32, 32\)"),
    "rank 5": (GOOD[None], r"cannot take volumes or clips of shape \(1, 2, 3, 32, 32\)"),
    "rank 6": (GOOD[None, None], r"not \(1, 1, 2, 3, 32, 32\)"),
    "a number": (torch.tensor(1.0), r"not \(\)"),
    "grey": (GOOD[:, :1], "32 x 32 pixels in 1 channel: .* to have 3 channels"),
    "with an alpha channel": (random_images(channels=4), "32 x 32 pixels in 4 channels: .* to have 3 channels"),
    "channels last": (GOOD.permute(0, 2, 3, 1), r"in 32 channels \(channels come first: \(2, 32, 32, 3\)\)"),
    "no image": (GOOD[:0], "empty"),
    "no width": (GOOD[..., :0], "empty"),
    "one NaN": (WITH_NAN, "NaN or infinite pixels"),
    "one infinity": (WITH_INFINITY, "NaN or infinite pixels"),
    "bytes": (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "floating point and normalised, not torch.uint8"),
    "integers": (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "floating point and normalised, not torch.int64"),
    "booleans": (GOOD > 0, "floating point and normalised, not torch.bool"),
    "complex numbers": (GOOD + 0j, "floating point and normalised, not torch.complex128"),
    "too large": (torch.zeros(1, 3, 48, 48), "cannot take images of 48 x 48 pixels"),
    "too small for a patch": (torch.zeros(1, 3, 4, 4), "cannot take images of 4 x 4 pixels"),
    "one row too many": (torch.zeros(1, 3, 33, 32), "cannot take images of 33 x 32 pixels"),
    "huge pixels": (GOOD * 1e300, "NaN or infinite class scores"),
    "a picture": (Image.new("RGB", (32, 32)), "a model with known preprocessing"),
    "pictures": ([Image.new("RGB", (32, 32))], "a model with known preprocessing"),
    "a path": ("cat.png", "a model with known preprocessing"),
    "a numpy array": (GOOD.numpy(), "a preprocessed tensor"),
    "a list of tensors": ([GOOD[0]], "a preprocessed tensor"),
    "nothing": (None, "not NoneType"),
    "an integer": (7, "not int"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_images_that_the_model_cannot_take(model, case):
    images, pattern = IMAGES[case]
    refused(InputError, pattern, model, images, ["gae", "decompx"])


class Grey(nn.Module):
    """Shows a model of one channel the mean of all; another convolution of it comes first and runs last."""

    def __init__(self):
        super().__init__()
        self.fuse = nn.Conv2d(24, 24, 1, dtype=torch.float64)
        self.inside = small_vit(depth=2, in_chans=1)

    def forward(self, images):
        tokens = self.inside.forward_features(images.mean(dim=1, keepdim=True))
        return self.inside.head(tokens[:, 0] + self.fuse(tokens[:, 1:].mT.unflatten(2, (4, 4))).mean(dim=(2, 3)))


class Coordinates(nn.Module):
    """Adds two channels that say where a pixel is."""

    def __init__(self):
        super().__init__()
        self.inside = small_vit(depth=2, in_chans=5)

    def forward(self, images):
        rows = torch.linspace(-1, 1, images.shape[-2], dtype=images.dtype)[:, None].expand_as(images[:, :1])
        return self.inside(torch.cat((images, rows, rows.mT), dim=1))


class LinearPatches(nn.Module):
    """Patches of one channel, embedded by a linear layer, as of MNIST's digits."""

    def __init__(self):
        super().__init__()
        self.inside = small_vit(depth=2)
        self.inside.patch_embed = nn.Linear(64, 24, dtype=torch.float64)

    def forward(self, images):
        return self.inside(images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(4).flatten(1, 3))


@pytest.mark.parametrize(("build", "channels"), [(Grey, 3), (Coordinates, 3), (LinearPatches, 1)])
def test_channels_are_what_the_model_makes_of_them(build, channels):
    """Not what its first convolution would take, or three where it has none."""
    model, images = build(), random_images(channels=channels)
    inputs = []
    hook = model.inside.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    logits = model(images)
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[:, 2].sum(), inputs)
    found = vitreous.explain(model, images, "ixg", target=2)
    assert found.grid == (4, 4)
    # Float64, the same operations.
    torch.testing.assert_close(found.scores["ixg"], (inputs[0] * gradient).sum(-1)[:, 1:], rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def loaded(model):
    return LoadedModel("small", model, Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3), None)


PIXELS = np.random.default_rng(0).integers(0, 256, (2, 40, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize("images", [PIXELS, list(PIXELS), [Image.fromarray(PIXELS[0]), PIXELS[1]]])
def test_arrays_of_bytes_are_pictures(loaded, images):
    found = vitreous.explain(loaded, images, ["ixg"], target=1)
    expected = vitreous.explain(loaded, [Image.fromarray(pixels) for pixels in PIXELS], ["ixg"], target=1)
    assert torch.equal(found.scores["ixg"], expected.scores["ixg"])
    alone = vitreous.explain(loaded, PIXELS[1], ["ixg"], target=1)
    assert np.array_equal(np.asarray(alone.images[0]), np.asarray(expected.images[1]))
    assert len(alone) == 1


NO_PICTURES = {
    "fractions": (PIXELS / 255, "uint8 pixels"),
    "one picture of fractions": (PIXELS[0] / 255, "uint8 pixels"),
    "channels first": (PIXELS.transpose(0, 3, 1, 2), r"not uint8 \(3, 40, 50\)"),
    "a list of tensors": ([GOOD[0], GOOD[1]], "torch.stack"),
    "nothing in a list": ([None], "not NoneType"),
    "numbers": ([3], "not int"),
    "an empty list": ([], "no image"),
    "an empty array": (PIXELS[:0], "no image"),
    "a number in an array": (np.array(3), "uint8 pixels"),
    "bytes": (b"\x89PNG", "not int"),
}


@pytest.mark.parametrize("case", NO_PICTURES)
def test_pictures_that_a_loaded_model_cannot_take(loaded, case):
    images, pattern = NO_PICTURES[case]
    refused(InputError, pattern, loaded, images, ["ixg"])


def test_an_open_file_is_one_picture(loaded, tmp_path):
    picture = Image.new("RGB", (50, 40), (200, 30, 90))
    picture.save(tmp_path / "photo.png")
    expected = vitreous.explain(loaded, picture, "rollout").scores["rollout"]
    with (tmp_path / "photo.png").open("rb") as file:
        assert torch.equal(vitreous.explain(loaded, file, "rollout").scores["rollout"], expected)


def test_pixels_beyond_the_models_precision():
    refused(InputError, "NaN or infinite", small_vit(depth=2, dtype=torch.float16), GOOD * 1e6, ["gae"])


def test_an_error_from_inside_the_blocks_is_not_blamed_on_the_images(model):
    """Only what fails before the first block can be the picture's fault."""

    def explode(*_):
        raise ValueError("something else")

    hook = model.blocks[1].register_forward_hook(explode)
    with pytest.raises(UnsupportedModelError, match=r"fails when it runs \(ValueError: something else\)") as caught:
        vitreous.explain(model, GOOD, ["gae"])
    hook.remove()
    assert isinstance(caught.value.__cause__, ValueError)


TARGETS = {
    "the number of classes": (CLASSES, "between 0 and 4"),
    "negative": (-1, "between 0 and 4"),
    "one of several out of range": ([[0, 1], [2, 9]], "between 0 and 4"),
    "too few": ([0], r"shape \(1,\) for 2 images"),
    "too many": ([0, 1, 2], r"shape \(3,\) for 2 images"),
    "several for one image only": ([[0, 1]], r"shape \(1, 2\) for 2 images"),
    "rank 3": (torch.zeros(2, 1, 1, dtype=torch.int64), r"shape \(2, 1, 1\) for 2 images"),
    "none for each image": (torch.zeros(2, 0, dtype=torch.int64), r"shape \(2, 0\) for 2 images"),
    "an empty list": ([], "target"),
    "a fraction": (1.0, "must be integers"),
    "fractions": (torch.tensor([0.0, 1.0]), "must be integers"),
    "numpy fractions": (np.array([0.5, 1.0]), "must be integers"),
    "a truth value": (True, "must be integers"),
    "a word": ("cat", "names of this model's classes are not known"),
    "words": (["cat", "dog"], "names of this model's classes are not known"),
    "unequal numbers": ([[0, 1], [2]], "must be None, an integer"),
    "nothing for one image": ([None, 1], "must be None, an integer"),
    "beyond 64 bits": (2**70, "must be None, an integer"),
    "something else": (object(), "must be None, an integer"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_that_do_not_exist(model, case):
    target, pattern = TARGETS[case]
    refused(TargetError, pattern, model, GOOD, ["gae"], target=target)


@pytest.mark.parametrize(
    ("topk", "pattern"),
    [
        (0, "between 1 and 5"),
        (-1, "between 1 and 5"),
        (CLASSES + 1, "between 1 and 5"),
        (2.0, "whole number"),
        ("2", "whole number"),
        (True, "whole number"),
    ],
)
def test_topk_that_does_not_exist(model, topk, pattern):
    refused(TargetError, pattern, model, GOOD, ["gae"], topk=topk)


def test_target_and_topk_together(model):
    refused(TargetError, "not both", model, GOOD, ["gae"], target=1, topk=2)


@pytest.mark.parametrize("methods", [[], (), set(), iter([])])
def test_no_method(model, methods):
    refused(MethodError, "no method", model, GOOD, methods)


@pytest.mark.parametrize("methods", [3, [3], ["gae", None], [["gae"]]])
def test_methods_that_are_not_spellings(model, methods):
    refused(MethodError, "spelling", model, GOOD, methods)


MODELS = {
    "nothing": (None, InputError, "not NoneType"),
    "a number": (3, InputError, "not int"),
    "a function": (lambda images: images, InputError, "not function"),
    "a class": (nn.Linear, InputError, "not type"),
    "weights": ({"weight": torch.zeros(1)}, InputError, "not dict"),
    "an unknown name": ("resnetvit", ModelError, "not understood"),
    "a layer": (nn.Conv2d(3, 8, 3), UnsupportedModelError, "no residual stream of tokens"),
    "no parameters": (nn.Identity(), UnsupportedModelError, "calls no PyTorch function on its input"),
    "a convolutional network": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        UnsupportedModelError,
        "no residual stream of tokens",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_of_the_wrong_kind(case):
    model, error, pattern = MODELS[case]
    refused(error, pattern, model, GOOD, ["gae"])


class Returning(nn.Module):
    """A ViT whose scores are turned into something else."""

    def __init__(self, change):
        super().__init__()
        self.vit, self.change = small_vit(depth=2), change

    def forward(self, images):
        return self.change(self.vit(images))


OUTPUTS = {
    "nothing": (lambda scores: None, InputError, "returned NoneType"),
    "a dictionary of something else": (lambda scores: {"out": scores}, InputError, "returned dict"),
    "a word": (lambda scores: "cat", InputError, "returned str"),
    "an empty tuple": (lambda scores: (), InputError, "returned tuple"),
    "a number": (lambda scores: scores.sum(), InputError, r"returned \(\)"),
    "a map": (lambda scores: scores[:, :, None], InputError, r"returned \(2, 5, 1\)"),
    "no classes": (lambda scores: scores[:, :0], InputError, r"returned \(2, 0\)"),
    "one image only": (lambda scores: scores[:1], InputError, r"returned \(1, 5\)"),
    "NaN": (lambda scores: scores * float("nan"), InputError, "NaN or infinite class scores"),
    "the predicted class": (lambda scores: scores.argmax(dim=1), InputError, r"returned \(2,\)"),
    "integers": (lambda scores: scores.long(), UnsupportedModelError, "no gradient"),
    "a constant": (torch.ones_like, UnsupportedModelError, "no gradient"),
    "a detached copy": (lambda scores: scores.detach(), UnsupportedModelError, "no gradient"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_models_that_return_no_class_scores(case):
    change, error, pattern = OUTPUTS[case]
    refused(error, pattern, Returning(change), GOOD, ["gae", "decompx"])


WAYS = {
    "a tensor": lambda scores: scores,
    "a tuple": lambda scores: (scores, "more"),
    "a dictionary": lambda scores: {"loss": None, "logits": scores},
    "embeddings": lambda scores: {"tokens": scores[:, :2], "image_embeds": scores},
    "a read-only mapping": lambda scores: MappingProxyType({"pooler_output": scores}),
    "attributes": lambda scores: SimpleNamespace(logits=scores),
}


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_usual_ways_to_return_class_scores(change):
    found = vitreous.explain(Returning(change), GOOD, ["gae"])
    assert found.scores["gae"].shape == (2, 16)
    assert found.logits.shape == (2, CLASSES)


def test_one_number_per_image_is_one_output():
    found = vitreous.explain(Returning(lambda scores: scores[:, 3]), GOOD, ["ixg"], outputs="value")
    assert found.logits.shape == (2, 1)
    expected = vitreous.explain(Returning(lambda scores: scores), GOOD, ["ixg"], target=3, outputs="value")
    assert torch.equal(found.scores["ixg"], expected.scores["ixg"])


@pytest.mark.parametrize(
    ("images", "kind"),
    [
        (torch.empty(2, 3, 32, 32, device="meta"), "a meta"),
        (GOOD.to_sparse(), "a sparse"),
        (torch.nested.nested_tensor([GOOD[0], GOOD[1]]), "a nested"),
        (torch.quantize_per_tensor(GOOD.float(), 0.1, 0, torch.quint8), "a quantised"),
    ],
)
def test_tensors_whose_numbers_are_not_there_one_by_one(model, images, kind):
    refused(InputError, f"a plain tensor, not {kind} one", model, images, "gae")
    indices = images[:, 0, 0, 0].to(torch.int64) if kind == "a meta" else images
    refused(TargetError, f"plain tensor of integers, not {kind} one", model, GOOD, "gae", target=indices)


def test_a_model_without_numbers():
    refused(ModelError, "on the device meta", small_vit(depth=2).to("meta"), GOOD, "gae")


@pytest.mark.parametrize("methods", [["gae"], ["rollout"]])
def test_a_quantised_model_is_one_sentence_or_explained(methods):
    quantised = torch.ao.quantization.quantize_dynamic(small_vit(depth=2, dtype=torch.float32), {nn.Linear})
    with suppress(VitreousError):
        vitreous.explain(quantised, GOOD.float(), methods, precision="bf16")


@pytest.mark.parametrize("keep", ["1e-300", "1e-7", "0", "1", "-1"])
def test_a_share_of_kept_cells_by_which_nothing_can_be_divided(model, keep):
    """The maps are divided by it: 1e-300 gave infinite scores."""
    refused(MethodError, "keep must lie between 1e-06 and 1", model, GOOD, f"rise:keep={keep}")


def test_the_smallest_share_of_kept_cells_gives_numbers(model):
    found = vitreous.explain(model, GOOD, "rise:keep=1e-6,budget=4")
    assert found.scores["rise:keep=1e-6,budget=4"].isfinite().all()
