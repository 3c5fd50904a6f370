"""Photos are prepared exactly as timm's evaluation and transformers' image processors prepare them."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from vitreous.errors import InputError, ModelError
from vitreous.models.preprocessing import Preprocessing, as_image_size, from_processor, from_timm

HALF = (0.5, 0.5, 0.5)


def variants(photo):
    """The photo wide, tall, square, and small."""
    yield from (photo, photo.rotate(90, expand=True), photo.resize((90, 90)), photo.resize((31, 17)))


class ModelWithConfig(torch.nn.Module):
    """What timm's functions read of a model."""

    def __init__(self, **config):
        super().__init__()
        self.pretrained_cfg = config


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_clip_224.openai",
    ],
)
def test_equals_timm_for_real_models(photo, name):
    model = ModelWithConfig(**timm.get_pretrained_cfg(name).to_dict())
    expected = create_transform(**resolve_data_config({}, model=model), is_training=False)
    preprocessing = from_timm(model)
    for image in variants(photo):
        assert torch.allclose(preprocessing([image])[0], expected(image), atol=1e-6, rtol=0)


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("size", [(224, 224), (96, 160), (161, 97)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_equals_timm_for_every_setting(photo, crop_mode, size, crop_pct, interpolation):
    settings = {"crop_mode": crop_mode, "crop_pct": crop_pct, "interpolation": interpolation}
    model = ModelWithConfig(input_size=(3, *size), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), **settings)
    expected = create_transform(**resolve_data_config({}, model=model), is_training=False)
    for image in variants(photo):
        assert torch.allclose(from_timm(model)([image])[0], expected(image), atol=1e-6, rtol=0)


def test_unknown_timm_crop_mode_is_refused():
    with pytest.raises(ModelError, match="border"):
        from_timm(ModelWithConfig(crop_mode="border"))


def processors():
    transformers = pytest.importorskip("transformers")
    yield "vit", transformers.ViTImageProcessorPil()
    yield "deit", transformers.DeiTImageProcessorPil()
    yield "beit", transformers.BeitImageProcessorPil(size=256, crop_size=224, do_center_crop=True)
    yield "clip", transformers.CLIPImageProcessorPil()
    yield "clip, odd margins", transformers.CLIPImageProcessorPil(size={"shortest_edge": 101}, crop_size=100)
    yield "siglip", transformers.SiglipImageProcessorPil()
    yield "dinov2", transformers.BitImageProcessorPil(size={"shortest_edge": 256}, crop_size=224)
    yield "not square", transformers.ViTImageProcessorPil(size={"height": 96, "width": 160})
    yield "not normalised", transformers.ViTImageProcessorPil(do_normalize=False)
    yield "not rescaled", transformers.ViTImageProcessorPil(do_rescale=False)


def test_equals_transformers_processors(photo):
    for name, processor in processors():
        preprocessing = from_processor(processor.to_dict(), (224, 224))
        for image in variants(photo):
            expected = processor(image, return_tensors="pt")["pixel_values"][0].float()
            scale = 1 if processor.do_rescale else 255
            assert torch.allclose(preprocessing([image])[0], expected, atol=2e-6 * scale, rtol=0), name


def test_close_to_transformers_tensor_backend(photo):
    # It resizes tensors rather than photos and rounds a few pixels differently, by one of 255 levels.
    transformers = pytest.importorskip("transformers")
    processor = transformers.ViTImageProcessor()
    difference = (
        from_processor(processor.to_dict(), (224, 224))([photo]) - processor(photo, return_tensors="pt")["pixel_values"]
    )
    assert difference.abs().max() < 2.1 / 255 / 0.5
    assert (difference.abs() > 1e-5).float().mean() < 0.01


def test_processor_without_resize_uses_the_models_size(photo):
    settings = {"do_resize": False, "image_mean": HALF, "image_std": HALF}
    assert from_processor(settings, (32, 48))([photo]).shape == (1, 3, 32, 48)


@pytest.mark.parametrize(
    "setting", [{"size": {"longest_edge": 9}}, {"size": {}}, {"do_flip_channel_order": True}, {"do_pad": True}]
)
def test_processor_with_other_steps_is_refused(setting):
    settings = {"size": {"height": 8, "width": 8}, "image_mean": HALF, "image_std": HALF} | setting
    with pytest.raises(ModelError, match="not supported"):
        from_processor(settings, (8, 8))


def test_batch_equals_single_photos(photo):
    preprocessing = Preprocessing((32, 32), HALF, HALF)
    images = list(variants(photo))
    batch = preprocessing(images)
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.cat([preprocessing([image]) for image in images]))


def test_photos_become_float32_whatever_the_default_type_is(photo):
    preprocessing = Preprocessing((32, 32), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    expected = preprocessing([photo])
    torch.set_default_dtype(torch.float64)
    try:
        found = preprocessing([photo])
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_displayed_is_what_the_model_sees(photo):
    preprocessing = Preprocessing((48, 64), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), resize_size=(60, 80))
    shown = preprocessing.displayed(photo)
    assert shown.size == (64, 48)
    pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    assert torch.allclose(preprocessing([photo])[0] * std + mean, pixels, atol=1e-6)


def test_other_modes_are_converted(photo):
    preprocessing = Preprocessing((32, 32), HALF, HALF)
    assert preprocessing([photo.convert("L")]).shape == (1, 3, 32, 32)


def test_no_photos_and_empty_photos_are_refused():
    preprocessing = Preprocessing((32, 32), HALF, HALF)
    with pytest.raises(InputError, match="no images"):
        preprocessing([])
    with pytest.raises(InputError, match="no content"):
        preprocessing([Image.new("RGB", (0, 3))])


@pytest.mark.parametrize("given", [0.25, [0.25], (0.25, 0.25, 0.25), 1])
def test_override_takes_one_number_or_three(given):
    changed = Preprocessing((32, 32), HALF, HALF).override(mean=given, std=given)
    value = 1.0 if given == 1 else 0.25
    assert changed.mean == changed.std == (value,) * 3


def test_override_of_nothing_changes_nothing():
    preprocessing = Preprocessing((32, 32), HALF, HALF, resize_size=(40, 40))
    assert preprocessing.override() == preprocessing


def test_override_of_the_size_crops_the_same_share():
    changed = Preprocessing((224, 224), HALF, HALF, resize_size=(256, 256)).override(image_size=448)
    assert (changed.image_size, changed.resize_size) == ((448, 448), (512, 512))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": (1, 2)},
        {"mean": float("nan")},
        {"mean": ()},
        {"std": 0},
        {"std": (1, 1, -1)},
        {"image_size": 0},
        {"image_size": (1, 2, 3)},
    ],
)
def test_impossible_overrides(wrong):
    with pytest.raises(ModelError):
        Preprocessing((32, 32), HALF, HALF).override(**wrong)


def test_image_size_of_one_number_or_two():
    assert as_image_size(5) == (5, 5)
    assert as_image_size([5, 6]) == (5, 6)


def test_a_strip_that_would_fill_the_memory_is_refused():
    preprocessing = Preprocessing((224, 224), HALF, HALF)
    assert preprocessing.displayed(Image.new("RGB", (300, 1))).size == (224, 224)
    with pytest.raises(InputError, match="60000 x 1 pixels would be"):
        preprocessing.displayed(Image.new("RGB", (60_000, 1)))
