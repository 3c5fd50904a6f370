"""What erased pixels become: one colour, a blurred image, or a noisy linear interpolation of their surroundings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_MOST_ITERATIONS = 500
_RESIDUAL = 1e-5  # of a pixel's equation, in standard deviations: a thousandth of the noise that is added
ROAD_NOISE = 0.01  # of normalised pixels, as in the authors' program
_BLUR = 1 / 16  # of the shorter side: the standard deviation of the Gaussian


def linear_imputation(images: Tensor, erased: Tensor) -> Tensor:
    """Replace erased pixels by the weighted mean of their eight neighbours, erased ones included.

    The imputation of [rong2022consistent][], without its noise. Its linear equations (one for every erased pixel) are
    solved for all images together by conjugate gradients, from a start that a pyramid of means gives.

    Args:
        images: (images, channel, height, width).
        erased: which pixels are replaced, (images, height, width). Where none is left, all become the image's mean.
    """
    inside = erased[:, None].to(images.dtype)
    # Beyond the edge there is nothing, so the weights that are left are fewer.
    weights = _neighbours(torch.ones_like(images[:1, :1]))
    nothing_left = erased.flatten(1).all(dim=1)[:, None, None, None]
    start = torch.where(nothing_left, images.mean(dim=(-2, -1), keepdim=True), _from_pyramid(images, 1 - inside))
    found = torch.where(inside > 0, start, images)
    residual = inside * (_neighbours(found) - weights * found) * (~nothing_left)
    direction = residual.clone()
    square = residual.square().sum(dim=(-2, -1), keepdim=True)
    for _ in range(_MOST_ITERATIONS):
        if float(residual.abs().amax()) <= _RESIDUAL:
            break
        moved = inside * (weights * direction - _neighbours(direction))
        curvature = (direction * moved).sum(dim=(-2, -1), keepdim=True)
        step = torch.where(curvature > 0, square / curvature.clamp(min=torch.finfo(images.dtype).tiny), 0.0)
        found = found + step * direction
        residual = residual - step * moved
        last, square = square, residual.square().sum(dim=(-2, -1), keepdim=True)
        direction = residual + square / last.clamp(min=torch.finfo(images.dtype).tiny) * direction
    return found


def _neighbours(values: Tensor) -> Tensor:
    """The weighted sum of the eight neighbours: those beside a pixel weigh 1/6, those at its corners 1/12."""
    framed = functional.pad(values, (1, 1, 1, 1))
    rows = framed[..., :-2, :] + framed[..., 2:, :] + 2 * framed[..., 1:-1, :]
    return (rows[..., :-2] + rows[..., 2:] + 2 * rows[..., 1:-1] - 4 * values) / 12


def _from_pyramid(images: Tensor, known: Tensor) -> Tensor:
    """Fill what is not known from means over ever larger squares."""
    if min(images.shape[-2:]) == 1 or bool((known > 0).all()):
        return images * (known > 0)
    size = images.shape[-2:]
    sums = functional.avg_pool2d(images * known, 2, ceil_mode=True, count_include_pad=False)
    share = functional.avg_pool2d(known, 2, ceil_mode=True, count_include_pad=False)
    means = sums / share.clamp(min=torch.finfo(images.dtype).tiny)
    coarse = _from_pyramid(means, (share > 0).to(images.dtype))
    fine = functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
    return torch.where(known > 0, images, fine)


def blurred(images: Tensor) -> Tensor:
    """Images (images, channel, height, width) behind a Gaussian as wide as a sixteenth of their shorter side."""
    deviation = max(1.0, _BLUR * min(images.shape[-2:]))
    reach = min(round(3 * deviation), min(images.shape[-2:]) - 1)
    places = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    line = torch.exp(-(places**2) / (2 * deviation**2))
    line = line / line.sum()
    flat = functional.pad(images.flatten(0, 1)[:, None], (reach, reach, reach, reach), mode="reflect")
    flat = functional.conv2d(functional.conv2d(flat, line.view(1, 1, 1, -1)), line.view(1, 1, -1, 1))
    return flat.view_as(images)
