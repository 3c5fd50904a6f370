"""Our protocols on maps that others made."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from small_models import golden_model, random_images, small_vit
from vitreous.datasets.dataset import Sample
from vitreous.errors import InputError, ModelError, ProtocolError
from vitreous.evaluation.protocols import find_protocol
from vitreous.evaluation.runner.measure import measure
from vitreous.models import LoadedModel, Preprocessing

SIMPLE = Preprocessing(image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, resize="squash")


@pytest.fixture(scope="module")
def pair():
    return small_vit(depth=2), SIMPLE


@pytest.fixture(scope="module")
def images():
    return random_images(2)


@pytest.mark.parametrize("protocol", ["tokentm-probability", "libra-mif", "saco", "single-deletion", "completeness"])
def test_maps_of_our_methods_measure_as_the_methods_do(protocol):
    """The same rows, whether a method is run by ``measure`` or its maps are given."""
    model, _ = golden_model()
    loaded = LoadedModel("golden", model, SIMPLE, None)
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(2)]
    samples = [Sample(f"image-{number}", picture) for number, picture in enumerate(pictures)]
    expected = measure(loaded, samples, find_protocol(protocol), ["gae", "ixg"])
    explanation = vitreous.explain(loaded, pictures, ["gae", "ixg"])
    maps = {method: scores.reshape(2, 4, 4) for method, scores in explanation.scores.items()}
    found = vitreous.evaluate_maps(loaded, pictures, maps, protocol)
    assert not found.errors
    assert list(found.rows) == expected


def test_maps_of_pixels_and_of_patches_measure_the_same(pair, images):
    patches = vitreous.explain(pair[0], images, "gae").scores["gae"].reshape(2, 4, 4)
    pixels = patches.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2).numpy()
    found = vitreous.evaluate_maps(pair, images, {"patches": patches, "pixels": pixels}, "libra-mif")
    rows = {name: [row for row in found.rows if row["method"] == name] for name in ("patches", "pixels")}
    without_name = [[{**row, "method": ""} for row in rows[name]] for name in rows]
    assert without_name[0] == without_name[1]


def test_one_array_and_what_is_reported(pair, images):
    maps = np.random.default_rng(0).random((2, 32, 32))
    found = vitreous.evaluate_maps(pair, images, maps, "tokentm-probability")
    (estimates,) = found.estimates.values()
    assert estimates["AOPC"].n == 2
    assert "AOPC" in str(found)
    assert found.protocol.name == "tokentm-probability"


def test_better_maps_score_better(pair, images):
    """The greedy order of a model's own answers against its reverse."""
    model, _ = pair
    drops = []
    target = model(images).argmax(dim=1)
    for cell in range(16):
        erased = images.clone()
        row, column = divmod(cell, 4)
        erased[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = -1.0
        probabilities = [model(each).softmax(dim=1).gather(1, target[:, None])[:, 0] for each in (images, erased)]
        drops.append((probabilities[0] - probabilities[1]).detach())
    maps = torch.stack(drops, dim=1).reshape(2, 4, 4)
    found = vitreous.evaluate_maps(pair, images, {"good": maps, "bad": -maps}, "tokentm-probability").estimates
    assert found["good"]["AOPC"].mean > found["bad"]["AOPC"].mean


def test_masks(pair, images):
    masks = np.zeros((2, 32, 32), dtype=np.int16)
    masks[:, 8:24, 8:24] = 1
    found = vitreous.evaluate_maps(pair, images, {"mask": masks.astype(float)}, "localisation", masks=masks)
    assert not found.errors
    assert found.estimates["mask"]["pointing game"].mean == 1


def test_classes(pair, images):
    predicted = pair[0](images).argmax(dim=1)
    labels = (predicted + 1) % 5
    maps = np.random.default_rng(0).random((2, 32, 32))
    asked = {"protocol": "chefer-2021-perturbation", "labels": labels}
    found = vitreous.evaluate_maps(pair, images, maps, **asked)
    assert len(found.errors) == 2
    assert "give maps (batch, k, ...)" in next(iter(found.errors.values()))
    both = np.stack([maps, maps], axis=1)
    targets = torch.stack([predicted, labels], dim=1)
    assert not vitreous.evaluate_maps(pair, images, both, targets=targets, **asked).errors


def test_what_takes_the_method_is_left_out(pair, images):
    maps = np.random.default_rng(0).random((2, 4, 4))
    with pytest.warns(UserWarning, match="model randomisation, max-sensitivity|model randomisation"):
        found = vitreous.evaluate_maps(pair, images, maps, "sanity")
    assert not found.errors
    with pytest.raises(ProtocolError, match="maps alone are not enough"):
        vitreous.evaluate_maps(pair, images, maps, "shift-stability")
    with pytest.raises(ProtocolError, match="texts"):
        vitreous.evaluate_maps(pair, images, maps, "eraser-movies")
    with pytest.raises(ProtocolError, match="mosaics"):
        vitreous.evaluate_maps(pair, images, maps, "grid-pointing-2x2")


def test_wrong_shapes(pair, images):
    maps = np.zeros((2, 4, 4))
    with pytest.raises(InputError, match="must have shape"):
        vitreous.evaluate_maps(pair, images, maps[0], "saco")
    found = vitreous.evaluate_maps(pair, images, np.zeros((2, 5, 5)), "saco")
    assert all("must be those of the patches" in error for error in found.errors.values())
    with pytest.raises(InputError, match="masks"):
        vitreous.evaluate_maps(pair, images, maps, "localisation", masks=maps)
    with pytest.raises(InputError, match="labels"):
        vitreous.evaluate_maps(pair, images, maps, "saco", labels=[1, 2, 3])
    with pytest.raises(ModelError, match="black pixel"):
        vitreous.evaluate_maps(torch.nn.Sequential(pair[0]), images, maps, "saco")
