"""A network that timm made, given as an object: it knows how photos become its input, and is left as it was."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vitreous
from vitreous.errors import InputError
from vitreous.pictures import perturbation_curves, token_transformation
from vitreous.speed import measure_speed


@pytest.fixture
def network():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()


@pytest.fixture
def photo():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8))


def transformed(network, photo):
    """The input that timm's own evaluation transform makes of a photo."""
    # Built for 32 pixels, which its configuration does not say.
    settings = timm.data.resolve_data_config({"input_size": (3, 32, 32)}, model=network)
    return timm.data.create_transform(**settings, is_training=False)(photo)[None]


def test_photos_become_what_timm_makes_of_them(network, photo, tmp_path):
    photo.save(tmp_path / "photo.png")
    wanted = vitreous.explain(network, transformed(network, photo), "gae")
    for given in (photo, tmp_path / "photo.png", np.asarray(photo), [photo]):
        found = vitreous.explain(network, given, "gae")
        # float32 pixels, normalised in another order of the same operations
        torch.testing.assert_close(found.scores["gae"], wanted.scores["gae"], rtol=1e-4, atol=1e-6)
        assert found.images is not None
        assert found.preprocessing.mean == (0.5, 0.5, 0.5)


def test_it_stays_in_training_mode(network, photo):
    quiet = vitreous.explain(network, photo, "gae").scores["gae"]
    network.train()
    assert torch.equal(vitreous.explain(network, photo, "gae").scores["gae"], quiet)
    assert network.training


def test_a_backbone_is_taken_at_its_word(photo):
    backbone = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    assert vitreous.explain(backbone, photo, "ixg").logits.shape == (1, 192)


def test_black_is_known_of_photos_and_not_of_tensors(network, photo):
    spelling = "integrated_gradients:baseline=black,steps=2"
    assert vitreous.explain(network, photo, spelling).scores[spelling].shape == (1, 4)
    with pytest.raises(vitreous.errors.MethodError, match="baseline=black needs a model whose preprocessing is known"):
        vitreous.explain(network, transformed(network, photo), spelling)


def test_figures_and_speed_take_it_too(network, photo):
    (curves,) = perturbation_curves(network, photo, vitreous.explain(network, photo, "gae"), steps=2)
    assert len(curves.deletion) == 3
    assert token_transformation(network, photo)
    (row,) = measure_speed(network, methods="ixg", batch=1, repeats=1)
    assert row.method == "ixg"


def test_a_module_around_it_does_not_know(network, photo):
    with pytest.raises(InputError, match="loaded by name or that timm made"):
        vitreous.explain(torch.nn.Sequential(network), photo, "gae")
