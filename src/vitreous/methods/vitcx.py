"""ViT-CX [xie2023vit][]: features of the patches as masks, weighted by their causal effect.

The masks are maps of patches upsampled to pixels; statistics of all upsampled maps are computed without building them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32, in_float64
from vitreous.errors import MethodError
from vitreous.inputs.patch_geometry import PatchGeometry, Size, along_axes, interpolations
from vitreous.methods.perturbation import PerturbationMethod, all_targets, original_output, seeded
from vitreous.methods.readout import Resolution, View, layout_means
from vitreous.methods.registry import MOST_EVALUATIONS, register
from vitreous.tape import Needs


class BilinearUpsampler:
    """Bilinear upsampling, corners not aligned, of maps (..., patches) to (..., height x width); trilinear of volumes.

    It is linear and separable, f -> U_rows f U_columnsᵀ with rows of U that sum to 1. So inner products and extremes of
    the large maps, and scaling them, can be computed from the small ones.

    Args:
        grid: rows and columns of patches.
        size: height and width of the image.
        like: a tensor with the dtype and device of the maps.
        geometry: where patches are centred; equal cells by default.
    """

    def __init__(self, grid: Size, size: Size, like: Tensor, geometry: PatchGeometry | None = None) -> None:
        self._grid = grid
        if geometry is None:
            self._axes = [_interpolation(count, length, like) for count, length in zip(grid, size, strict=True)]
        else:
            self._axes = [matrix.to(like) for matrix in interpolations(grid, size, geometry)]

    def pixels(self, maps: Tensor) -> Tensor:
        """The large maps."""
        return self._between(maps, self._axes)

    def extremes(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of every large map, (..., 1).

        Between the centres of four patches a map is bilinear, so its extremes are among the pixels in the corners.
        """
        corners = self._between(maps, [matrix[_at_corners(matrix)] for matrix in self._axes])
        return corners.amin(dim=-1, keepdim=True), corners.amax(dim=-1, keepdim=True)

    def products(self, maps: Tensor) -> Tensor:
        """Inner products between the large maps of (n, patches): (n, n), in float64."""
        maps = in_float64(maps)
        return self._between(maps, [wide.T @ wide for wide in map(in_float64, self._axes)]) @ maps.T

    def stretched(self, maps: Tensor) -> Tensor:
        """Scale small maps so that the large ones have the range 0 to 1; constant maps become 0."""
        low, high = self.extremes(maps)
        return ((maps - low) / (high - low).masked_fill(high == low, 1)).masked_fill(high == low, 0)

    def _between(self, maps: Tensor, matrices: list[Tensor]) -> Tensor:
        return along_axes(maps.reshape(*maps.shape[:-1], *self._grid), matrices).flatten(-len(self._grid))


def _interpolation(count: int, length: int, like: Tensor) -> Tensor:
    """Return the matrix (length, count) that upsamples ``count`` values."""
    each = torch.eye(count, dtype=like.dtype, device=like.device)[:, None]
    return torch.nn.functional.interpolate(each, length, mode="linear", align_corners=False)[:, 0].T.contiguous()


def _at_corners(matrix: Tensor) -> Tensor:
    """Return which pixels along an axis are the first or last between two patch centres, (length,)."""
    before = (matrix != 0).int().argmax(dim=1)  # the centre before the pixel
    changes = before[1:] != before[:-1]
    edge = changes.new_ones(1)
    return torch.cat((edge, changes)) | torch.cat((changes, edge))


class VitCx(PerturbationMethod):
    """Σ_j s_j M_j / Σ_j M_j / N with s_j = p(x M_j + n_j) - p(x + n_j) + p(x) (ViT-CX eqs. 4 to 7).

    The M_j are sums of similar channels after the first norm of the last block, scaled to 0..1; channels are clustered
    by complete linkage below a cosine distance of ``threshold``. n_j is normal noise with standard deviation ``noise``
    times 1 - M_j. The division by N, the number of masks, is that of the authors' code.

    Args:
        resolution: a map of pixels, or its averages over patches; masks are of pixels, as in the paper.
        threshold: cosine distance below which channels are merged.
        noise: standard deviation of the noise.
        budget: forward passes per image, two per mask; channels are merged until it suffices. ``None`` for no limit.
        seed: seed of the noise.
        noises: for each image, standard normal noise (masks, channels, height, width) to use instead of random noise.
    """

    def __init__(
        self,
        *,
        resolution: Resolution = "pixel",
        threshold: float = 0.1,
        noise: float = 0.1,
        budget: int | None = None,
        seed: int = 0,
        noises: list[Tensor] | None = None,
    ) -> None:
        if budget is not None and budget < 2:
            raise MethodError("budget must be at least 2: every mask takes two evaluations")
        self.resolution, self._threshold, self._noise = resolution, threshold, noise
        self._masks_at_most = None if budget is None else budget // 2
        self._seed, self._given = seed, noises

    def needs(self, layer: int, depth: int) -> Needs:
        """The output of the first norm of the last block."""
        del layer
        return Needs(norms=frozenset({depth - 1}), picture=True)

    def maps(self, view: View) -> Tensor:
        """The weighted mean of the masks; their number differs between images, so images run one by one."""
        found = []
        before = original_output(view, "probability")
        upsampler = upsampler_of(view)
        for image, channels in enumerate(self.channels(view)):
            labels = clusters(upsampler.products(channels), self._threshold, self._masks_at_most)
            masks = upsampler.pixels(upsampler.stretched(joined(channels, labels)))
            effects = self._effects(view, image, masks) + before[image, :, None]
            found.append(effects @ masks / masks.sum(dim=0).clamp(min=torch.finfo(masks.dtype).tiny) / len(masks))
        maps = torch.stack(found)
        return maps if self.resolution == "pixel" else layout_means(maps, view.runner.size, view.layout)

    def channels(self, view: View) -> Tensor:
        """The features of the patches, (batch, channels, patches), scaled so that upsampled they range from 0 to 1.

        Only the few masks are upsampled, not the hundreds of channels.
        """
        features = view.norm(view.depth - 1)[:, view.layout.prefix :].mT
        return upsampler_of(view).stretched(features)

    def _effects(self, view: View, image: int, masks: Tensor) -> Tensor:
        """p(x M_j + n_j) - p(x + n_j) of every target, (targets, masks)."""
        runner = view.runner
        picture, target = runner.images[image], all_targets(view)[image]
        pixels = masks.view(-1, *runner.size).to(picture).unsqueeze(runner.channel_axis)
        generator = seeded(self._seed)
        effects = []
        for numbers in torch.split(torch.arange(len(masks)), max(1, runner.batch // 2)):
            mask = pixels[numbers]
            noise = self._standard_noise(image, numbers, picture, generator) * self._noise * (1 - mask)
            logits = runner.logits(torch.cat((picture * mask + noise, picture + noise)))
            probabilities = runner.explained(at_least_float32(logits), "probability")
            masked, original = probabilities[:, target].chunk(2)
            effects.append(masked - original)
        return torch.cat(effects).T.to(masks)

    def _standard_noise(self, image: int, numbers: Tensor, picture: Tensor, generator: torch.Generator) -> Tensor:
        if self._given is not None:
            return self._given[image][numbers]
        # One draw per mask, so that the noise does not depend on the batch size.
        draws = torch.empty(len(numbers), *picture.shape, dtype=torch.float32)
        for draw in draws:
            draw.normal_(generator=generator)
        return draws.to(picture)


def upsampler_of(view: View) -> BilinearUpsampler:
    """Return the upsampler from the patches of a view to its pixels."""
    layout = view.layout
    return BilinearUpsampler(layout.grid, view.runner.size, view.norm(view.depth - 1), layout.geometry)


def joined(channels: Tensor, labels: Tensor) -> Tensor:
    """Sum the channels of every cluster, (clusters, patches)."""
    sums = channels.new_zeros(int(labels.max()) + 1, channels.shape[1])
    return sums.index_add_(0, labels.to(channels.device), channels)


def clusters(products: Tensor, threshold: float, at_most: int | None) -> Tensor:
    """Cluster channels by complete linkage of cosine distances; labels in the order of first members, (channels,).

    Args:
        products: inner products between the upsampled channels, (channels, channels).
        threshold: distance below which clusters are merged.
        at_most: maximum number of clusters; no limit by default.
    """
    lengths = (
        products.diagonal().clamp(min=0).sqrt().clamp(min=1e-12)
    )  # a constant channel has distance 1 to all others
    distance = (1 - products / lengths / lengths[:, None]).cpu().numpy()
    return torch.from_numpy(complete_linkage(distance, threshold, at_most or len(distance)))


def complete_linkage(distance: np.ndarray, threshold: float, at_most: int) -> np.ndarray:
    """Merge the two nearest clusters while they are nearer than ``threshold`` or there are more than ``at_most``.

    The distance of two clusters is the largest distance between their members.
    """
    labels = np.arange(len(distance))
    between = distance.copy()
    np.fill_diagonal(between, np.inf)
    for left in range(len(distance), 1, -1):
        first, second = sorted(np.unravel_index(between.argmin(), between.shape))
        if between[first, second] >= threshold and left <= at_most:
            break
        between[first] = between[:, first] = np.maximum(between[first], between[second])
        between[second] = between[:, second] = np.inf
        between[first, first] = np.inf
        labels[labels == second] = first
    return np.unique(labels, return_inverse=True)[1]


@register(
    "vitcx",
    family="perturbation",
    paper="Xie et al., ViT-CX: Causal Explanation of Vision Transformers",
    year=2023,
    arxiv="2211.03064",
    class_specific=True,
    signed=False,
)
def vitcx(
    *,
    by: Annotated[
        Literal["paint"],
        "masks are soft and the noise is of pixels, so no set of tokens can be dropped instead",
    ] = "paint",
    resolution: Annotated[Resolution, "one score per patch, the mean of its pixels, or one per pixel"] = "patch",
    threshold: Annotated[float, "cosine distance below which channels are merged into one mask"] = 0.1,
    noise: Annotated[float, "standard deviation of the noise in masked regions"] = 0.1,
    budget: Annotated[
        int | None, "maximum number of forward passes per image; unlimited by default", MOST_EVALUATIONS
    ] = None,
    seed: Annotated[int, "seed of the noise"] = 0,
) -> VitCx:
    """Features of the last block as masks, weighted by their causal effect on the output."""
    del by  # its single value documents why tokens cannot be dropped
    return VitCx(resolution=resolution, threshold=threshold, noise=noise, budget=budget, seed=seed)
