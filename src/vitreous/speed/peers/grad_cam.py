"""pytorch-grad-cam (the package grad-cam): class activation maps at a block's first norm."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.speed.peers.peer import Peer, PeerInput, PeerMethod

CLASSES = {
    "gradcam": "GradCAM",
    "gradcampp": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "gradcam_elementwise": "GradCAMElementWise",
}


def load() -> Any:
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
    with getattr(load(), name)(given.model, [given.first_norm(layer)], reshape_transform=given.as_grid) as cam:
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
    load,
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
