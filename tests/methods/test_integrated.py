"""Integrated Gradients and SmoothGrad: agreement with captum, completeness, independence of how runs are grouped."""

from __future__ import annotations

import copy

import pytest
import torch

import vitreous
from small_models import PATCHES, largest_difference, random_images, small_vit
from vitreous.errors import MethodError
from vitreous.methods.readout import patch_sums
from vitreous.models import LoadedModel
from vitreous.models.preprocessing import Preprocessing
from vitreous.speed.timing import one_thread
from vitreous.tape.runner import ModelRunner

# Both sides do the same arithmetic in float64 in another order: 1e-15 per step, some hundred steps.
EXACT = 1e-10
TARGET = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2, seed=4)


@pytest.fixture(scope="module")
def images():
    return random_images(2, seed=4)


def ours(model, images, spelling, target=TARGET):
    return vitreous.explain(model, images, spelling, target).scores[spelling]


def per_patch(pixels: torch.Tensor) -> torch.Tensor:
    """(batch, channel, 32, 32) summed over channels and patches of 8 x 8, one after the other."""
    return torch.stack(
        [
            torch.stack(
                [image[:, top : top + 8, left : left + 8].sum() for top in range(0, 32, 8) for left in range(0, 32, 8)]
            )
            for image in pixels
        ]
    )


# captum ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_float64(monkeypatch):
    """captum rounds the weights of the integral's points to float32, which alone is a difference of 5e-8."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(before)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("quadrature", "method"), [("gauss", "gausslegendre"), ("right", "riemann_right")])
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_integrated_gradients_of_pixels_are_captums(model, images, quadrature, method, baseline):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    start = torch.zeros_like(images) if baseline == "zero" else images.mean((2, 3), keepdim=True).expand_as(images)
    expected = captum.IntegratedGradients(model).attribute(images, start, target=TARGET, n_steps=7, method=method)
    options = f"steps=7,quadrature={quadrature},baseline={baseline}"
    found = ours(model, images, f"integrated_gradients:resolution=pixel,{options}")
    assert largest_difference(found, expected.sum(dim=1).flatten(1)) < EXACT
    assert largest_difference(ours(model, images, f"integrated_gradients:{options}"), per_patch(expected)) < EXACT


@pytest.mark.usefixtures("in_float64")
def test_integrated_gradients_of_tokens_are_captums(model, images):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    layer = captum.LayerIntegratedGradients(model, model.blocks[0])
    expected = layer.attribute(images, target=TARGET, n_steps=7, attribute_to_layer_input=True)
    found = ours(model, images, "integrated_gradients:at=tokens,steps=7")
    assert largest_difference(found, expected.sum(dim=-1)[:, -PATCHES:]) < EXACT


@pytest.mark.parametrize("read", ["magnitude", "input"])
def test_smoothgrad_of_pixels_is_captums_noise_tunnel_with_the_same_noise(model, images, read, monkeypatch):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    deviations = 0.15 * (images.amax((1, 2, 3)) - images.amin((1, 2, 3)))
    generator = torch.Generator().manual_seed(7)
    drawn = torch.stack([torch.randn(images.shape[1:], generator=generator) for _ in range(5)])
    # captum draws for every image in turn and gives the noise of all its samples at once
    noise = torch.cat([deviation * drawn.double() for deviation in deviations])
    monkeypatch.setattr(torch, "normal", lambda *_: noise)
    plain = captum.Saliency(model) if read == "magnitude" else captum.InputXGradient(model)
    options = {"abs": False} if read == "magnitude" else {}
    expected = captum.NoiseTunnel(plain).attribute(
        images, nt_type="smoothgrad", nt_samples=5, stdevs=1.0, target=TARGET, **options
    )
    expected = expected.abs() if read == "magnitude" else expected
    found = ours(model, images, f"smoothgrad:samples=5,seed=7,read={read},resolution=pixel")
    assert largest_difference(found, expected.sum(dim=1).flatten(1)) < EXACT


def test_without_noise_smoothgrad_is_input_x_gradient(model, images):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    expected = captum.InputXGradient(model).attribute(images.clone().requires_grad_(), target=TARGET)
    found = ours(model, images, "smoothgrad:samples=2,noise=0,read=input,resolution=pixel")
    assert largest_difference(found, expected.sum(dim=1).flatten(1)) < EXACT
    at_tokens = ours(model, images, "smoothgrad:samples=2,noise=0,read=input,at=tokens")
    assert largest_difference(at_tokens, ours(model, images, "ixg")) < EXACT


# What the papers promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["resolution=pixel", "resolution=patch", "at=tokens"])
@pytest.mark.parametrize("target", [0, 3])
def test_attributions_add_up_to_the_difference_of_the_scores(model, images, options, target):
    """Completeness. Gauss-Legendre with 200 points leaves less than 1e-6 of this path's integral; 20 leave more."""
    with torch.no_grad():
        difference = (model(images) - model(torch.zeros_like(images)))[:, target]
    found = ours(model, images, f"integrated_gradients:steps=200,{options}", target).sum(dim=1)
    assert largest_difference(found, difference) < 1e-6
    coarse = ours(model, images, f"integrated_gradients:steps=2,{options}", target).sum(dim=1)
    assert largest_difference(coarse, difference) > 1e-3


def test_pixels_of_a_patch_count_as_much_as_its_token(model, images):
    """The embedding of a patch is linear in its pixels, so the two integrals run along the same path."""
    pixels = ours(model, images, "integrated_gradients:steps=9")
    assert largest_difference(ours(model, images, "integrated_gradients:steps=9,at=tokens"), pixels) < EXACT


def test_a_picture_that_is_its_own_baseline_gets_nothing(model):
    flat = torch.full((1, 3, 32, 32), 0.7, dtype=torch.float64)
    assert ours(model, flat, "integrated_gradients:baseline=mean,steps=3").abs().max() < 1e-15


def test_black_is_what_the_preprocessing_makes_of_black(model, images):
    preprocessing = Preprocessing((32, 32), mean=(0.5, 0.4, 0.3), std=(0.5, 0.2, 0.1))
    loaded = LoadedModel("small", model, preprocessing, None)
    found = ours(loaded, images, "integrated_gradients:baseline=black,steps=200")
    black = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    with torch.no_grad():
        difference = (model(images) - model(black))[:, TARGET]
    # Three deviations from the data the path is longer and the sum coarser than above.
    assert largest_difference(found.sum(dim=1), difference) < 1e-4


def test_black_is_refused_where_it_is_not_known(model, images):
    with pytest.raises(MethodError, match="black"):
        ours(model, images, "integrated_gradients:baseline=black")


# How runs are grouped -------------------------------------------------------------------------------------------------

SPELLINGS = [
    "integrated_gradients:steps=5",
    "integrated_gradients:steps=5,at=tokens",
    "smoothgrad:samples=5",
    "smoothgrad:samples=5,at=tokens",
]


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_maps_do_not_depend_on_how_many_images_run_together(model, images, at_once, monkeypatch):
    expected = vitreous.explain(model, images, SPELLINGS, TARGET).scores
    monkeypatch.setattr(ModelRunner, "at_once", at_once)
    found = vitreous.explain(model, images, SPELLINGS, TARGET).scores
    for spelling in SPELLINGS:
        assert largest_difference(found[spelling], expected[spelling]) < EXACT


def test_no_run_is_larger_than_the_batch_or_a_few_images(model, monkeypatch):
    runs = []
    forward = model.patch_embed.forward
    monkeypatch.setattr(model.patch_embed, "forward", lambda pixels: runs.append(len(pixels)) or forward(pixels))
    ours(model, random_images(1), "integrated_gradients:steps=20")
    assert runs == [8, 8, 4]
    runs.clear()
    ours(model, random_images(12), "integrated_gradients:steps=3")
    assert runs == [12, 12, 12]


def test_a_batch_gives_what_single_images_give(model, images):
    together = vitreous.explain(model, images, SPELLINGS, TARGET).scores
    for number, image in enumerate(images):
        alone = vitreous.explain(model, image[None], SPELLINGS, TARGET).scores
        for spelling in SPELLINGS:
            assert largest_difference(together[spelling][number], alone[spelling][0]) < EXACT


def test_the_seed_decides_the_noise(model, images):
    first, again, other = (ours(model, images, f"smoothgrad:samples=3,seed={seed}") for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert largest_difference(other, first) > 0.01


def test_maps_differ_between_classes_and_the_model_is_as_it_was(model, images):
    model.train()
    before = copy.deepcopy(model.state_dict())
    scores = vitreous.explain(model, images, SPELLINGS, [[0, 3], [0, 3]]).scores
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not images.requires_grad
    for spelling, maps in scores.items():
        assert largest_difference(maps[:, 0], maps[:, 1]) > 0.01, spelling
    model.eval()


def test_signs_mean_something_where_the_input_is_a_factor(model, images):
    spellings = ["integrated_gradients:steps=3", "smoothgrad:samples=2", "smoothgrad:samples=2,read=input"]
    assert list(vitreous.explain(model, images, spellings).signed.values()) == [True, False, True]
    assert (ours(model, images, spellings[1]) >= 0).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("integrated_gradients:at=tokens,resolution=pixel", "no pixels"),
        ("integrated_gradients.propagate:resolution=pixel", "map of patches"),
        ("integrated_gradients:steps=0", "at least 1"),
        ("integrated_gradients:steps=2000", "quadrature=right takes more"),
        ("smoothgrad:samples=0", "at least 1"),
        ("smoothgrad:noise=-1", "from 0 up"),
        ("smoothgrad:noise=nan", "not a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused(model, images, options, reason):
    with pytest.raises(MethodError, match=reason):
        ours(model, images, options)


def test_patch_sums_count_every_pixel_once_where_the_grid_does_not_divide_the_picture():
    pixels = random_images(2)[:, 0, :, :31]
    sums = patch_sums(pixels, (3, 4))
    assert sums.shape == (2, 3, 4)
    assert largest_difference(sums.sum(dim=(1, 2)), pixels.sum(dim=(1, 2))) < 1e-12
    assert largest_difference(sums[:, 0, 0], pixels[:, :11, :8].sum(dim=(1, 2))) < 1e-12
