"""The caller's images as the input tensor of a model, and as images for display.

For display, files and arrays are unchanged, and tensors have their normalisation undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitreous._utils.messages import errors_as
from vitreous._utils.torch_state import is_meta, special_kind
from vitreous.errors import InputError, ModelError
from vitreous.inputs.images import Source, read_image
from vitreous.models import LoadedModel, load_model
from vitreous.models.loading import Pair, infer_preprocessing, model_with_processor
from vitreous.models.preprocessing import Preprocessing, VolumePreprocessing

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
    if isinstance(model.preprocessing, VolumePreprocessing):
        return _placed(model.preprocessing(given), network), None
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


Drawable = Source | Tensor
Photo = Image.Image | str | Path
Channels = float | Sequence[float]

STRETCHED = (
    "Drawn on the normalised input tensor, stretched from its smallest to its largest value: these are not the colours "
    "of the photo."
)
UNDONE = "Drawn on the input tensor, with the mean and std of the model's preprocessing undone."
ADVICE = "Pass the picture, or a tensor with its mean and std, as image= to draw on that."
_AVERAGED = " Its {} channels are averaged."

# How far a tensor may leave [0, 1] when its normalisation is undone: half a step of 8 bits is lost when bfloat16 rounds
# values near 2, and a photo that was resized as a tensor by bicubic interpolation overshoots by some percent.
_OVERSHOOT = 0.1


class DisplayImages(NamedTuple):
    """Images of a batch.

    Attributes:
        images: One RGB image per image of the batch.
        note: A sentence on what they are, unless they are photos as given.
    """

    images: tuple[Image.Image, ...]
    note: str | None = None


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of pixels in [0, 1]: (full x pixel - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    full: float = 1.0

    @classmethod
    def given(cls, mean: Channels | None, std: Channels | None) -> Normalisation | None:
        """Check the mean and std of a caller; ``None`` without them.

        Raises:
            InputError: They are not one number or one per channel.
        """
        if mean is None and std is None:
            return None
        if mean is None or std is None:
            raise InputError("mean and std belong together: pass both, one number or one for each channel")
        found = cls(_numbers("mean", mean), _numbers("std", std))
        if min(found.std) <= 0:
            raise InputError(f"std must be positive, not {std}")
        return found

    @classmethod
    def of(cls, preprocessing: Preprocessing | None) -> Normalisation | None:
        """Read the normalisation from a model's preprocessing, if known."""
        if preprocessing is None:
            return None
        channels = preprocessing.channels
        return cls(preprocessing.mean[:channels], preprocessing.std[:channels], 255 * preprocessing.rescale)

    def undo(self, pixels: Tensor) -> Tensor:
        """Undo the normalisation of pixels (batch, channels, height, width), or of volumes.

        Raises:
            InputError: The number of channels differs.
        """
        ones = [1] * (pixels.dim() - 2)
        mean, std = (pixels.new_tensor(values).view(1, -1, *ones) for values in (self.mean, self.std))
        if any(values.shape[1] not in (1, pixels.shape[1]) for values in (mean, std)):
            raise InputError(f"mean and std must be one number or one for each of the {pixels.shape[1]} channels")
        return (pixels * std + mean) / self.full


def display_images(pixels: Tensor, preprocessing: Preprocessing | None) -> DisplayImages:
    """Convert a model's input tensor (batch, channels, height, width) to images.

    Of volumes and clips, (batch, channels, depth, height, width), one image each has all slices, one below the other.
    The normalisation of the model's preprocessing is undone if it is known and fits the values; otherwise each image is
    stretched from its smallest to its largest value.
    """
    known = Normalisation.of(preprocessing)
    if (
        known is not None
        and pixels.shape[1] == len(known.mean)
        and all(_fits(known.undo(one)) for one in _each(pixels))
    ):
        return DisplayImages(_pictures(map(known.undo, _each(pixels))), UNDONE)
    return _as_they_are(pixels)


def given_pictures(
    images: Drawable | Iterable[Drawable], count: int, mean: Channels | None = None, std: Channels | None = None
) -> DisplayImages:
    """Convert the images of a caller, which maps are drawn on.

    Args:
        images: One picture for each image: a tensor (batch, channels, height, width), or a list of photos, uint8
            arrays, arrays in [0, 1] (height, width, channels) and tensors (channels, height, width); for one image also
            without the list. Of volumes a tensor (batch, channels, depth, height, width).
        count: How many images there are.
        mean: What was subtracted from pixels in [0, 1] to make a tensor, one number or one for each channel.
        std: What they were divided by.

    Raises:
        InputError: They are something else, or their number differs.
    """
    normalisation = Normalisation.given(mean, std)
    listed = _listed(images, count)
    if len(listed) != count:
        raise InputError(f"{count} image{'s are' if count > 1 else ' is'} explained, but {len(listed)} were given")
    drawn = [_given(image, normalisation) for image in listed]
    notes = dict.fromkeys(one.note for one in drawn if one.note)
    return DisplayImages(tuple(image for one in drawn for image in one.images), " ".join(notes) or None)


def _listed(images: Any, count: int) -> list[Any]:
    """Split into images; anything but a list or batch is a single image."""
    if isinstance(images, Tensor | np.ndarray):
        return list(images) if images.ndim in {4, 5} else [images]
    if isinstance(images, list | tuple):
        return list(images)
    return [images] if count == 1 or not isinstance(images, Iterable) or isinstance(images, str) else list(images)


def _given(image: Any, normalisation: Normalisation | None) -> DisplayImages:
    if isinstance(image, np.ndarray) and image.dtype.kind == "f" and image.ndim in (2, 3):
        # Arrays have their channels last, as matplotlib and Pillow do.
        image = torch.from_numpy(np.ascontiguousarray(image if image.ndim == 3 else image[..., None])).permute(2, 0, 1)
    if isinstance(image, Tensor):
        return _given_tensor(image, normalisation)
    if normalisation is not None:
        raise InputError("mean and std undo the normalisation of a tensor: omit them for an image or uint8 array")
    return DisplayImages((read_image(image),))


def _given_tensor(image: Tensor, normalisation: Normalisation | None) -> DisplayImages:
    if image.ndim not in {3, 4} or 0 in image.shape:
        raise InputError(f"a tensor to draw on has the shape (channels, height, width), not {tuple(image.shape)}")
    if image.dtype == torch.uint8 and normalisation is None:
        return DisplayImages(_pictures([image[None].float().cpu() / 255]))
    if not image.is_floating_point() or not bool(image.isfinite().all()):
        raise InputError("a tensor to draw on holds uint8 pixels, or floating point ones that are finite")
    if normalisation is None:
        return _as_they_are(image[None])
    return DisplayImages(_pictures(map(normalisation.undo, _each(image[None]))))


def _as_they_are(pixels: Tensor) -> DisplayImages:
    """Keep values in [0, 1] as they are, and stretch others."""
    channels = pixels.shape[1]
    averaged = "" if channels in (1, 3) else _AVERAGED.format(channels)
    ranges = [torch.aminmax(one) for one in _each(pixels)]
    if all(bool(low >= 0) and bool(high <= 1) for low, high in ranges):
        return DisplayImages(_pictures(_each(pixels)), averaged.strip() or None)
    stretched = (
        (one - low) / (1 if high == low else high - low) for one, (low, high) in zip(_each(pixels), ranges, strict=True)
    )
    return DisplayImages(_pictures(stretched), STRETCHED + averaged)


def _each(pixels: Tensor) -> Iterator[Tensor]:
    """Yield the images of a batch one by one, (1, channels, ...), so that no large batch is copied."""
    for image in torch.split(pixels.detach(), 1):
        yield image.float().cpu()


def _fits(pixels: Tensor) -> bool:
    low, high = torch.aminmax(pixels)
    return bool(low >= -_OVERSHOOT) and bool(high <= 1 + _OVERSHOOT)


def _pictures(images: Iterable[Tensor]) -> tuple[Image.Image, ...]:
    """Convert pixels in [0, 1], (1, channels, height, width), to images; without three channels they are grey."""
    return tuple(map(_picture, images))


def _picture(pixels: Tensor) -> Image.Image:
    if pixels.dim() == 5:  # slices or frames one below the other
        pixels = pixels.flatten(2, 3)
    colours = pixels if pixels.shape[1] == 3 else pixels.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    bytes_ = (colours * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return Image.fromarray(bytes_[0].numpy())


def _numbers(name: str, values: Channels) -> tuple[float, ...]:
    try:
        found = torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        found = []
    if not found or not np.isfinite(found).all():
        raise InputError(f"{name} must be one number or one for each channel, not {values!r}")
    return tuple(found)
