"""Every registered method on photos and a trained ViT-Ti: finite maps that say something, and that tell classes apart.

Methods that read one run share it, for photos at the model's own size of 224 pixels. All else is asked of the model at
112 pixels, relevance too but for a few photos, and of methods that run it again with few evaluations and in one call,
whose maps of two classes are also looked through for what a map of one class has to be; how good a map is, is not asked
here.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import vitreous
from few_evaluations import runs_again, spelled
from vitreous.inputs.images import read_image
from vitreous.methods import list_methods
from vitreous.models import LoadedModel, load_model

pytestmark = pytest.mark.shared

METHODS = [info for info in list_methods() if info.family != "plugin"]
NAMES = [info.name for info in METHODS]
PHOTOS, AT_ONCE = 4, 16
RARE = 16  # photos among which there are some that get no map by what clamps it
# These take two thirds of the time of all that read one run: at 224 pixels they are asked of a few photos.
RELEVANCE, FEW_PHOTOS = ("abslrp", "transattr", "lrp", "lrp_rollout"), 2
# What clamps its map at 0 has nothing left where no patch speaks for the class. That is so in these two methods alone,
# each of which can be asked for the map before the clamp.
UNCLAMPED = {"attcam": "attcam:convention=skipplus", "gradtoken": "gradtoken:heads=average"}
# The two things that are in each picture, as classes of ImageNet; one picture of each kind.
IN_ONE_PICTURE = {
    "catdog": (243, 282),  # bull mastiff, tiger cat
    "dogbird": (161, 90),  # basset, lorikeet
    "el1": (386, 340),  # African elephant, zebra
}


READING_ONE_RUN = [*(spelled(info) for info in METHODS if not runs_again(info)), *UNCLAMPED.values()]


def tiny(data: Path, image_size: int) -> LoadedModel:
    weights = data / "vit_tiny_patch16_224.safetensors"
    return load_model(f"timm/vit_tiny_patch16_224@{weights}", mean=0.5, std=0.5, image_size=image_size)


@pytest.fixture(scope="module")
def data() -> Path:
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the development data is not at {folder}")
    return folder


@pytest.fixture(scope="module")
def small(data) -> LoadedModel:
    """The model on 49 patches: a fifth of the cost of 196."""
    return tiny(data, 112)


@pytest.fixture(scope="module")
def photos(data) -> list[Image.Image]:
    with (data / "imagenet" / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))[:RARE]
    return [read_image(data / "imagenet" / row["file"]) for row in rows]


@pytest.fixture(scope="module")
def of_photos(data, photos) -> dict[str, Tensor]:
    """The maps of all methods that read one run, (photos, patches); of relevance for few photos, of some for more."""
    model = tiny(data, 224)
    clamped = [*UNCLAMPED, *UNCLAMPED.values()]
    others = [spelling for spelling in READING_ONE_RUN if spelling not in {*RELEVANCE, *clamped}]
    maps = explained(model, photos, clamped) | explained(model, photos[:PHOTOS], others)
    return maps | explained(model, photos[:FEW_PHOTOS], RELEVANCE)


@pytest.fixture(scope="module")
def relevance(small, photos) -> dict[str, Tensor]:
    """The maps of relevance of all photos, on 49 patches."""
    return explained(small, photos[:PHOTOS], RELEVANCE)


@pytest.fixture(scope="module")
def two_things(data) -> tuple[list[Image.Image], list[tuple[int, int]]]:
    return [read_image(data / "multi" / f"{name}.png") for name in IN_ONE_PICTURE], list(IN_ONE_PICTURE.values())


@pytest.fixture(scope="module")
def maps_of_two_classes(small, two_things) -> Callable[[str], Tensor]:
    """The maps of a method that runs the model again, (pictures, classes, patches): made once, for both tests."""
    pictures, classes = two_things
    return cache(lambda spelling: vitreous.explain(small, pictures, spelling, target=classes).scores[spelling])


@pytest.fixture(scope="module")
def of_two_classes(data, two_things) -> dict[str, Tensor]:
    """The maps of all methods that read one run, (pictures, classes, patches).

    In float64, for in float32 rounding alone turns the relevance of LRP, which explodes, into another map.
    """
    (pictures, classes), model = two_things, tiny(data, 112)
    return vitreous.explain(
        model.model.double(), model.preprocessing(pictures).double(), READING_ONE_RUN, target=classes
    ).scores


def explained(model: LoadedModel, photos: Sequence[Image.Image], spellings: Sequence[str]) -> dict[str, Tensor]:
    """Scores of the predicted classes, in batches."""
    batches = [photos[start : start + AT_ONCE] for start in range(0, len(photos), AT_ONCE)]
    parts = [vitreous.explain(model, batch, spellings).scores for batch in batches]
    return {spelling: torch.cat([part[spelling] for part in parts]) for spelling in spellings}


def constant(maps: Tensor) -> Tensor:
    """Which maps are the same everywhere but for float32's rounding, (...)."""
    spread = maps.amax(dim=-1) - maps.amin(dim=-1)
    return spread <= 1e-6 * maps.abs().amax(dim=-1)


@pytest.mark.parametrize("info", METHODS, ids=NAMES)
def test_photos_get_finite_maps_that_are_not_the_same_everywhere(info, request):
    spelling = spelled(info)
    if runs_again(info):
        maps = request.getfixturevalue("maps_of_two_classes")(spelling)
        found = {(2 * len(IN_ONE_PICTURE), 49): {spelling: maps.flatten(0, 1)}}
    elif spelling in RELEVANCE:
        found = {
            (PHOTOS, 49): request.getfixturevalue("relevance"),
            (FEW_PHOTOS, 196): request.getfixturevalue("of_photos"),
        }
    else:
        count = RARE if info.name in UNCLAMPED else PHOTOS
        found = {(count, 196): request.getfixturevalue("of_photos")}
    for shape, scores in found.items():
        maps = scores[spelling]
        assert maps.shape == shape
        assert torch.isfinite(maps).all()
        if info.name not in UNCLAMPED:
            assert not constant(maps).any()


@pytest.mark.parametrize("name", UNCLAMPED)
def test_a_map_of_zeros_means_that_no_patch_speaks_for_the_class(name, of_photos):
    maps, before = of_photos[name], of_photos[UNCLAMPED[name]]
    zero = (maps == 0).all(dim=1)
    assert torch.equal(constant(maps), zero)
    assert 0 < zero.sum() < RARE / 4  # rare, but it is found on these photos: 3 for attcam, 1 for gradtoken
    assert (before[zero] <= 0).all()
    assert not constant(before).any()


@pytest.mark.parametrize("info", METHODS, ids=NAMES)
def test_two_things_in_one_picture_get_different_maps(info, request):
    spelling = spelled(info)
    if runs_again(info):
        maps = request.getfixturevalue("maps_of_two_classes")(spelling)
    else:
        maps = request.getfixturevalue("of_two_classes")[spelling]
    assert maps.shape[:2] == (len(IN_ONE_PICTURE), 2)
    assert torch.isfinite(maps).all()
    one, other = maps.unbind(dim=1)
    if not info.class_specific:
        assert torch.equal(one, other)
        return
    speaking = ~(maps == 0).all(dim=-1).all(dim=-1)
    assert speaking.all() or info.name in UNCLAMPED
    # Not only in size, or they would show the same picture. The least is 5e-4 (lrp); those that run the model again, in
    # float32, have at least 4e-3, of which rounding is 1e-5.
    directions = torch.nn.functional.normalize(maps[speaking].double(), dim=-1)
    differences = (directions[:, 0] - directions[:, 1]).norm(dim=-1)
    assert (differences > 1e-4).all()
