"""Class activation maps on tokens; ``activation_maps`` says what is read."""

from __future__ import annotations

from typing import Annotated, Literal

from vitreous.methods.activation_maps import (
    AbsoluteActivationMean,
    ActivationGradient,
    ActivationMean,
    Convention,
    GradientMean,
    PositiveActivationGradient,
    PositiveGradient,
    PrincipalActivation,
    Relu,
    WeighedGradientMean,
)
from vitreous.methods.options import StreamRuleOption
from vitreous.methods.readout import Readout
from vitreous.methods.registry import register

ConventionOption = Annotated[Convention, "first norm, patches, clamped; or block input, all tokens, signed"]
ReluOption = Annotated[Relu, "whether the map is clamped at 0; default: as the convention"]


@register(
    "gradcam",
    family="cam",
    paper="Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-Based Localization",
    year=2017,
    arxiv="1610.02391",
    layer=-1,
    class_specific=True,
    signed=False,
)
def gradcam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: StreamRuleOption = "plain"
) -> Readout:
    """Activations with channels weighed by their mean gradient."""
    return GradientMean(convention, relu).under(rule)


@register(
    "gradcampp",
    family="cam",
    paper="Chattopadhay et al., Grad-CAM++: Improved Visual Explanations for Deep Convolutional Networks",
    year=2018,
    arxiv="1710.11063",
    layer=-1,
    class_specific=True,
    signed=False,
)
def gradcampp(
    *,
    convention: ConventionOption = "pytorch_grad_cam",
    relu: ReluOption = "default",
    gradients: Annotated[Literal["positive", "all"], "which gradients count in a channel's weight"] = "positive",
    rule: StreamRuleOption = "plain",
) -> Readout:
    """Activations with channels weighed by a mean of their positive gradients, each with a weight of its own."""
    return WeighedGradientMean(convention, relu, positive=gradients == "positive").under(rule)


@register(
    "xgradcam",
    family="cam",
    paper="Fu et al., Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs",
    year=2020,
    arxiv="2008.02312",
    layer=-1,
    class_specific=True,
    signed=False,
)
def xgradcam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: StreamRuleOption = "plain"
) -> Readout:
    """Activations with channels weighed by their gradients' mean, weighed by the activations."""
    return ActivationMean(convention, relu).under(rule)


@register(
    "xgradcam_abs",
    family="cam",
    paper="Mehri et al., SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers",
    note="XGradCAM+",
    year=2024,
    layer=-1,
    class_specific=True,
    signed=False,
)
def xgradcam_abs(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: StreamRuleOption = "plain"
) -> Readout:
    """Activations with channels weighed by their gradients' mean, weighed by the size of the activations."""
    return AbsoluteActivationMean(convention, relu).under(rule)


@register(
    "hirescam",
    family="cam",
    paper="Draelos and Carin, Use HiResCAM instead of Grad-CAM for Faithful Explanations of CNNs",
    year=2020,
    arxiv="2011.08891",
    layer=-1,
    class_specific=True,
    signed=False,
)
def hirescam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: StreamRuleOption = "plain"
) -> Readout:
    """Activations x gradients."""
    return ActivationGradient(convention, relu).under(rule)


@register(
    "layercam",
    family="cam",
    paper="Jiang et al., LayerCAM: Exploring Hierarchical Class Activation Maps for Localization",
    year=2021,
    doi="10.1109/TIP.2021.3089943",
    layer=-1,
    class_specific=True,
    signed=False,
)
def layercam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: StreamRuleOption = "plain"
) -> Readout:
    """Activations x positive gradients."""
    return PositiveGradient(convention, relu).under(rule)


@register(
    "gradcam_elementwise",
    family="cam",
    paper="Gildenblat et al., PyTorch library for CAM methods",
    note="element-wise Grad-CAM",
    year=2021,
    url="https://github.com/jacobgil/pytorch-grad-cam",
    bf16=("gradcam_elementwise",),
    layer=-1,
    class_specific=True,
    signed=False,
)
def gradcam_elementwise(
    *, convention: ConventionOption = "pytorch_grad_cam", rule: StreamRuleOption = "plain"
) -> Readout:
    """Activations x gradients where that is positive."""
    return PositiveActivationGradient(convention, "yes").under(rule)


@register(
    "eigencam",
    family="cam",
    paper="Muhammad and Yeasin, Eigen-CAM: Class Activation Map using Principal Components",
    year=2020,
    arxiv="2008.00299",
    bf16=("eigencam",),
    layer=-1,
    class_specific=False,
    signed=False,
)
def eigencam(*, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default") -> Readout:
    """Activations projected on their first principal axis."""
    return PrincipalActivation(convention, relu)
