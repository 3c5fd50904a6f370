"""Gradients averaged over many inputs: Integrated Gradients, SmoothGrad and DAVE.

The first two take pixels or the first tokens. DAVE [wrobel2026dave][] averages the model's effective linear map over
small moves of the image and smooths it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain, starmap
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import MethodError
from vitreous.inputs.model_io import Texts
from vitreous.inputs.patch_geometry import Size
from vitreous.methods.perturbation import Unrecorded, few_at_once, rerun, seeded, uniform
from vitreous.methods.readout import Procedure, Readout, Resolution, ResolutionOption, View, input_scores, total
from vitreous.methods.registry import AtMost, register
from vitreous.tape import PIXELS, GradientNeeds, Intervention, Needs, Pass

Place = Literal["pixels", "tokens"]
Baseline = Literal["zero", "black", "mean", "pad", "mask"]
Quadrature = Literal["gauss", "right"]
Read = Literal["magnitude", "input"]
AnyView = View | Unrecorded
PLAIN = Pass("plain", "logit")
_MOST_GAUSS_POINTS = 1000  # leggauss computes the eigenvalues of a matrix of that size


class InputProcedure(Procedure):
    """A method that combines several gradients at the input: pixels, or the first block's tokens.

    For texts the input is always the first block's tokens.
    """

    def __init__(self, at: Place, resolution: Resolution) -> None:
        if at == "tokens" and resolution == "pixel":
            raise MethodError("resolution=pixel needs at=pixels: a token has no pixels of its own")
        self.at, self.resolution = at, resolution

    def needs(self, layer: int, depth: int) -> Needs:
        """The first block's tokens, which may be the input."""
        del layer, depth
        return Needs(tokens=frozenset({0}), gradients_again=True)

    @abstractmethod
    def map(self, view: AnyView) -> Tensor:
        """Scores of patches or pixels; if pixels are the input, no recorded run is needed."""

    def of_tokens(self, view: AnyView) -> bool:
        """Whether the input are tokens, not pixels."""
        return self.at == "tokens" or _reads_text(view)

    def input(self, view: AnyView) -> Tensor:
        """The original input, (batch, channel, height, width) or (batch, tokens, channels)."""
        if not self.of_tokens(view):
            return view.runner.images
        assert isinstance(view, View)
        return view.tokens(0)

    def input_gradients(self, view: AnyView, inputs: Tensor) -> Tensor:
        """dy_c/d input at other inputs: (variations, batch, ...) -> the same shape."""
        of_tokens = self.of_tokens(view)
        layer = 0 if of_tokens else PIXELS
        needs, flat, change = _gradient_at(layer), inputs.flatten(0, 1), None
        if of_tokens:
            assert isinstance(view, View)
            change = Intervention(0, flat.to(view.tape.tokens(0).dtype))
        with rerun(view, view.runner.inputs[:1] if of_tokens else flat, needs, change) as run:
            return run.token_gradient(PLAIN, layer).view_as(inputs)

    def scores(self, view: AnyView, attributions: Tensor) -> Tensor:
        """Sum attributions of the input to scores of patches or pixels."""
        return input_scores(attributions, view.runner.layout, self.resolution)


class PathIntegral(InputProcedure):
    """(x - x') * ∫ dy_c/dx (x' + a (x - x')) da, a from 0 to 1 (Integrated Gradients eq. 1).

    The integral is a weighted sum over ``steps`` points: Gauss-Legendre, or the right Riemann sum of the paper's eq. 3.
    Completeness: the attributions, including those of prefix tokens, sum to y_c(x) - y_c(x') up to the quadrature
    error. Over tokens the path is the straight line between the first block's tokens of baseline and image.
    """

    def __init__(
        self, at: Place, resolution: Resolution, steps: int, baseline: Baseline, quadrature: Quadrature
    ) -> None:
        super().__init__(at, resolution)
        if steps < 1:
            raise MethodError(f"steps={steps} must be at least 1")
        if quadrature == "gauss" and steps > _MOST_GAUSS_POINTS:
            raise MethodError(f"steps={steps} is more than {_MOST_GAUSS_POINTS}: quadrature=right takes more")
        self.baseline, self.steps, self.quadrature = baseline, steps, quadrature
        self.evaluations = steps

    def map(self, view: AnyView) -> Tensor:
        """Scores of patches, or of pixels."""
        difference = self.input(view) - self.start(view)
        return self.scores(view, difference * self.mean_gradient(view, difference))

    def needs(self, layer: int, depth: int) -> Needs:
        """For a right Riemann sum also the gradient at the image, its last point, which the recorded run provides."""
        needs = super().needs(layer, depth)
        return needs | _gradient_at(self._layer) if self.quadrature == "right" else needs

    @property
    def _layer(self) -> int:
        """The layer of the input's gradient in the recorded run; for a text, ``PIXELS`` are its tokens."""
        return 0 if self.at == "tokens" else PIXELS

    def mean_gradient(self, view: AnyView, difference: Tensor) -> Tensor:
        """The integral of the gradient along the path, without the factor x - x'."""
        end, at_end = self.input(view), list[Tensor]()
        all_points, all_weights = (_gauss_legendre if self.quadrature == "gauss" else _right_riemann)(self.steps)
        if self.quadrature == "right" and isinstance(view, View):
            at_end.append(float(all_weights[-1]) * view.token_gradient(PLAIN, self._layer))
            all_points, all_weights = all_points[:-1], all_weights[:-1]
        if not len(all_points):
            return total(at_end)
        pieces = zip(few_at_once(view, all_points), few_at_once(view, all_weights), strict=True)

        def weighed(points: Tensor, weights: Tensor) -> Tensor:
            # x - (1 - a)(x - x') needs no third tensor of this size
            inputs = end - _along(1 - points, end) * difference
            return (_along(weights, end) * self.input_gradients(view, inputs)).sum(dim=0)

        return total(chain(at_end, starmap(weighed, pieces)))

    def start(self, view: AnyView) -> Tensor:
        """The baseline x': an image or text without content, or its tokens."""
        if _reads_text(view) and self.baseline == "zero":
            return torch.zeros_like(self.input(view))
        blank = _blank_texts(view, self.baseline) if _reads_text(view) else blank_images(view, self.baseline)
        if isinstance(blank, Tensor):
            if self.at == "pixels":
                return blank
            embedded = view.runner.embedded(blank)
            if embedded is not None:
                return embedded
        with rerun(view, blank, Needs(tokens=frozenset({0}))) as run:
            return run.tokens(0)


class NoisyGradient(InputProcedure):
    """The mean of dy_c/dx over x + N(0, s²), s a part of the input's range (SmoothGrad section 2.2).

    ``magnitude`` is the absolute value of the mean, as the paper shows it; ``input`` is the mean of noisy input x
    gradient. The noise is the same for every image of a batch and every class, so that maps do not depend on the rest
    of the call.
    """

    def __init__(self, at: Place, resolution: Resolution, samples: int, noise: float, seed: int, read: Read) -> None:
        super().__init__(at, resolution)
        if samples < 1:
            raise MethodError(f"samples={samples} must be at least 1")
        if not 0 <= noise < float("inf"):
            raise MethodError(f"noise={noise} must be a number from 0 up")
        self.samples, self.noise, self.seed, self.read = samples, noise, seed, read
        self.signed = read == "input"
        self.evaluations = samples

    def map(self, view: AnyView) -> Tensor:
        """Scores of patches, or of pixels."""

        def read(inputs: Tensor) -> Tensor:
            gradients = self.input_gradients(view, inputs)
            return (gradients if self.read == "magnitude" else gradients * inputs).sum(dim=0)

        mean = total(map(read, self.noisy_inputs(view))) / self.samples
        return self.scores(view, mean.abs() if self.read == "magnitude" else mean)

    def noisy_inputs(self, view: AnyView) -> Iterator[Tensor]:
        """Yield noisy inputs, (some samples, batch, ...)."""
        clean = self.input(view)
        axes = tuple(range(1, clean.dim()))
        deviation = self.noise * (clean.amax(dim=axes, keepdim=True) - clean.amin(dim=axes, keepdim=True))
        generator = torch.Generator().manual_seed(self.seed)
        for numbers in few_at_once(view, torch.arange(self.samples)):
            # One draw per sample on the CPU, so that the noise depends neither on the batching nor on the device.
            drawn = [torch.randn(clean.shape[1:], generator=generator, dtype=torch.float32) for _ in numbers]
            yield clean + torch.stack(drawn)[:, None].to(clean) * deviation


def _gauss_legendre(steps: int) -> tuple[Tensor, Tensor]:
    """Points and weights on [0, 1] that integrate polynomials of degree 2 steps - 1 exactly."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    return torch.from_numpy((1 + points) / 2), torch.from_numpy(weights / 2)


def _right_riemann(steps: int) -> tuple[Tensor, Tensor]:
    """Points k / steps, k from 1, with equal weights."""
    points = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    return points, torch.full_like(points, 1 / steps)


def _along(values: Tensor, inputs: Tensor) -> Tensor:
    """Reshape one number per variation to broadcast with (variations, *inputs.shape)."""
    return values.to(inputs).view(-1, *[1] * inputs.dim())


def _reads_text(view: AnyView) -> bool:
    return isinstance(view.runner.inputs, Texts)


def _gradient_at(layer: int) -> Needs:
    return Needs(gradients={PLAIN: GradientNeeds(tokens=frozenset({layer}))})


def _blank_texts(view: AnyView, kind: Baseline) -> Texts:
    texts = view.runner.inputs
    assert isinstance(texts, Texts)
    if kind not in texts.blanks:
        known = ", ".join(f"baseline={name}" for name in ("zero", *texts.blanks))
        raise MethodError(f"baseline={kind} does not exist for this text: there is {known}")
    return texts.blanked(kind)


def blank_images(view: AnyView, kind: Baseline) -> Tensor:
    """Pictures without content, as many and as large as those that are explained.

    Raises:
        MethodError: there is no such baseline for images, or black is not known.
    """
    images = view.runner.images
    if kind in {"pad", "mask"}:
        raise MethodError(f"baseline={kind} is a token of a text: for images there is zero, black and mean")
    if kind == "zero":
        return torch.zeros_like(images)
    if kind == "mean":
        axes = [axis for axis in range(1, images.dim()) if axis != view.runner.channel_axis]
        return images.mean(dim=axes, keepdim=True).expand_as(images)
    if view.runner.black is None:
        raise MethodError(
            "baseline=black needs a model whose preprocessing is known (a name, or images instead of a tensor); "
            "baseline=zero is 0 after normalisation, baseline=mean the mean colour of each image"
        )
    return view.runner.colour(view.runner.black).to(images).expand_as(images)


At = Annotated[Place, "the input: pixels, or the first block's tokens (always these for texts)"]


@register(
    "integrated_gradients",
    family="gradient",
    paper="Sundararajan et al., Axiomatic Attribution for Deep Networks",
    year=2017,
    arxiv="1703.01365",
    class_specific=True,
    signed=True,
)
def integrated_gradients(
    *,
    at: At = "pixels",
    resolution: ResolutionOption = "patch",
    steps: Annotated[int, "points of the integral", AtMost(100_000)] = 50,
    baseline: Annotated[
        Baseline,
        "0 after normalisation, a black image, or each image's mean colour; for texts 0, padding, or mask tokens",
    ] = "zero",
    quadrature: Annotated[Quadrature, "Gauss-Legendre, or the right Riemann sum of the paper"] = "gauss",
) -> Readout:
    """Input minus baseline, times the mean gradient on the path between them."""
    return PathIntegral(at, resolution, steps, baseline, quadrature)


@register(
    "smoothgrad",
    family="gradient",
    paper="Smilkov et al., SmoothGrad: removing noise by adding noise",
    year=2017,
    arxiv="1706.03825",
    class_specific=True,
    signed=False,
)
def smoothgrad(
    *,
    at: At = "pixels",
    resolution: ResolutionOption = "patch",
    samples: Annotated[int, "noisy inputs that are averaged", AtMost(100_000)] = 50,
    noise: Annotated[float, "standard deviation as a part of the input's range"] = 0.15,
    seed: Annotated[int, "seed of the noise"] = 0,
    read: Annotated[Read, "absolute value of the mean gradient, or the mean of noisy input x gradient"] = "magnitude",
) -> Readout:
    """Gradient averaged over noisy copies of the input."""
    return NoisyGradient(at, resolution, samples, noise, seed, read)


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
