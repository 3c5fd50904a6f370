"""Class activation maps on tokens: Grad-CAM and its variants, and Eigen-CAM.

With activations A (token i, channel k) at a layer and G = dy_c/dA, a map is a sum over channels k of a function of A
and G. Two conventions are in use. ``pytorch_grad_cam``: A is the output of a block's first norm, patches only, and the
map is clamped at 0. ``skipplus``: A is a block's input, all tokens count in averages, and the map is signed.

Two variants run the model on masked inputs instead: Score-CAM [wang2020score][] and ViT-ReciproCAM [byun2023vit][].
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError
from vitreous.inputs.patch_geometry import INTERPOLATION, PatchGeometry, Size, enlarge
from vitreous.methods.perturbation import few_at_once, rerun
from vitreous.methods.readout import Procedure, Readout, TokenReadout, View
from vitreous.methods.registry import MOST_EVALUATIONS, StreamRuleOption, register
from vitreous.tape import GradientNeeds, Intervention, Needs

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

    def layer_activations(self, view: View, layer: int) -> Tensor:
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
        activations = self.layer_activations(view, layer)
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
        activations = self.layer_activations(view, layer)
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


_EPSILON = 1e-8  # as in pytorch-grad-cam, for constant channels
Neighbourhood = Literal["gaussian", "single"]
Score = Literal["probability", "logit"]


class ScoreWeightedActivations(Procedure):
    """(Σ_k w_k A_k)^+, w the softmax over channels of y_c(x * M_k) (Score-CAM eqs. 6-10 and algorithm 1).

    As in pytorch-grad-cam, A is the output of the last block's first norm at the patches; M_k is channel k upsampled to
    the image size (bilinear, corners aligned) and scaled to [0, 1]. The paper subtracts the score of an empty image,
    which cancels in the softmax. One forward pass per channel and image.

    Args:
        budget: forward passes per image; with more channels, those with the largest variance over the patches are used
            and the others are excluded from the softmax. ``None`` for all channels, as in the paper.
    """

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and budget < 1:
            raise MethodError("budget must be at least 1")
        self.budget = budget

    def needs(self, layer: int, depth: int) -> Needs:
        """The last block's first norm."""
        del layer
        return Needs(norms=frozenset({depth - 1}), picture=True)

    def map(self, view: View) -> Tensor:
        """Scores of patches."""
        activations = self.chosen(view.norm(view.depth - 1)[:, view.layout.prefix :])
        weights = torch.softmax(self.channel_scores(view, activations), dim=1)
        return torch.einsum("bpk,bk->bp", activations, weights.to(activations.dtype)).clamp_(min=0)

    def chosen(self, activations: Tensor) -> Tensor:
        """Select the channels within the budget, (batch, patches, channels)."""
        if self.budget is None or self.budget >= activations.shape[2]:
            return activations
        order = activations.var(dim=1).argsort(dim=1, descending=True, stable=True)[:, : self.budget]
        return activations.gather(2, order[:, None].expand(-1, activations.shape[1], -1))

    def channel_scores(self, view: View, activations: Tensor) -> Tensor:
        """y_c(x * M_k), (batch, channels)."""
        images = view.runner.images
        maps = activations.transpose(1, 2).reshape(len(images), -1, *view.layout.grid)
        scores = []
        for channels in few_at_once(view, torch.arange(maps.shape[1], device=maps.device)):
            masks = _stretched(maps[:, channels], view.runner.size, view.layout.geometry)
            masked = masks.transpose(0, 1).unsqueeze(1 + view.runner.channel_axis).to(images.dtype) * images
            scores.append(_of_target(view.runner.logits(masked.flatten(0, 1)), view.target))
        return torch.cat(scores).T


def _of_target(values: Tensor, target: Tensor) -> Tensor:
    """The explained class's entries of (masks x batch, classes): (masks, batch)."""
    chosen = target.repeat(len(values) // len(target))
    return values.gather(1, chosen[:, None]).view(-1, len(target))


def _stretched(maps: Tensor, size: Size, geometry: PatchGeometry | None) -> Tensor:
    """Upsample every map to the image size and scale it to [0, 1]."""
    if geometry is None:
        large = torch.nn.functional.interpolate(maps, size, mode=INTERPOLATION[len(size)], align_corners=True)
    else:
        large = enlarge(maps, size, geometry, smooth=True)
    axes = tuple(range(2, large.dim()))
    low, high = large.amin(dim=axes, keepdim=True), large.amax(dim=axes, keepdim=True)
    return (large - low) / (high - low + _EPSILON)


class ReciprocalMasks(Procedure):
    """The output for the last block's input with all patches masked except one and its neighbours.

    ViT-ReciproCAM (Byun and Lee 2023, sec. 3): the input tokens of the last block are multiplied by a mask for
    every patch, a 3 x 3 Gaussian [1 2 1; 2 4 2; 1 2 1]/16 around it (of a volume 3 x 3 x 3) or the patch alone;
    prefix tokens are unchanged. The score of the class is that of the patch. It is the probability, as in the
    authors' Recipro-CAM for convolutional networks; the numbers of the equations could not be verified. Only the
    last block runs again.
    """

    def __init__(self, neighbourhood: Neighbourhood, score: Score) -> None:
        self.neighbourhood, self.score = neighbourhood, score
        self.signed = score == "logit"

    def needs(self, layer: int, depth: int) -> Needs:
        """The input tokens of the last block."""
        del layer
        return Needs(tokens=frozenset({depth - 1}))

    def map(self, view: View) -> Tensor:
        """Scores of patches."""
        layer, runner = view.depth - 1, view.runner
        tokens = view.tape.tokens(layer)
        scores = []
        # Only one block runs on the masked tokens, so correspondingly more masks fit into memory.
        for masks in few_at_once(view, self.masks(view).to(tokens), room=view.depth):
            masked = masks[:, None, :, None] * tokens
            with rerun(view, runner.inputs[:1], Needs(), Intervention(layer, masked.flatten(0, 1))) as run:
                logits = at_least_float32(run.tape.logits)
            values = runner.explained(logits, self.score)
            scores.append(_of_target(values, view.target))
        return torch.cat(scores).T

    def masks(self, view: View) -> Tensor:
        """Return a mask over all tokens for every patch, (patches, tokens)."""
        grid = view.layout.grid
        alone = torch.eye(view.layout.patches, dtype=torch.float64).view(-1, 1, *grid)
        if self.neighbourhood == "gaussian":
            bell = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
            kernel, convolve = torch.outer(bell, bell), torch.nn.functional.conv2d
            if len(grid) == 3:
                kernel, convolve = bell[:, None, None] * kernel, torch.nn.functional.conv3d
            alone = convolve(alone, kernel[None, None], padding=1)
        return torch.nn.functional.pad(alone.flatten(1), (view.layout.prefix, 0), value=1.0)


@register(
    "scorecam",
    family="perturbation",
    paper="Wang et al., Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks",
    year=2020,
    arxiv="1910.01279",
    class_specific=True,
    signed=False,
)
def scorecam(
    *,
    budget: Annotated[
        int | None,
        "forward passes per image: the channels with the largest variance; all channels by default",
        MOST_EVALUATIONS,
    ] = None,
) -> Readout:
    """Channels of the last block, each weighted by the score of the image masked with it."""
    return ScoreWeightedActivations(budget)


@register(
    "vit_recipro_cam",
    family="cam",
    paper="Byun and Lee, ViT-ReciproCAM: Gradient and Attention-Free Visual Explanations for Vision Transformer",
    year=2023,
    arxiv="2310.02588",
    class_specific=True,
    signed=False,
)
def vit_recipro_cam(
    *,
    neighbourhood: Annotated[Neighbourhood, "a 3 x 3 Gaussian around a patch, or the patch alone"] = "gaussian",
    score: Annotated[Score, "the output that is read for the class"] = "probability",
) -> Readout:
    """Score of the class with all patches masked at the last block except one and its neighbours."""
    return ReciprocalMasks(neighbourhood, score)
