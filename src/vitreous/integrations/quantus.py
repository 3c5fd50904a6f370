"""Methods as an ``explain_func`` of quantus. ``vitreous.evaluate_maps`` runs our protocols on given maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitreous.api.explain import explain, find_recipes
from vitreous.errors import InputError
from vitreous.integrations.maps import Spread, pixel_maps

__all__ = ["explain_func"]


def explain_func(
    model: nn.Module,
    inputs: NDArray[Any] | Tensor,
    targets: NDArray[Any] | Tensor | int | None = None,
    method: str = "tokentm",
    *,
    spread: Spread = "value",
    device: str | torch.device | None = None,
    channel_first: bool = True,
    **options: Any,
) -> NDArray[Any]:
    """Explain images with the signature of a quantus ``explain_func``: numpy in, numpy out.

    Args:
        model: the network, or quantus' wrapper of it.
        inputs: images (batch, channel, height, width), preprocessed.
        targets: one class per image; ``None`` for the predicted ones.
        method: spelling of the method; ``quantus.evaluate`` passes the key in ``xai_methods``.
        spread: how scores of patches become scores of pixels: ``value``: repeated; ``share``: divided equally;
            ``smooth``: interpolated, see ``vitreous.integrations.maps.pixel_maps``.
        device: device to run on; the model's own by default. quantus always passes one.
        channel_first: must be true: Vision Transformers of torch take channels first.
        **options: options of ``vitreous.explain``, such as ``outputs`` or ``stage``.

    Returns:
        Scores of pixels, (batch, 1, height, width).

    Examples:
        >>> import numpy as np
        >>> from vitreous.integrations.quantus import explain_func
        >>> explain_func(model, images.numpy(), np.array([3]), method="gae").shape
        (1, 1, 32, 32)
    """
    if not channel_first:
        raise InputError("channel_first=False is not supported: images are (batch, channel, height, width)")
    network: Any = model
    if hasattr(model, "get_model"):
        network = network.get_model()
    images = torch.as_tensor(inputs)
    if images.dim() == 3:
        images = images[None]
    if device is not None:
        images, network = images.to(device), network.to(device)
    classes = None if targets is None else torch.as_tensor(targets).reshape(-1).to(torch.int64)
    if classes is not None and len(classes) == 1:
        classes = classes.expand(len(images))
    (recipe,) = find_recipes(method)
    explanation = explain(network, images, recipe.spelling, classes, **options)
    found: NDArray[Any] = pixel_maps(explanation, recipe.spelling, spread)[:, None].cpu().numpy()
    return found.astype(np.float64 if found.dtype == np.float64 else np.float32)
