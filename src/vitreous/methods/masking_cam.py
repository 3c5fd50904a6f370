"""Class activation maps by masking: Score-CAM [wang2020score][] and ViT-ReciproCAM [byun2023vit][]."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.tensors import exact
from vitreous.errors import MethodError
from vitreous.inputs.patch_geometry import PatchGeometry, enlarge
from vitreous.methods.options import MOST_EVALUATIONS
from vitreous.methods.readout import Procedure, Readout
from vitreous.methods.registry import register
from vitreous.methods.rerun import few_at_once, rerun
from vitreous.methods.view import View
from vitreous.tape import Intervention, Needs

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
            masks = _stretched(maps[:, channels], (images.shape[-2], images.shape[-1]), view.layout.geometry)
            masked = masks.transpose(0, 1)[:, :, None].to(images.dtype) * images
            scores.append(_of_target(view.runner.logits(masked.flatten(0, 1)), view.target))
        return torch.cat(scores).T


def _of_target(values: Tensor, target: Tensor) -> Tensor:
    """The explained class's entries of (masks x batch, classes): (masks, batch)."""
    chosen = target.repeat(len(values) // len(target))
    return values.gather(1, chosen[:, None]).view(-1, len(target))


def _stretched(maps: Tensor, size: tuple[int, int], geometry: PatchGeometry | None) -> Tensor:
    """Upsample every map to the image size and scale it to [0, 1]."""
    if geometry is None:
        large = torch.nn.functional.interpolate(maps, size, mode="bilinear", align_corners=True)
    else:
        large = enlarge(maps, size, geometry, smooth=True)
    low, high = large.amin(dim=(2, 3), keepdim=True), large.amax(dim=(2, 3), keepdim=True)
    return (large - low) / (high - low + _EPSILON)


class ReciprocalMasks(Procedure):
    """The output for the last block's input with all patches masked except one and its neighbours.

    ViT-ReciproCAM (Byun and Lee 2023, sec. 3): the input tokens of the last block are multiplied by a mask for every
    patch, a 3 x 3 Gaussian [1 2 1; 2 4 2; 1 2 1]/16 around it or the patch alone; prefix tokens are unchanged. The
    score of the class is that of the patch. It is the probability, as in the authors' Recipro-CAM for convolutional
    networks; the numbers of the equations could not be verified. Only the last block runs again.
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
                logits = exact(run.tape.logits)
            values = runner.explained(logits, self.score)
            scores.append(_of_target(values, view.target))
        return torch.cat(scores).T

    def masks(self, view: View) -> Tensor:
        """Return a mask over all tokens for every patch, (patches, tokens)."""
        rows, columns = view.layout.grid
        alone = torch.eye(view.layout.patches, dtype=torch.float64).view(-1, 1, rows, columns)
        if self.neighbourhood == "gaussian":
            bell = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
            alone = torch.nn.functional.conv2d(alone, torch.outer(bell, bell)[None, None], padding=1)
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
