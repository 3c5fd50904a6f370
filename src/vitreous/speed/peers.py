"""Peers: other libraries that implement some of the methods; imported on first use.

captum: gradients at pixels and layers, occlusion, LIME and KernelSHAP. pytorch-grad-cam: class activation maps at a
block's first norm. lxt: AttnLRP and CP-LRP by patched modules, as input x gradient at the first block. pnpxai: captum's
gradients under its own interface, and attention rollout by zennit's hooks. quantus: mostly metrics; its ``explain``
calls captum with its own settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vitreous.errors import InputError, MissingDependencyError
from vitreous.methods.perturbation import independent, patch_of_pixel, seeded
from vitreous.methods.readout import patch_sums
from vitreous.speed.peer import Peer, PeerInput, PeerMethod

# The batch sizes of our own methods, see ``vitreous.tape.runner``.
_RECORDED_AT_ONCE = 8
_BARE_AT_ONCE = 16


def load_captum() -> Any:
    """Import captum.attr."""
    import captum.attr  # noqa: PLC0415 - only with --peers

    return captum.attr


def input_x_gradient_by_captum(given: PeerInput, layer: int = 0) -> Tensor:
    """Token x gradient, summed over channels."""
    explainer = load_captum().LayerGradientXActivation(given.model, given.block(layer))
    attributions = explainer.attribute(given.images, target=given.target, attribute_to_layer_input=True)
    return given.patches(attributions.sum(dim=-1))


def integrated_gradients_by_captum(given: PeerInput, steps: int = 50) -> Tensor:
    """Integrated gradients over pixels, with Gauss-Legendre quadrature."""
    explainer = load_captum().IntegratedGradients(given.model)
    return _per_patch(given, _integrated(explainer, given, steps))


def integrated_gradients_of_tokens(given: PeerInput, steps: int = 50) -> Tensor:
    """Integrated gradients over the first block's tokens."""
    explainer = load_captum().LayerIntegratedGradients(given.model, given.block(0))
    attributions = _integrated(explainer, given, steps, attribute_to_layer_input=True)
    return given.patches(attributions.sum(dim=-1))


def smoothgrad(given: PeerInput, samples: int = 50) -> Tensor:
    """The mean gradient over noisy pixels, with the noise of our method."""
    captum, images = load_captum(), given.images
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
            load_captum()
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

    captum, patches = load_captum(), given.layout.patches
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
    explainer = load_captum().KernelShap(given.model)
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
    load_captum,
    (
        PeerMethod(("ixg", "ixg:layer={layer}"), input_x_gradient_by_captum),
        PeerMethod(("integrated_gradients", "integrated_gradients:steps={steps}"), integrated_gradients_by_captum),
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


CLASSES = {
    "gradcam": "GradCAM",
    "gradcampp": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "gradcam_elementwise": "GradCAMElementWise",
}


def load_grad_cam() -> Any:
    """Import pytorch_grad_cam."""
    import pytorch_grad_cam  # noqa: PLC0415 - only with --peers

    return pytorch_grad_cam


def activation_map(name: str, given: PeerInput, layer: int = -1) -> Tensor:
    """Run the package's whole call; return its map before it is scaled to 0..1 and upsampled."""
    return torch.from_numpy(_unscaled(name, given, layer)).clamp(min=0)


def principal_activation(given: PeerInput, layer: int = -1) -> Tensor:
    """Eigen-CAM with our convention for the arbitrary sign of the axis: the largest absolute value is positive."""
    found = torch.from_numpy(_unscaled("EigenCAM", given, layer))
    largest = found.gather(1, found.abs().argmax(dim=1, keepdim=True))
    return (found * largest.sign()).clamp(min=0)


def _unscaled(name: str, given: PeerInput, layer: int) -> np.ndarray[Any, Any]:
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget  # noqa: PLC0415

    found: list[np.ndarray[Any, Any]] = []
    targets = [ClassifierOutputTarget(int(target)) for target in given.target]
    with getattr(load_grad_cam(), name)(given.model, [given.first_norm(layer)], reshape_transform=given.as_grid) as cam:
        original = cam.get_cam_image

        def remember(*given: Any, **options: Any) -> np.ndarray[Any, Any]:
            found.append(original(*given, **options))
            return found[0].copy()

        cam.get_cam_image = remember
        # Its hooks need a graph, which has to start at the pixels if parameters are frozen.
        cam(given.images.clone().requires_grad_(cam.uses_gradients), targets)
    return found[0].reshape(len(given.images), -1)


GRAD_CAM = Peer(
    "grad-cam",
    load_grad_cam,
    (
        *(
            PeerMethod((method, f"{method}:layer={{layer}}"), partial(activation_map, name))
            for method, name in CLASSES.items()
        ),
        PeerMethod(("eigencam", "eigencam:layer={layer}"), principal_activation),
        PeerMethod(("scorecam",), partial(activation_map, "ScoreCAM")),
    ),
    usual=(*CLASSES, "eigencam"),
)


_LANGUAGE_MODELS = "lxt.efficient.models"
_ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU)


def load_lxt() -> Any:
    """Import lxt's patches without its language models, which fail to import with other versions of transformers."""
    if "lxt.efficient.patches" not in sys.modules:
        importlib.import_module("lxt")
        unused = types.ModuleType(_LANGUAGE_MODELS)
        vars(unused)["get_default_map"] = None
        sys.modules[_LANGUAGE_MODELS] = unused
        try:
            with warnings.catch_warnings(action="ignore"):  # it warns that zennit is not installed
                importlib.import_module("lxt.efficient.patches")
        finally:
            del sys.modules[_LANGUAGE_MODELS]
    return sys.modules["lxt.efficient.patches"]


def relevance(attention: str, given: PeerInput) -> Tensor:
    """Relevance of the first block's tokens; ``attention`` names lxt's wrapper of the attention call."""
    patches, entering = load_lxt(), []

    def catch(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        entering.append(arguments[0].detach().requires_grad_())
        return (entering[0], *arguments[1:])

    with _patched(given.model, patches, getattr(patches, attention)), given.block(0).register_forward_pre_hook(catch):
        logits = given.model(given.images)
        chosen = logits.gather(1, given.target[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, entering)
    return given.patches((entering[0] * gradient).sum(dim=-1).detach())


@contextmanager
def _patched(model: nn.Module, patches: Any, wrap: Callable[..., Any]) -> Iterator[None]:
    """Apply lxt's rules to a model's norms, activations and fused attention calls inside the context.

    lxt itself patches classes permanently; here the same functions are set on instances and removed again.
    """
    fused = F.scaled_dot_product_attention
    wrapped = wrap(lambda _, *given, **options: fused(*given, **options))
    touched: list[nn.Module] = []
    F.scaled_dot_product_attention = lambda *given, **options: wrapped(None, *given, **options)
    try:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                vars(module)["forward"] = types.MethodType(patches.layer_norm_forward, module)
                touched.append(module)
            elif isinstance(module, _ACTIVATIONS):
                vars(module)["original_forward"] = module.forward
                vars(module)["forward"] = types.MethodType(patches.non_linear_forward, module)
                touched.append(module)
        yield
    finally:
        F.scaled_dot_product_attention = fused
        for module in touched:
            vars(module).pop("original_forward", None)
            del vars(module)["forward"]


LXT = Peer(
    "lxt",
    load_lxt,
    (
        PeerMethod(("attnlrp",), partial(relevance, "wrap_attention_forward")),
        PeerMethod(("decompx",), partial(relevance, "cp_wrap_attention_forward")),
    ),
    usual=("attnlrp", "decompx"),
    apart=True,
)


_PARENTS = ("pnpxai", "pnpxai.core", "pnpxai.explainers")


def load_pnpxai(name: str = "grad_x_input") -> Any:
    """Import one of pnpxai's explainers without the other imports of its packages: optuna, shap and gensim."""
    full = f"pnpxai.explainers.{name}"
    if full not in sys.modules:
        found = importlib.util.find_spec("pnpxai")
        if found is None or not found.submodule_search_locations:
            raise ImportError("No module named 'pnpxai'", name="pnpxai")
        before = {parent: sys.modules.get(parent) for parent in _PARENTS}
        for parent in _PARENTS:
            _open(parent, found.submodule_search_locations[0])
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(full)
        finally:
            for parent, module in before.items():
                sys.modules.pop(parent)
                if module is not None:
                    sys.modules[parent] = module
    return sys.modules[full]


def _open(name: str, root: str) -> None:
    """Register an empty package whose submodules can be imported without running its ``__init__``."""
    package = types.ModuleType(name)
    package.__path__ = ["/".join([root, *name.split(".")[1:]])]
    sys.modules[name] = package


def input_x_gradient_by_pnpxai(given: PeerInput, layer: int) -> Tensor:
    """Token x gradient at a block's input, which is the output of the block below."""
    explainer = load_pnpxai("grad_x_input").GradientXInput(given.model, layer=given.previous_block(layer))
    return given.patches(explainer.attribute(given.images, given.target).sum(dim=-1))


def integrated_gradients_by_pnpxai(given: PeerInput, steps: int) -> Tensor:
    """Integrated gradients over pixels, all steps in one batch."""
    explainer = load_pnpxai("integrated_gradients").IntegratedGradients(given.model, n_steps=steps)
    attributions = explainer.attribute(given.images, given.target)
    return patch_sums(attributions.detach().sum(dim=1), given.layout.grid, given.layout.geometry).flatten(1)


def rollout(given: PeerInput) -> Tensor:
    """Attention rollout with the mean over heads and nothing discarded."""
    module = load_pnpxai("attention_rollout")
    explainer = module.AttentionRollout(given.model, head_fusion_method="mean", discard_ratio=0.0)
    matrices = explainer.collect_attention_map(given.images, given.target)
    return given.patches(explainer.rollout(*matrices)[:, 0])


PNPXAI = Peer(
    "pnpxai",
    load_pnpxai,
    (
        PeerMethod(("ixg:layer={layer}",), input_x_gradient_by_pnpxai),
        PeerMethod(("integrated_gradients:steps={steps}",), integrated_gradients_by_pnpxai),
        PeerMethod(("rollout",), rollout),
    ),
    usual=("ixg:layer=6", "integrated_gradients:steps=10", "rollout"),
    apart=True,
)


def load_quantus() -> Any:
    """Import quantus."""
    with warnings.catch_warnings(action="ignore"):
        import quantus  # noqa: PLC0415 - only with --peers

    return quantus


def input_x_gradient_by_quantus(given: PeerInput, layer: int) -> Tensor:
    """Token x gradient at a block's input, which is the output of the block below."""
    attributions = load_quantus().explain(
        given.model,
        given.images,
        given.target,
        method="LayerGradientXActivation",
        xai_lib_kwargs={"layer": given.previous_block(layer)},
        reduce_axes=(),
        device=str(given.images.device),
    )
    return given.patches(torch.from_numpy(attributions).sum(dim=-1))


def integrated_gradients_by_quantus(given: PeerInput) -> Tensor:
    """Integrated gradients over pixels; quantus always uses the trapezoidal rule with ten steps."""
    attributions = load_quantus().explain(
        given.model,
        given.images,
        given.target,
        method="IntegratedGradients",
        device=str(given.images.device),
    )
    return patch_sums(torch.from_numpy(attributions).sum(dim=1), given.layout.grid, given.layout.geometry).flatten(1)


QUANTUS = Peer(
    "quantus",
    load_quantus,
    (
        PeerMethod(("ixg:layer={layer}",), input_x_gradient_by_quantus),
        PeerMethod(("integrated_gradients:steps=10",), integrated_gradients_by_quantus),
    ),
    usual=("ixg:layer=6", "integrated_gradients:steps=10"),
    apart=True,
)


__all__ = ["PEERS", "Peer", "PeerInput", "PeerMethod", "find_peers", "usual_spellings"]

PEERS = {peer.name: peer for peer in (CAPTUM, GRAD_CAM, LXT, PNPXAI, QUANTUS)}
ALL = "all"


def find_peers(names: Sequence[str]) -> list[Peer]:
    """Return the peers by name, or ``all`` of them; with ``all``, a missing one is reported in its rows.

    Raises:
        InputError: there is no such peer.
        MissingDependencyError: a named peer cannot be imported, or none can.
    """
    unknown = [name for name in names if name not in PEERS and name != ALL]
    if unknown:
        raise InputError(f"there is no peer {unknown[0]!r}: choose from {', '.join(PEERS)}, or {ALL}")
    chosen = list(PEERS.values()) if ALL in names else [PEERS[name] for name in dict.fromkeys(names)]
    missing = [peer for peer in chosen if peer.problem]
    if missing and (ALL not in names or len(missing) == len(chosen)):
        raise MissingDependencyError(f"{missing[0].name}: {missing[0].problem}; {missing[0].installation}")
    return chosen


def usual_spellings(peers: Sequence[Peer]) -> list[str]:
    """Return the default spellings of these peers, without duplicates."""
    return list(dict.fromkeys(spelling for peer in peers for spelling in peer.usual))
