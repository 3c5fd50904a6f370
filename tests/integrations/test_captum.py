"""Code written for captum runs with our methods: metrics, noise tunnel, figures."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from captum.attr import Attribution, InputXGradient, NoiseTunnel, Saliency
from captum.attr import visualization as viz
from captum.metrics import infidelity, sensitivity_max
from torch import nn

import vitreous
from small_models import CLASSES, cheap_spelling, largest_difference, random_images, small_vit
from vitreous.errors import InputError, TargetError
from vitreous.integrations.captum import VitreousAttribution, attribution_class

mpl.use("Agg")


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2)


@pytest.fixture(scope="module")
def images():
    return random_images(2)


def perturb(inputs):
    """The perturbation function of captum's documentation of ``infidelity``."""
    noise = torch.randn(inputs.shape, dtype=inputs.dtype) * 0.1
    return noise, inputs - noise


class TestAttributions:
    @pytest.mark.parametrize("method", [cheap_spelling(info) for info in vitreous.list_methods()])
    def test_captums_metrics_run_on_every_method(self, model, method):
        images = random_images(3)[2:]  # no method's map for class 4 is 0 everywhere
        kind = attribution_class(method)
        assert issubclass(kind, Attribution)
        attribution = kind(model)
        found = attribution.attribute(images, target=4)
        assert found.shape == images.shape
        assert found.dtype == images.dtype
        assert not found.requires_grad
        assert found.any()
        assert infidelity(model, perturb, images, found, target=4, n_perturb_samples=2).isfinite().all()
        sensitivity = sensitivity_max(attribution.attribute, images, target=4, n_perturb_samples=1)
        assert sensitivity.shape == (1,)
        assert sensitivity.isfinite().all()
        assert not attribution.has_convergence_delta()

    def test_shares_sum_to_the_map(self, model, images):
        scores = vitreous.explain(model, images, "decompx", 1).scores["decompx"]
        found = VitreousAttribution(model, "decompx").attribute(images, target=1)
        # The same numbers in another order of summation, float64.
        assert largest_difference(found.sum(dim=(1, 2, 3)), scores.sum(dim=1)) < 1e-12

    def test_values_are_those_of_the_patch(self, model, images):
        scores = vitreous.explain(model, images, "gae", 1).scores["gae"].reshape(2, 4, 4)
        found = VitreousAttribution(model, "gae", spread="value").attribute(images, target=1)
        assert torch.equal(found[:, 2, 8:16, 24:32], scores[:, 1, 3, None, None].expand(2, 8, 8))

    def test_smooth_values_are_those_of_the_patch_at_its_centre(self, model, images):
        scores = vitreous.explain(model, images, "gae", 1).scores["gae"].reshape(2, 4, 4)
        found = VitreousAttribution(model, "gae", spread="smooth").attribute(images, target=1)
        middle = found[:, 0, 11:13, 11:13].mean(dim=(1, 2))  # the centre lies between four pixels
        # Bilinear values around a kink average to less or more than it, by a few sixteenths of the differences.
        assert (middle - scores[:, 1, 1]).abs().max() < 0.2 * (scores.amax() - scores.amin())
        assert torch.equal(found[:, 0, 0, 0], scores[:, 0, 0])

    def test_the_patch_grid(self, model, images):
        found = VitreousAttribution(model, "gae").attribute(images, target=1, patches=True)
        assert found.shape == (2, 4, 4)


class TestTargets:
    @pytest.mark.parametrize("target", [1, torch.tensor(1), torch.tensor([1]), torch.tensor([1, 1]), [1, 1], (1,)])
    def test_captums_spellings_of_a_class(self, model, images, target):
        attribution = VitreousAttribution(model, "gae")
        assert torch.equal(attribution.attribute(images, target=target), attribution.attribute(images, target=1))

    def test_none_is_the_predicted_class(self, model, images):
        attribution = VitreousAttribution(model, "gae")
        predicted = model(images).argmax(dim=1)
        assert torch.equal(attribution.attribute(images), attribution.attribute(images, target=predicted))

    def test_places_in_an_output_with_more_axes(self, images):
        class Dense(nn.Module):
            def __init__(self):
                super().__init__()
                self.vit = small_vit(depth=2)

            def forward(self, pixels):
                return self.vit(pixels)[:, :, None].expand(-1, -1, 3)

        found = VitreousAttribution(Dense().eval(), "ixg").attribute(images, target=(2, 1))
        expected = VitreousAttribution(small_vit(depth=2), "ixg").attribute(images, target=2)
        assert largest_difference(found, expected) < 1e-12  # float64, the same passes

    def test_wrong_ones_are_refused(self, model, images):
        with pytest.raises(TargetError, match="one per image"):
            VitreousAttribution(model, "gae").attribute(images, target=[1, 2, 3])
        with pytest.raises(InputError, match="additional_forward_args"):
            VitreousAttribution(model, "gae").attribute((images, images), target=1)
        with pytest.raises(InputError, match=r"model must be an nn\.Module"):
            VitreousAttribution(lambda pixels: pixels, "gae")


class TestCaptumsOwnCode:
    """The patterns of captum's tutorials, with the adapter in the place of its classes."""

    def test_infidelity_is_zero_for_the_gradient_of_a_linear_model(self, images):
        """Captum's metric on our attributions in pixels: a method that is exact for a linear model has no error."""
        weights = torch.randn(3, 32, 32, dtype=images.dtype, generator=torch.Generator().manual_seed(0))

        class Linear(nn.Module):
            def __init__(self):
                super().__init__()
                self.vit = small_vit(depth=1)

            def forward(self, pixels):
                shift = 0 * self.vit(pixels)[:, :1]
                return torch.cat([shift + (pixels * weights).sum(dim=(1, 2, 3))[:, None], shift], dim=1)

        # Occluding a patch changes the output by what its pixels contribute, whole patches at a time.
        def drop_patches(inputs):
            keep = torch.rand(len(inputs), 1, 4, 4).round().to(inputs).repeat_interleave(8, -1).repeat_interleave(8, -2)
            return (1 - keep) * torch.ones_like(inputs), inputs * keep

        model = Linear().eval()
        found = VitreousAttribution(model, "occlusion:of=logit").attribute(images, target=0)
        assert (infidelity(model, drop_patches, images, found, target=0, n_perturb_samples=4) < 1e-18).all()  # float64
        random = found[:, :, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
        assert (infidelity(model, drop_patches, images, random, target=0, n_perturb_samples=4) > 1e-3).all()

    def test_sensitivity(self, model, images):
        attribution = VitreousAttribution(model, "gae")
        found = sensitivity_max(attribution.attribute, images, target=torch.tensor([1, 2]), n_perturb_samples=3)
        assert found.shape == (2,)
        assert (found > 0).all()
        same = sensitivity_max(attribution.attribute, images, perturb_func=lambda x: x, target=1, n_perturb_samples=2)
        assert (same < 1e-12).all()  # float64; the copies of an image are explained in a larger batch

    def test_noise_tunnel(self, model, images):
        torch.manual_seed(0)
        tunnel = NoiseTunnel(VitreousAttribution(model, "gae"))
        found = tunnel.attribute(images, nt_samples=2, nt_type="smoothgrad", stdevs=0.1, target=1)
        assert found.shape == images.shape

    def test_figures(self, model, images):
        attributions = VitreousAttribution(model, "gae").attribute(images, target=1)[0]
        picture = images[0].sigmoid()
        channels_last = (np.transpose(each.numpy(), (1, 2, 0)) for each in (attributions, picture))
        figure, _ = viz.visualize_image_attr(
            *channels_last, method="blended_heat_map", sign="all", show_colorbar=True, use_pyplot=False
        )
        assert figure.axes

    def test_a_table_of_classes(self, model, images):
        for kind in (Saliency, InputXGradient, attribution_class("tokentm"), attribution_class("gae", spread="value")):
            assert issubclass(kind, Attribution)
            assert kind(model).attribute(images, target=1).shape == images.shape
        assert attribution_class("raw_attention").__name__ == "RawAttention"

    def test_further_arguments_of_the_model(self, images):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.vit = small_vit(depth=2)

            def forward(self, pixels, scale):
                return self.vit(pixels) * scale

        scale = torch.full((2, 1), 2.0, dtype=torch.float64)
        found = VitreousAttribution(Scaled().eval(), "ixg").attribute(images, 1, additional_forward_args=scale)
        expected = VitreousAttribution(small_vit(depth=2), "ixg").attribute(images, 1)
        assert largest_difference(found, 2 * expected) < 1e-12  # float64, the gradient of twice the output


def test_the_models_mode_stays(images):
    model = small_vit(depth=2, num_classes=CLASSES).train()
    VitreousAttribution(model, "gae").attribute(images, target=1)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
