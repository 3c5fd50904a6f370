"""Convert the caller's images to the input tensor of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitreous._utils.messages import errors_as
from vitreous._utils.tensors import is_meta, special_kind
from vitreous.errors import InputError, ModelError
from vitreous.inputs.images import read_image
from vitreous.models import LoadedModel, load_model
from vitreous.models.wrap_model import Pair, infer_preprocessing, model_with_processor

Picture = Image.Image | str | Path | NDArray[np.uint8]
Images = Tensor | Sequence[Picture] | Picture
Model = nn.Module | LoadedModel | str | Pair


def find_model(model: Model, images: Images | None) -> LoadedModel | nn.Module:
    """Resolve a model argument; preprocessing is attached if the images need it and it is known."""
    if isinstance(model, str):
        return load_model(model)
    if isinstance(model, tuple):
        return model_with_processor(model)
    if isinstance(model, LoadedModel) or isinstance(images, Tensor):  # a tensor is already preprocessed
        return model
    return infer_preprocessing(model) or model


def find_pixels(
    model: LoadedModel | nn.Module, network: nn.Module, images: Images
) -> tuple[Tensor, tuple[Image.Image, ...] | None]:
    """Return the model's input and, unless a tensor was given, the images as the model sees them.

    Raises:
        InputError: the images are not a valid input of the model.
        ImageError: an image cannot be read.
        ModelError: the model's weights are on the meta device.
    """
    if any(map(is_meta, (*network.parameters(), *network.buffers()))):
        raise ModelError(f"the weights of {type(network).__name__} are on the device meta, which holds no numbers")
    with errors_as(InputError, "the images cannot be read"):
        return _find_pixels(model, network, images)


def _find_pixels(
    model: LoadedModel | nn.Module, network: nn.Module, images: Images
) -> tuple[Tensor, tuple[Image.Image, ...] | None]:
    if isinstance(images, Tensor):
        _check(images)
        return _placed(images, network), None
    one = isinstance(images, Image.Image | str | Path) or (isinstance(images, np.ndarray) and images.ndim < 4)
    one = one or hasattr(images, "read")  # an open file, which is iterable by lines
    given: Any = [images] if one else images
    if not isinstance(given, Iterable):
        raise InputError(f"images must be a tensor, PIL images, arrays or paths, not {type(images).__name__}")
    if not isinstance(model, LoadedModel):
        raise InputError(
            "image files and PIL images need a model with known preprocessing: a name, a timm model, or a pair of a "
            "model and its image processor; with any other, give a preprocessed tensor (batch, 3, height, width)"
        )
    given = list(given)
    if any(isinstance(picture, Tensor) for picture in given):
        raise InputError("tensors are given as one, (batch, 3, height, width), not as a list: torch.stack joins them")
    if not given:
        raise InputError("no image was given")
    pictures = [read_image(picture) for picture in given]
    pixels = model.preprocessing(pictures)
    return _placed(pixels, network), tuple(model.preprocessing.displayed(picture) for picture in pictures)


def _check(images: Tensor) -> None:
    if (kind := special_kind(images)) is not None:
        raise InputError(f"images must be a plain tensor, not {kind} one")
    shape = tuple(images.shape)
    if images.dim() not in (4, 5):
        raise InputError(
            f"images must have shape (batch, 3, height, width), not {shape}; volumes (batch, channels, depth, height, "
            "width) and clips (batch, frames, channels, height, width)"
        )
    if 0 in shape:
        raise InputError(f"images of shape {shape} are empty")
    if not images.is_floating_point():
        raise InputError(f"images must be floating point and normalised, not {images.dtype}")
    if not bool(torch.isfinite(images).all()):
        raise InputError("images hold NaN or infinite pixels")


def _placed(pixels: Tensor, network: nn.Module) -> Tensor:
    """Move pixels to the device and dtype of the model; the number of channels is checked when it runs."""
    weight = next((weight for weight in network.parameters() if weight.is_floating_point()), None)
    return pixels if weight is None else pixels.to(weight.device, weight.dtype)
