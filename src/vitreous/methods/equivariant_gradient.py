"""DAVE [wrobel2026dave][]: the model's effective linear map, averaged over small moves of the image and smoothed."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.inputs.patch_geometry import Size
from vitreous.methods.options import AtMost
from vitreous.methods.perturbation import few_at_once, rerun, seeded, uniform
from vitreous.methods.readout import Procedure, Readout, Resolution, ResolutionOption, input_scores, total
from vitreous.methods.registry import register
from vitreous.methods.view import View
from vitreous.tape import PIXELS, GradientNeeds, Needs, Pass

_FROZEN = Pass("frozen", "logit")


class EquivariantGradient(Procedure):
    """x * G[mean over g of g⁻¹ L(g x)], L(x) the gradient of y_c under the frozen rule, G a Gaussian low-pass.

    A ViT's input gradient is the map that it applies, L(x), plus what that map changes by; L(x) is the gradient with
    attention, norms and gates held constant. Its mean over small moves g, each undone afterwards, keeps what moves with
    the image and loses what stays with the patch grid. How far moves go, how many there are and how wide the low-pass
    is are options, since the paper's numbers could not be verified.

    Args:
        resolution: a map of pixels, as in the paper, or its sums over patches.
        samples: moves; the first one moves nothing.
        angle: the largest rotation, in degrees.
        shift: the largest shift along each axis, in patches.
        blur: standard deviation of the low-pass, in patches.
        seed: of the moves, which are the same for all images.
    """

    def __init__(
        self, *, resolution: Resolution, samples: int, angle: float, shift: float, blur: float, seed: int
    ) -> None:
        if samples < 1 or angle < 0 or shift < 0 or blur < 0:
            raise MethodError("samples must be at least 1, and angle, shift and blur numbers from 0 up")
        self.resolution, self._samples, self._seed = resolution, samples, seed
        self._angle, self._shift, self._blur = angle, shift, blur
        self.evaluations = samples

    def needs(self, layer: int, depth: int) -> Needs:
        """A picture; all gradients are of further runs."""
        del layer, depth
        return Needs(picture=True, plane=True, gradients_again=True)

    def map(self, view: View) -> Tensor:
        """Scores of patches or pixels."""
        images, grid = view.runner.images, view.layout.grid
        needs = Needs(gradients={_FROZEN: GradientNeeds(tokens=frozenset({PIXELS}))})

        def of_moves(moves: Tensor) -> Tensor:
            moved = torch.cat([warp(images, move) for move in moves])
            with rerun(view, moved, needs) as run:
                gradient = run.token_gradient(_FROZEN, PIXELS)
            slopes = torch.unflatten(gradient, 0, (len(moves), len(images)))
            return total(warp(slope, torch.linalg.inv(move)) for move, slope in zip(moves, slopes, strict=True))

        mean = total(of_moves(moves) for moves in few_at_once(view, self.moves(grid))) / self._samples
        smooth = low_pass(
            mean, [self._blur * length / cells for length, cells in zip(images.shape[2:], grid, strict=True)]
        )
        return input_scores(images * smooth, view.layout, self.resolution)

    def moves(self, grid: Size) -> Tensor:
        """Draw matrices (samples, 3, 3) that take places of the moved image, from -1 to 1, to the image's."""
        drawn = 2 * uniform(self._samples, 3, generator=seeded(self._seed)).double() - 1
        drawn[0] = 0
        angle = drawn[:, 0] * math.radians(self._angle)
        moves = torch.eye(3, dtype=torch.float64).repeat(self._samples, 1, 1)
        moves[:, 0, 0], moves[:, 0, 1] = angle.cos(), -angle.sin()
        moves[:, 1, 0], moves[:, 1, 1] = angle.sin(), angle.cos()
        moves[:, 0, 2], moves[:, 1, 2] = (
            drawn[:, axis] * self._shift * 2 / cells for axis, cells in ((1, grid[1]), (2, grid[0]))
        )
        return moves


def warp(images: Tensor, move: Tensor) -> Tensor:
    """Images (batch, channel, height, width) read at the places that a matrix names, bilinearly; the edge repeats."""
    if bool((move == torch.eye(3, dtype=move.dtype)).all()):
        return images
    places = torch.nn.functional.affine_grid(
        move[None, :2].to(images).expand(len(images), -1, -1), list(images.shape), align_corners=False
    )
    return torch.nn.functional.grid_sample(images, places, mode="bilinear", padding_mode="border", align_corners=False)


def low_pass(images: Tensor, deviations: list[float]) -> Tensor:
    """Smooth along height and width by Gaussians of these deviations, in pixels; the edge repeats."""
    for axis, deviation in ((2, deviations[0]), (3, deviations[1])):
        if deviation > 0:
            length = images.shape[axis]
            places = torch.arange(length, dtype=torch.float64)
            reach = math.ceil(4 * deviation)
            offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
            weights = torch.exp(-(offsets**2) / (2 * deviation**2))
            matrix = torch.zeros(length, length, dtype=torch.float64)
            for offset, weight in zip(offsets, weights / weights.sum(), strict=True):
                matrix[places.long(), (places + offset).clamp(0, length - 1).long()] += weight
            images = torch.tensordot(images, matrix.to(images), dims=([axis], [1])).movedim(-1, axis)
    return images


@register(
    "dave",
    family="gradient",
    paper="Wróbel et al., DAVE: Distribution-aware Attribution via ViT Gradient Decomposition",
    year=2026,
    arxiv="2602.06613",
    note="the moves, their number and the low-pass are ours",
    class_specific=True,
    signed=True,
)
def dave(
    *,
    resolution: ResolutionOption = "patch",
    samples: Annotated[int, "moved images, one forward and one backward pass each", AtMost(10_000)] = 16,
    angle: Annotated[float, "the largest rotation, in degrees"] = 5.0,
    shift: Annotated[float, "the largest shift along each axis, in patches"] = 0.5,
    blur: Annotated[float, "standard deviation of the low-pass, in patches"] = 0.25,
    seed: Annotated[int, "seed of the moves"] = 0,
) -> Readout:
    """Input x the model's effective linear map, averaged over small moves of the image and smoothed."""
    return EquivariantGradient(resolution=resolution, samples=samples, angle=angle, shift=shift, blur=blur, seed=seed)
