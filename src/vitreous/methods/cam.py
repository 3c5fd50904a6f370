"""Class activation maps on tokens: Grad-CAM and its relatives, and Eigen-CAM.

With activations A (token i, channel k) at a layer and G = dy_c/dA, a map is Σ_k of what the method makes of A and G.
Two conventions are in use. ``pytorch_grad_cam``: A is the output of a block's first norm, patches only, and the map is
clamped at 0. ``skipplus``: A is a block's input, all tokens count in averages, and the map is signed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitreous.methods.options import RuleOption
from vitreous.methods.readout import Readout, TokenReadout
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import GradientNeeds, Needs

Convention = Literal["pytorch_grad_cam", "skipplus"]
ConventionOption = Annotated[Convention, "first norm, patches, clamped; or block input, all tokens, signed"]
Relu = Literal["default", "yes", "no"]
ReluOption = Annotated[Relu, "whether the map is clamped at 0; default: as the convention"]
# (A, G) to the weighed activations whose channel sum is the map, (batch, tokens, channels) each.
Weighing = Callable[[Tensor, Tensor], Tensor]

_SMALL = 1e-7  # added to denominators, as both programs do


class ActivationMap(TokenReadout):
    """A map of activations, which a convention picks."""

    def __init__(self, convention: Convention, relu: Relu) -> None:
        self.of_norms = convention == "pytorch_grad_cam"
        self.signed = not self.of_norms if relu == "default" else relu == "no"

    def needs(self, layer: int, depth: int) -> Needs:
        """The activations."""
        del depth
        here = frozenset({layer})
        return Needs(norms=here) if self.of_norms else Needs(tokens=here)

    def activations(self, view: View, layer: int) -> Tensor:
        """A, (batch, tokens that count, channels)."""
        return self.counted(view, view.norm(layer) if self.of_norms else view.tokens(layer))

    def counted(self, view: View, values: Tensor) -> Tensor:
        """The tokens that count."""
        return values[:, view.layout.prefix :] if self.of_norms else values

    def finish(self, view: View, scores: Tensor) -> Tensor:
        """Scores of all tokens: clamped if need be, and 0 for those that do not count."""
        scores = scores if self.signed else scores.clamp(min=0)
        return pad(scores, (view.layout.tokens - scores.shape[1], 0))


class ClassActivationMap(ActivationMap):
    """Σ_channels of activations, weighed by their gradients."""

    def __init__(self, weighing: Weighing, convention: Convention, relu: Relu) -> None:
        super().__init__(convention, relu)
        self.weighing = weighing

    def needs(self, layer: int, depth: int) -> Needs:
        """The activations and their gradients."""
        here = frozenset({layer})
        slopes = GradientNeeds(norms=here) if self.of_norms else GradientNeeds(tokens=here)
        return super().needs(layer, depth) | Needs(gradients={self.backward: slopes})

    def read(self, view: View, layer: int) -> Tensor:
        """The map."""
        activations = self.activations(view, layer)
        gradients = (view.norm_gradient if self.of_norms else view.token_gradient)(self.backward, layer)
        weighed = self.weighing(activations, self.counted(view, gradients).to(activations.dtype))
        return self.finish(view, weighed.sum(dim=-1))


class PrincipalActivation(ActivationMap):
    """Centred activations on their first principal axis (Eigen-CAM eq. 3; the centring is pytorch-grad-cam's).

    The sign of an axis is arbitrary: here the score that is largest in size is positive.
    """

    def read(self, view: View, layer: int) -> Tensor:
        """The projection, from the tokens' Gram matrix: its first eigenvector times the root of its eigenvalue."""
        activations = self.activations(view, layer)
        centred = activations - activations.mean(dim=1, keepdim=True)
        values, vectors = torch.linalg.eigh(centred @ centred.transpose(1, 2))
        scores = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
        largest = scores.gather(1, scores.abs().argmax(dim=1, keepdim=True))
        return self.finish(view, scores * largest.sign())


def gradient_mean(activations: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM eqs. 1-2: A mean_i G."""
    return activations * gradients.mean(dim=1, keepdim=True)


def activation_mean(activations: Tensor, gradients: Tensor) -> Tensor:
    """XGrad-CAM eq. 7: A Σ_i A G / Σ_i A."""
    sums = activations.sum(dim=1, keepdim=True) + _SMALL
    return activations * ((activations * gradients).sum(dim=1, keepdim=True) / sums)


def absolute_mean(activations: Tensor, gradients: Tensor) -> Tensor:
    """XGrad-CAM+: A Σ_i |A| G / Σ_i |A|."""
    sizes = activations.abs()
    sums = sizes.sum(dim=1, keepdim=True) + _SMALL
    return activations * ((sizes * gradients).sum(dim=1, keepdim=True) / sums)


def plus_plus(small: float, *, positive: bool) -> Weighing:
    """Grad-CAM++ eqs. 5 and 19: A Σ_i α G^+ with α = G² / (2 G² + Σ_i A G³)."""

    def weighing(activations: Tensor, gradients: Tensor) -> Tensor:
        squares = gradients.square()
        alpha = squares / (2 * squares + activations.sum(dim=1, keepdim=True) * squares * gradients + small)
        weights = alpha * (gradients.clamp(min=0) if positive else gradients)
        return activations * weights.sum(dim=1, keepdim=True)

    return weighing


@register(
    "gradcam",
    family="cam",
    paper="Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-Based Localization",
    year=2017,
    layer=-1,
    class_specific=True,
    signed=False,
)
def gradcam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: RuleOption = "plain"
) -> Readout:
    """Activations with channels weighed by their mean gradient."""
    return ClassActivationMap(gradient_mean, convention, relu).under(rule)


@register(
    "gradcampp",
    family="cam",
    paper="Chattopadhay et al., Grad-CAM++: Improved Visual Explanations for Deep Convolutional Networks",
    year=2018,
    layer=-1,
    class_specific=True,
    signed=False,
)
def gradcampp(
    *,
    convention: ConventionOption = "pytorch_grad_cam",
    relu: ReluOption = "default",
    gradients: Annotated[Literal["positive", "all"], "which gradients count in a channel's weight"] = "positive",
    rule: RuleOption = "plain",
) -> Readout:
    """Activations with channels weighed by a mean of their positive gradients, each with a weight of its own."""
    small = 1e-6 if convention == "pytorch_grad_cam" else _SMALL
    return ClassActivationMap(plus_plus(small, positive=gradients == "positive"), convention, relu).under(rule)


@register(
    "xgradcam",
    family="cam",
    paper="Fu et al., Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs",
    year=2020,
    layer=-1,
    class_specific=True,
    signed=False,
)
def xgradcam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: RuleOption = "plain"
) -> Readout:
    """Activations with channels weighed by their gradients' mean, weighed by the activations."""
    return ClassActivationMap(activation_mean, convention, relu).under(rule)


@register(
    "xgradcam_abs",
    family="cam",
    paper="Mehri et al., SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers (XGradCAM+)",
    year=2024,
    layer=-1,
    class_specific=True,
    signed=False,
)
def xgradcam_abs(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: RuleOption = "plain"
) -> Readout:
    """Activations with channels weighed by their gradients' mean, weighed by the size of the activations."""
    return ClassActivationMap(absolute_mean, convention, relu).under(rule)


@register(
    "hirescam",
    family="cam",
    paper="Draelos and Carin, Use HiResCAM instead of Grad-CAM for Faithful Explanations of CNNs",
    year=2020,
    layer=-1,
    class_specific=True,
    signed=False,
)
def hirescam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: RuleOption = "plain"
) -> Readout:
    """Activations x gradients (eq. 4)."""
    return ClassActivationMap(torch.mul, convention, relu).under(rule)


@register(
    "layercam",
    family="cam",
    paper="Jiang et al., LayerCAM: Exploring Hierarchical Class Activation Maps for Localization",
    year=2021,
    layer=-1,
    class_specific=True,
    signed=False,
)
def layercam(
    *, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default", rule: RuleOption = "plain"
) -> Readout:
    """Activations x positive gradients (eqs. 4-6)."""
    return ClassActivationMap(lambda values, slopes: values * slopes.clamp(min=0), convention, relu).under(rule)


@register(
    "gradcam_elementwise",
    family="cam",
    paper="Element-wise Grad-CAM, as in the pytorch-grad-cam library",
    year=2021,
    layer=-1,
    class_specific=True,
    signed=False,
)
def gradcam_elementwise(*, convention: ConventionOption = "pytorch_grad_cam", rule: RuleOption = "plain") -> Readout:
    """Activations x gradients where that is positive."""
    return ClassActivationMap(lambda values, slopes: (values * slopes).clamp(min=0), convention, "yes").under(rule)


@register(
    "eigencam",
    family="cam",
    paper="Muhammad and Yeasin, Eigen-CAM: Class Activation Map using Principal Components",
    year=2020,
    layer=-1,
    class_specific=False,
    signed=False,
)
def eigencam(*, convention: ConventionOption = "pytorch_grad_cam", relu: ReluOption = "default") -> Readout:
    """Activations projected on their first principal axis."""
    return PrincipalActivation(convention, relu)
