"""Class activation maps on tokens: Grad-CAM and its variants, and Eigen-CAM.

With activations A (token i, channel k) at a layer and G = dy_c/dA, a map is a sum over channels k of a function of A
and G. Two conventions are in use. ``pytorch_grad_cam``: A is the output of a block's first norm, patches only, and the
map is clamped at 0. ``skipplus``: A is a block's input, all tokens count in averages, and the map is signed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitreous.methods.options import StreamRuleOption
from vitreous.methods.readout import Readout, TokenReadout
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import GradientNeeds, Needs

Convention = Literal["pytorch_grad_cam", "skipplus"]
Relu = Literal["default", "yes", "no"]

_SMALL = 1e-7  # added to denominators, as in both implementations


class ActivationMap(TokenReadout):
    """A map of activations; the convention decides which activations, and whether the map is clamped."""

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
        """Return the scores of all tokens: clamped if unsigned, and 0 for prefix tokens that do not count."""
        scores = scores if self.signed else scores.clamp(min=0)
        return pad(scores, (view.layout.tokens - scores.shape[1], 0))


class ClassActivationMap(ActivationMap):
    """Σ_k of activations, weighted by their gradients."""

    def needs(self, layer: int, depth: int) -> Needs:
        """The activations and their gradients."""
        here = frozenset({layer})
        slopes = GradientNeeds(norms=here) if self.of_norms else GradientNeeds(tokens=here)
        return super().needs(layer, depth) | Needs(gradients={self.backward: slopes})

    def read(self, view: View, layer: int) -> Tensor:
        """The map."""
        activations = self.activations(view, layer)
        gradients = (view.norm_gradient if self.of_norms else view.token_gradient)(self.backward, layer)
        weighed = self.weigh(activations, self.counted(view, gradients).to(activations.dtype))
        return self.finish(view, weighed.sum(dim=-1))

    @abstractmethod
    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """Weight A by a function of G, (batch, tokens, channels)."""


class GradientMean(ClassActivationMap):
    """Σ_k A mean_i G (Grad-CAM eqs. 1-2)."""

    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """A mean_i G."""
        return activations * gradients.mean(dim=1, keepdim=True)


class WeightedGradientMean(ClassActivationMap):
    """Σ_k A Σ_i α G^+ with α = G² / (2 G² + G³ Σ_i A) (Grad-CAM++ eqs. 5 and 19)."""

    def __init__(self, convention: Convention, relu: Relu, *, positive: bool) -> None:
        super().__init__(convention, relu)
        self.positive = positive

    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """A Σ_i α G^+; the two implementations differ in the epsilon of the denominator."""
        squares = gradients.square()
        small = 1e-6 if self.of_norms else _SMALL
        alpha = squares / (2 * squares + activations.sum(dim=1, keepdim=True) * squares * gradients + small)
        weights = alpha * (gradients.clamp(min=0) if self.positive else gradients)
        return activations * weights.sum(dim=1, keepdim=True)


class ActivationMean(ClassActivationMap):
    """Σ_k A (Σ_i A G / Σ_i A) (XGrad-CAM eqs. 1 and 8)."""

    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """A Σ_i A G / Σ_i A."""
        weights = self.mean_weights(activations)
        means = (weights * gradients).sum(dim=1, keepdim=True) / (weights.sum(dim=1, keepdim=True) + _SMALL)
        return activations * means

    def mean_weights(self, activations: Tensor) -> Tensor:
        """Return the weights of the mean gradient."""
        return activations


class AbsoluteActivationMean(ActivationMean):
    """Σ_k A (Σ_i |A| G / Σ_i |A|) (XGrad-CAM+, named in LibraGrad section 2.2): no sum can vanish."""

    def mean_weights(self, activations: Tensor) -> Tensor:
        """|A|."""
        return activations.abs()


class ActivationGradient(ClassActivationMap):
    """Σ_k A G (HiResCAM eq. 4)."""

    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """A G."""
        return activations * gradients


class PositiveGradient(ClassActivationMap):
    """Σ_k A G^+ (LayerCAM eqs. 4-6)."""

    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """A G^+."""
        return activations * gradients.clamp(min=0)


class PositiveActivationGradient(ClassActivationMap):
    """Σ_k (A G)^+."""

    def weigh(self, activations: Tensor, gradients: Tensor) -> Tensor:
        """(A G)^+."""
        return (activations * gradients).clamp(min=0)


class PrincipalActivation(ActivationMap):
    """(A - mean_i A) v with v their first principal axis (Eigen-CAM sec. III; pytorch-grad-cam centres A).

    The sign of an axis is arbitrary: here the score with the largest absolute value is positive.
    """

    def read(self, view: View, layer: int) -> Tensor:
        """The projection, from the tokens' Gram matrix: its first eigenvector times the root of its eigenvalue."""
        activations = self.activations(view, layer)
        centred = activations - activations.mean(dim=1, keepdim=True)
        values, vectors = torch.linalg.eigh(centred @ centred.transpose(1, 2))
        scores = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
        largest = scores.gather(1, scores.abs().argmax(dim=1, keepdim=True))
        return self.finish(view, scores * largest.sign())


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
    """Activations with channels weighted by their mean gradient."""
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
    """Activations with channels weighted by a weighted mean of their positive gradients."""
    return WeightedGradientMean(convention, relu, positive=gradients == "positive").under(rule)


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
    """Activations with channels weighted by their mean gradient, averaged with the activations as weights."""
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
    """Activations with channels weighted by their mean gradient, averaged with absolute activations as weights."""
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
    """The positive part of activations x gradients."""
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
