"""Scripts written for pytorch-grad-cam run with our methods: one line changes."""

import numpy as np
import pytest
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.metrics.cam_mult_image import CamMultImageConfidenceChange, DropInConfidence
from pytorch_grad_cam.metrics.road import ROADCombined, ROADMostRelevantFirst
from pytorch_grad_cam.utils.image import show_cam_on_image
from pytorch_grad_cam.utils.model_targets import (
    ClassifierOutputReST,
    ClassifierOutputSoftmaxTarget,
    ClassifierOutputTarget,
)

import vitreous
from small_models import cheap_spelling, random_images, small_vit
from vitreous.errors import MethodError, TargetError
from vitreous.integrations.grad_cam import VitreousCAM, cam_class


def reshape_transform(tensor, height=4, width=4):
    """As in the example of pytorch-grad-cam for ViTs."""
    result = tensor[:, 1:, :].reshape(tensor.size(0), height, width, tensor.size(2))
    return result.transpose(2, 3).transpose(1, 2)


@pytest.fixture(scope="module")
def model():
    return small_vit(depth=2, dtype=torch.float32)


@pytest.fixture(scope="module")
def input_tensor():
    return random_images(2, dtype=torch.float32)


def test_the_example_for_vision_transformers(model, input_tensor):
    target_layers = [model.blocks[-1].norm1]
    targets = [ClassifierOutputTarget(1), ClassifierOutputTarget(2)]
    rgb_img = np.float32(np.random.default_rng(0).random((32, 32, 3)))

    def run(cam):
        with cam:
            cam.batch_size = 32
            grayscale_cam = cam(input_tensor=input_tensor, targets=targets, eigen_smooth=False, aug_smooth=False)
        assert grayscale_cam.shape == (2, 32, 32)
        assert grayscale_cam.dtype == np.float32
        assert grayscale_cam.min() >= 0
        assert grayscale_cam.max() <= 1
        assert show_cam_on_image(rgb_img, grayscale_cam[0, :], use_rgb=True).shape == (32, 32, 3)
        return grayscale_cam

    theirs = run(GradCAM(model=model, target_layers=target_layers, reshape_transform=reshape_transform))
    with pytest.warns(UserWarning, match="target_layers and reshape_transform are not used"):
        cam = VitreousCAM(
            model=model, target_layers=target_layers, reshape_transform=reshape_transform, method="gradcam"
        )
    ours = run(cam)
    # The same map: float32, their constant of 1e-7 in each of two scalings, their interpolation in fixed point.
    assert np.abs(ours - theirs).max() < 1e-4


def test_the_usage_example_of_the_readme():
    """The code of the README's section "Usage examples" with our class in the place of theirs."""
    model = small_vit(depth=2, dtype=torch.float32, num_classes=1000)
    rgb_img = np.float32(np.random.default_rng(0).random((32, 32, 3)))
    input_tensor = random_images(1, dtype=torch.float32)
    targets = [ClassifierOutputTarget(281)]

    with VitreousCAM(model=model, method="gae") as cam:
        grayscale_cam = cam(input_tensor=input_tensor, targets=targets)
        grayscale_cam = grayscale_cam[0, :]
        visualization = show_cam_on_image(rgb_img, grayscale_cam, use_rgb=True)
        model_outputs = cam.outputs

    assert visualization.shape == (32, 32, 3)
    assert visualization.dtype == np.uint8
    assert torch.allclose(model_outputs, model(input_tensor), atol=1e-5)  # float32, another order of summation
    # The section "Smoothing to get nice looking CAMs"; one of the two is refused, with the reason.
    smooth = cam(input_tensor=input_tensor, targets=targets, aug_smooth=True)
    assert smooth.shape == (1, 32, 32)
    with pytest.raises(MethodError, match=r"eigen_smooth .*method='eigencam'"):
        cam(input_tensor=input_tensor, targets=targets, eigen_smooth=True)


def test_the_metrics_of_the_readme(model, input_tensor):
    """The code of the section "Metrics and evaluation for XAI"."""
    targets = [ClassifierOutputSoftmaxTarget(1), ClassifierOutputSoftmaxTarget(2)]
    grayscale_cams = VitreousCAM(model=model, method="gae")(input_tensor=input_tensor, targets=targets)
    inverse_cams = 1 - grayscale_cams
    scores, visualizations = CamMultImageConfidenceChange()(
        input_tensor, inverse_cams, targets, model, return_visualization=True
    )
    assert np.isfinite(scores).all()
    assert visualizations.shape == input_tensor.shape
    scores = ROADMostRelevantFirst(percentile=75)(input_tensor, grayscale_cams, targets, model)
    assert np.isfinite(scores).all()
    scores = ROADCombined(percentiles=[20, 80])(input_tensor, grayscale_cams, targets, model)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("method", [cheap_spelling(info) for info in vitreous.list_methods()])
def test_maps_of_every_method_fill_the_range(model, method):
    input_tensor = random_images(3, dtype=torch.float32)[2:]  # no method's map for class 4 is 0 everywhere
    maps = VitreousCAM(model, method=method)(input_tensor=input_tensor, targets=[ClassifierOutputTarget(4)])
    assert maps.shape == (1, 32, 32)
    assert maps.dtype == np.float32
    assert (maps.min(), maps.max()) == (0, 1)


def test_their_targets(model, input_tensor):
    cam = VitreousCAM(model, method="ixg")
    classes = cam(input_tensor, [ClassifierOutputTarget(1), ClassifierOutputTarget(2)])
    assert np.array_equal(classes, cam(input_tensor, [1, 2]))
    softmax = cam(input_tensor, [ClassifierOutputSoftmaxTarget(1)] * 2)
    probability = cam(input_tensor, [vitreous.targets.Probability(1)] * 2)
    assert np.abs(softmax - probability).max() < 1e-4  # two ways to write a softmax in float32
    assert cam(input_tensor, [ClassifierOutputReST(1), lambda output: output[0] - output[1]]).shape == (2, 32, 32)


def test_no_target_is_the_predicted_class(model, input_tensor):
    cam = VitreousCAM(model, method="ixg")
    found = cam(input_tensor=input_tensor, targets=None)
    predicted = cam.outputs.argmax(dim=1).tolist()
    assert predicted == model(input_tensor).argmax(dim=1).tolist()
    assert np.array_equal(found, cam(input_tensor, predicted))


def test_wrong_requests(model, input_tensor):
    cam = VitreousCAM(model, method="gae")
    with pytest.raises(MethodError, match="eigen_smooth"):
        cam(input_tensor, None, eigen_smooth=True)
    with pytest.raises(TargetError, match="2 images"):
        cam(input_tensor, [ClassifierOutputTarget(1)])
    with pytest.raises(TargetError):
        cam(input_tensor, [lambda output: output] * 2)
    with pytest.raises(TargetError, match="function"):
        cam(input_tensor, ["tabby", "tabby"])


def test_smoothing_by_augmentation_is_that_of_the_peer(model, input_tensor):
    theirs = GradCAM(model=model, target_layers=[model.blocks[-1].norm1], reshape_transform=reshape_transform)
    targets = [ClassifierOutputTarget(1), ClassifierOutputTarget(2)]
    expected = theirs(input_tensor=input_tensor, targets=targets, aug_smooth=True)
    found = VitreousCAM(model, method="gradcam")(input_tensor, targets, aug_smooth=True)
    assert np.abs(found - expected).max() < 1e-4  # as without


def test_their_metrics(model, input_tensor):
    maps = cam_class("tokentm")(model=model)(input_tensor, [1, 2])
    targets = [ClassifierOutputSoftmaxTarget(1), ClassifierOutputSoftmaxTarget(2)]
    scores = CamMultImageConfidenceChange()(input_tensor, maps, targets, model)
    assert np.isfinite(scores).all()
    assert (DropInConfidence()(input_tensor, maps, targets, model) >= 0).all()


def test_the_model_stays_as_it_is(input_tensor):
    model = small_vit(depth=2, dtype=torch.float32).train()
    VitreousCAM(model, method="gae")(input_tensor, [1, 2])
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
