"""Networks given as objects, with photos: timm's know how these become their input, others come with what knows it."""

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image

import vitreous
from evaluations import write_photos
from vitreous.errors import InputError
from vitreous.models import Preprocessing, load_model
from vitreous.pictures import (
    depth_strip,
    heads_strip,
    perturbation_curves,
    start_layer_strip,
    token_transformation,
)
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
    pair = (torch.nn.Sequential(network), Preprocessing((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    for model in (network, pair):
        (curves,) = perturbation_curves(model, photo, vitreous.explain(model, photo, "gae"), steps=2)
        assert len(curves.deletion) == 3
        assert token_transformation(model, photo).block == 1
        assert len(heads_strip(model, photo).maps) == 3
        assert (
            len(depth_strip(model, photo, "tokentm").maps) == len(start_layer_strip(model, photo, "decompx").maps) == 2
        )
    (row,) = measure_speed(network, methods="ixg", batch=1, repeats=1)
    assert row.method == "ixg"


def test_a_module_around_it_does_not_know(network, photo):
    with pytest.raises(InputError, match="a name, a timm model, or a pair of a model and its image processor"):
        vitreous.explain(torch.nn.Sequential(network), photo, "gae")
    known = Preprocessing((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), resize_size=(35, 35))
    told = vitreous.explain((torch.nn.Sequential(network), known), photo, "gae")
    assert torch.equal(told.scores["gae"], vitreous.explain(network, photo, "gae").scores["gae"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier and its image processor, saved."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
    )
    config.id2label = {0: "cat", 1: "dog"}
    folder = tmp_path_factory.mktemp("classifier")
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size, image_mean=[0.4, 0.5, 0.6]).save_pretrained(folder)
    return folder


@pytest.fixture
def pair(folder):
    model = transformers.ViTForImageClassification.from_pretrained(folder)
    return model, transformers.AutoImageProcessor.from_pretrained(folder)


def test_a_model_and_its_image_processor_give_what_the_name_gives(folder, pair, photo):
    wanted = vitreous.explain(f"hf/{folder}", photo, "gae")
    found = vitreous.explain(pair, photo, "gae")
    assert torch.equal(found.scores["gae"], wanted.scores["gae"])
    assert found.class_names == ("cat", "dog")
    assert found.preprocessing == load_model(f"hf/{folder}").preprocessing


def test_they_are_measured_as_the_name_is(folder, pair, tmp_path):
    data = write_photos(tmp_path / "photos", 2)
    options = {"methods": "rollout", "limit": 2}
    named = vitreous.evaluate(f"hf/{folder}", data, "chefer-2021-segmentation", out=tmp_path / "named", **options)
    paired = vitreous.evaluate(pair, data, "chefer-2021-segmentation", out=tmp_path / "paired", **options)
    assert paired.rows() == named.rows()


def test_what_says_nothing_of_photos_is_refused(pair, photo):
    with pytest.raises(InputError, match=r"an image processor of transformers, .* not object"):
        vitreous.explain((pair[0], object()), photo, "gae")
    with pytest.raises(InputError, match="a pair must be a model and its preprocessing"):
        vitreous.explain((*pair, None), photo, "gae")


@pytest.mark.parametrize("given", ["weights", "transforms"])
def test_weights_tell_how_photos_become_the_input(given):
    torch.manual_seed(0)
    weights = torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1
    network = torchvision.models.VisionTransformer(224, 32, 2, 2, 24, 48)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (301, 270, 3), dtype=np.uint8))
    wanted = vitreous.explain(network, weights.transforms()(photo)[None], "gae")
    found = vitreous.explain((network, weights if given == "weights" else weights.transforms()), photo, "gae")
    # torchvision divides by 255 where the product with 1/255 is taken here: the last digit of a float32
    torch.testing.assert_close(found.scores["gae"], wanted.scores["gae"], rtol=1e-4, atol=1e-6)
    assert (found.class_names or ("",))[0] == ("tench" if given == "weights" else "")
