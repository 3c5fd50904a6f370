"""captum: gradients at pixels and layers, occlusion, LIME and KernelSHAP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitreous.methods.perturbation import independent, patch_of_pixel, seeded
from vitreous.methods.readout import patch_sums
from vitreous.speed.peers.peer import Peer, PeerInput, PeerMethod

# The batch sizes of our own methods, see ``vitreous.tape.runner``.
_RECORDED_AT_ONCE = 8
_BARE_AT_ONCE = 16


def load() -> Any:
    """Import captum.attr."""
    import captum.attr  # noqa: PLC0415 - only with --peers

    return captum.attr


def input_x_gradient(given: PeerInput, layer: int = 0) -> Tensor:
    """Token x gradient, summed over channels."""
    explainer = load().LayerGradientXActivation(given.model, given.block(layer))
    attributions = explainer.attribute(given.images, target=given.target, attribute_to_layer_input=True)
    return given.patches(attributions.sum(dim=-1))


def integrated_gradients(given: PeerInput, steps: int = 50) -> Tensor:
    """Integrated gradients over pixels, with Gauss-Legendre quadrature."""
    explainer = load().IntegratedGradients(given.model)
    return _per_patch(given, _integrated(explainer, given, steps))


def integrated_gradients_of_tokens(given: PeerInput, steps: int = 50) -> Tensor:
    """Integrated gradients over the first block's tokens."""
    explainer = load().LayerIntegratedGradients(given.model, given.block(0))
    attributions = _integrated(explainer, given, steps, attribute_to_layer_input=True)
    return given.patches(attributions.sum(dim=-1))


def smoothgrad(given: PeerInput, samples: int = 50) -> Tensor:
    """The mean gradient over noisy pixels, with the noise of our method."""
    captum, images = load(), given.images
    at_once = max(1, _RECORDED_AT_ONCE // len(images))
    with _our_noise(images, samples, at_once):
        mean = captum.NoiseTunnel(captum.Saliency(given.model)).attribute(
            images,
            nt_type="smoothgrad",
            nt_samples=samples,
            nt_samples_batch_size=at_once,
            stdevs=1.0,
            target=given.target,
            abs=False,
        )
    return _per_patch(given, mean.abs())


@contextmanager
def _our_noise(images: Tensor, samples: int, at_once: int) -> Iterator[None]:
    """Replace captum's random numbers by ours, so that two random methods can be compared.

    captum draws for a few samples at once, all samples of the first image first.
    """
    deviations = 0.15 * (images.amax(dim=(1, 2, 3)) - images.amin(dim=(1, 2, 3)))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.randn(images.shape[1:], generator=generator) for _ in range(samples)]).to(images)
    parts = iter(torch.split(drawn, at_once))
    original = torch.normal

    def normal(*_: Any, **__: Any) -> Tensor:
        part = next(parts)
        return torch.cat([deviation * part for deviation in deviations])

    torch.normal = normal
    try:
        yield
    finally:
        torch.normal = original


def occlusion(given: PeerInput, window: int = 1, stride: int = 1) -> Tensor:
    """Drop of the logit when a square of patches is painted with 0."""
    height, width = (edge // cells for edge, cells in zip(given.images.shape[2:], given.layout.grid, strict=True))
    with torch.no_grad():
        pixels: Tensor = (
            load()
            .Occlusion(given.model)
            .attribute(
                given.images,
                sliding_window_shapes=(3, height * window, width * window),
                strides=(3, height * stride, width * stride),
                target=given.target,
                perturbations_per_eval=max(1, _BARE_AT_ONCE // len(given.images)),
            )
        )
    # captum repeats a window's value on its pixels
    return pixels[:, 0, ::height, ::width].flatten(1)


def lime(given: PeerInput, budget: int = 1000) -> Tensor:
    """Ridge regression on the sets of patches of our method; captum explains one image at a time."""
    from captum._utils.models.linear_model import SkLearnRidge  # noqa: PLC0415

    captum, patches = load(), given.layout.patches
    kept = independent(budget, patches, seeded(0)).to(given.images)
    pixels = patch_of_pixel(given.layout.grid, _size(given), given.layout.geometry).view(_size(given))

    def similarity(_: Tensor, __: Tensor, sample: Tensor, **___: Any) -> float:
        distance = 1 - float(sample.mean()) ** 0.5  # the cosine of k patches and all is k / sqrt(k patches)
        return math.exp(-((distance / 0.25) ** 2) / 2)

    def explain(image: Tensor, target: int) -> Tensor:
        sets = iter([torch.ones_like(kept[0]), *kept])
        peer = captum.LimeBase(
            given.model,
            interpretable_model=SkLearnRidge(alpha=1.0),
            similarity_func=similarity,
            perturb_func=lambda *_, **__: next(sets)[None],
            perturb_interpretable_space=True,
            from_interp_rep_transform=lambda sample, original, **_: original * sample[0][pixels],
            to_interp_rep_transform=None,
        )
        with torch.no_grad():
            found: Tensor = peer.attribute(
                image[None], target=target, n_samples=budget + 1, perturbations_per_eval=_BARE_AT_ONCE
            )
        return found[0]

    return torch.stack([explain(image, int(target)) for image, target in zip(given.images, given.target, strict=True)])


def kernel_shap(given: PeerInput, budget: int = 1000) -> Tensor:
    """Shapley values from captum's own random sets, one image at a time."""
    explainer = load().KernelShap(given.model)
    height, width = (edge // cells for edge, cells in zip(given.images.shape[2:], given.layout.grid, strict=True))
    patches = patch_of_pixel(given.layout.grid, _size(given), given.layout.geometry)
    numbers = patches.view(1, 1, *_size(given)).expand(1, 3, -1, -1)

    def explain(image: Tensor, target: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = explainer.attribute(
                image[None],
                target=target,
                feature_mask=numbers,
                n_samples=budget,
                perturbations_per_eval=_BARE_AT_ONCE,
            )
        return found[0, 0, ::height, ::width].flatten()

    return torch.stack([explain(image, int(target)) for image, target in zip(given.images, given.target, strict=True)])


def _size(given: PeerInput) -> tuple[int, int]:
    return given.images.shape[2], given.images.shape[3]


def _integrated(explainer: Any, given: PeerInput, steps: int, **options: bool) -> Any:
    return explainer.attribute(
        given.images,
        target=given.target,
        n_steps=steps,
        method="gausslegendre",
        internal_batch_size=max(_RECORDED_AT_ONCE, len(given.images)),
        **options,
    )


def _per_patch(given: PeerInput, attributions: Tensor) -> Tensor:
    return patch_sums(attributions.detach().sum(dim=1), given.layout.grid, given.layout.geometry).flatten(1)


CAPTUM = Peer(
    "captum",
    load,
    (
        PeerMethod(("ixg", "ixg:layer={layer}"), input_x_gradient),
        PeerMethod(("integrated_gradients", "integrated_gradients:steps={steps}"), integrated_gradients),
        PeerMethod(
            ("integrated_gradients:at=tokens", "integrated_gradients:at=tokens,steps={steps}"),
            integrated_gradients_of_tokens,
        ),
        PeerMethod(("smoothgrad", "smoothgrad:samples={samples}"), smoothgrad),
        PeerMethod(("occlusion:of=logit", "occlusion:of=logit,window={window},stride={stride}"), occlusion),
        PeerMethod(("lime:of=logit", "lime:of=logit,budget={budget}"), lime),
        PeerMethod(("kernel_shap:of=logit", "kernel_shap:of=logit,budget={budget}"), kernel_shap),
    ),
    usual=(
        *("ixg", "integrated_gradients:steps=10", "integrated_gradients:at=tokens,steps=4", "smoothgrad:samples=4"),
        *("occlusion:of=logit,window=4,stride=4", "lime:of=logit,budget=20", "kernel_shap:of=logit,budget=20"),
    ),
)
