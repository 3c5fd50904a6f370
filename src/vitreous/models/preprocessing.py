"""Preprocessing: resize, centre crop and normalisation, as plain data."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, get_args

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from vitreous._utils.messages import short_repr
from vitreous.errors import InputError, ModelError
from vitreous.inputs.images import MAX_PIXELS
from vitreous.inputs.patch_geometry import Frame
from vitreous.inputs.volumes import Axes, VolumeWindow, read_volume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

Resize = Literal["shorter", "squash"]
CropRounding = Literal["nearest", "down"]
Triple = tuple[float, float, float]

# Image processors with one of these settings do something that Preprocessing cannot express.
_FOREIGN_SETTINGS = ("crop_pct", "do_flip_channel_order", "max_num_patches", "do_pad")


@dataclass(frozen=True)
class Preprocessing:
    """Resize, centre crop and normalise images for one model.

    Attributes:
        image_size: Height and width of the model's input.
        mean: Mean of the three channels, in units of the rescaled pixels.
        std: Standard deviation of the three channels.
        interpolation: Pillow's name of the resampling filter, in lower case.
        resize: ``shorter`` keeps the aspect ratio and fits the shorter edge; ``squash`` ignores the aspect ratio.
        resize_size: Size to resize to before the centre crop; the image size by default.
        rescale: Factor on the 0..255 pixels.
        crop_rounding: Rounding of an odd margin: timm rounds to the nearest even offset, transformers rounds down.
    """

    image_size: tuple[int, int]
    mean: Triple
    std: Triple
    interpolation: str = "bicubic"
    resize: Resize = "shorter"
    resize_size: tuple[int, int] | None = None
    rescale: float = 1 / 255
    crop_rounding: CropRounding = "nearest"

    def __post_init__(self) -> None:
        sizes = [self.image_size] if self.resize_size is None else [self.image_size, self.resize_size]
        for size in sizes:
            as_image_size(size)
        _triple("mean", self.mean)
        _positive_triple("std", self.std)
        if not isinstance(self.interpolation, str) or self.interpolation.upper() not in Image.Resampling.__members__:
            raise ModelError(f"the interpolation {short_repr(self.interpolation)} is not one of Pillow's")
        if self.resize not in get_args(Resize) or self.crop_rounding not in get_args(CropRounding):
            raise ModelError(
                f"resize={short_repr(self.resize)} or crop_rounding={short_repr(self.crop_rounding)} is not known"
            )
        if not math.isfinite(self.rescale) or self.rescale <= 0:
            raise ModelError(f"the factor on the pixels must be positive, not {short_repr(self.rescale)}")

    @property
    def channels(self) -> int:
        """Channels of the model's input."""
        return len(self.mean)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input of the model, (3, height, width)."""
        return (self.channels, *self.image_size)

    def __call__(self, images: Sequence[Any]) -> Tensor:
        """Return the model's input for these images (PIL): float32, (batch, 3, height, width)."""
        if not images:
            raise InputError("no images were given")
        pixels = np.stack([np.asarray(self.displayed(image)) for image in images])
        channels_first = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
        mean, std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return ((channels_first * self.rescale - mean) / std).contiguous()

    def displayed(self, image: Image.Image) -> Image.Image:
        """Return the image resized and cropped as the model sees it."""
        if min(image.size) < 1:
            raise InputError(f"an image of {image.width} x {image.height} pixels has no content")
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return self._fitted(rgb, Image.Resampling[self.interpolation.upper()])

    def displayed_mask(self, mask: NDArray[np.integer[Any]], *, outside: int) -> NDArray[np.int16]:
        """Return a mask (height, width) resized and cropped like its image, with nearest-neighbour interpolation.

        Args:
            mask: One integer per pixel of the image.
            outside: The value of pixels that the crop adds around a smaller image.
        """
        # Pillow pads with 0.
        fitted = self._fitted(Image.fromarray(mask.astype(np.int32) - outside), Image.Resampling.NEAREST)
        return (np.asarray(fitted) + outside).astype(np.int16)

    def _fitted(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        """Resize and crop an image of any mode."""
        height, width = self._resized(image.height, image.width)
        if height * width > MAX_PIXELS:  # a long strip, whose shorter edge is enlarged
            raise InputError(
                f"an image of {image.width} x {image.height} pixels would be {width} x {height} for this model, refused"
            )
        resized = image.resize((width, height), resampling)
        top, left = self._corner(height, width)
        return resized.crop((left, top, left + self.image_size[1], top + self.image_size[0]))

    def frame(self, size: tuple[int, int]) -> Frame:
        """Return the part of an image of this height and width that the model sees, in pixels of the image."""
        height, width = self._resized(*size)
        top, left = self._corner(height, width)
        down, across = size[0] / height, size[1] / width
        bottom, right = top + self.image_size[0], left + self.image_size[1]
        return Frame(size, top * down, left * across, bottom * down, right * across)

    def override(
        self,
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        image_size: int | Sequence[int] | None = None,
    ) -> Preprocessing:
        """Return a copy with another normalisation (one number or three) or image size."""
        changed = self
        if mean is not None:
            changed = replace(changed, mean=_triple("mean", mean))
        if std is not None:
            changed = replace(changed, std=_positive_triple("std", std))
        if image_size is not None:
            size = as_image_size(image_size)
            changed = replace(changed, image_size=size, resize_size=self._before_crop(size))
        return changed

    def _before_crop(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the ``resize_size`` that keeps the ratio of crop to image for another image size."""
        before = self.resize_size or self.image_size
        scaled = [round(new * wide / old) for new, wide, old in zip(size, before, self.image_size, strict=True)]
        return scaled[0], scaled[1]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after the resize, before the crop."""
        target_height, target_width = self.resize_size or self.image_size
        if self.resize == "squash":
            return target_height, target_width
        if target_height == target_width:  # torchvision and transformers truncate the longer edge
            if height <= width:
                return target_height, int(target_height * width / height)
            return int(target_width * height / width), target_width
        ratio = min(height / target_height, width / target_width)
        return round(height / ratio), round(width / ratio)

    def _corner(self, height: int, width: int) -> tuple[int, int]:
        """Return the top left corner of the centre crop in the resized image."""
        return self._offset(height, self.image_size[0]), self._offset(width, self.image_size[1])

    def _offset(self, have: int, want: int) -> int:
        """Return the start of the centre crop; negative if the image is smaller and gets a black border."""
        half = (have - want) / 2
        return round(half) if self.crop_rounding == "nearest" and half > 0 else int(half)


@dataclass(frozen=True)
class VolumePreprocessing(Preprocessing):
    """Resize and normalise volumes or clips for one 3-D model.

    Of a clip, ``depth`` frames evenly spread over it are taken, and each is treated as an image. A volume is resized to
    depth, height and width, trilinearly. Both have values from 0 to 1 before the normalisation, unless a volume is read
    without a window.

    Attributes:
        depth: Slices of the model's input, or frames.
        clip: Whether the model takes clips, which have three channels, rather than volumes.
        scan_channels: Channels of a volume.
        frames_first: Whether its input is (batch, depth, channels, height, width), as VideoMAE's and ViViT's is, rather
            than (batch, channels, depth, height, width).
        window: How the values of a volume become 0 to 1, see ``vitreous.integrations.medical.read_volume``.
        axes: Of NIfTI files, see there.

    Examples:
        >>> from vitreous.models import VolumePreprocessing
        >>> of_scans = VolumePreprocessing((96, 96), (0.0,) * 3, (1.0,) * 3, depth=96, window=(40.0, 400.0))
        >>> of_scans.input_shape
        (1, 96, 96, 96)
    """

    depth: int = 16
    clip: bool = False
    scan_channels: int = 1
    frames_first: bool = False
    window: VolumeWindow = None
    axes: Axes = "xyz"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 1 or not 1 <= self.scan_channels <= 3:
            raise ModelError(
                f"a 3-D model takes one slice or more and one to three channels, not {self.depth} and "
                f"{self.scan_channels}"
            )

    @property
    def channels(self) -> int:
        """Channels of the model's input."""
        return 3 if self.clip else self.scan_channels

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input of the model, with its channels or its depth first."""
        first = (self.depth, self.channels) if self.frames_first else (self.channels, self.depth)
        return (*first, *self.image_size)

    def override(
        self,
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        image_size: int | Sequence[int] | None = None,
    ) -> VolumePreprocessing:
        """Return a copy with another normalisation, or another size: depth, height and width, or the last two."""
        volume = as_volume_size(image_size)
        changed = super().override(mean=mean, std=std, image_size=image_size if volume is None else volume[1:])
        assert isinstance(changed, VolumePreprocessing)
        return changed if volume is None else replace(changed, depth=volume[0])

    def __call__(self, images: Sequence[Any]) -> Tensor:
        """Return the model's input for volumes: files, folders of frames, or tensors (channels, depth, height, width).

        Raises:
            InputError: One is something else, or has other channels.
            ImageError: A file cannot be read.
        """
        if not images:
            raise InputError("no volumes were given")
        volumes = torch.stack([self._fitted_volume(self.read(each)) for each in images])
        return (volumes.transpose(1, 2) if self.frames_first else volumes).contiguous()

    def read(self, source: Any) -> Tensor:
        """Read a volume or clip, (channels, depth, height, width), before it is resized.

        Raises:
            InputError: It is something else, or has other channels.
            ImageError: The file cannot be read.
        """
        if isinstance(source, str | os.PathLike):
            volume = read_volume(source, window=self.window, axes=self.axes)[0]
        else:
            volume = source if isinstance(source, torch.Tensor) else torch.empty(0)
        if volume.dim() != 4 or not volume.is_floating_point():
            raise InputError(
                "this model takes volumes or clips: give files or folders of frames, tensors (channels, depth, height, "
                f"width), or one preprocessed batch, not {type(source).__name__}"
            )
        if volume.shape[0] == 1 and self.channels > 1:
            volume = volume.expand(self.channels, -1, -1, -1)  # grey
        if volume.shape[0] != self.channels:
            raise InputError(f"the volume has {volume.shape[0]} channels, but the model takes {self.channels}")
        return volume

    def _fitted_volume(self, volume: Tensor) -> Tensor:
        """Resize and normalise one volume, (channels, depth, height, width)."""
        if self.clip:
            numbers = torch.linspace(0, volume.shape[1] - 1, self.depth).round().long()
            pixels = (volume[:, numbers] * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).numpy()
            return super().__call__([Image.fromarray(frame) for frame in pixels]).transpose(0, 1)
        size = [self.depth, *self.image_size]
        if list(volume.shape[1:]) != size:
            volume = functional.interpolate(volume[None], size=size, mode="trilinear", align_corners=False)[0]
        mean, std = (
            torch.tensor(values[: self.channels], dtype=torch.float32).view(-1, 1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (volume.float() * (255 * self.rescale) - mean) / std


def from_timm(model: nn.Module, image_size: tuple[int, int] | None = None) -> Preprocessing:
    """Read the evaluation preprocessing of a timm model."""
    from timm.data.config import resolve_data_config  # noqa: PLC0415  (timm takes a second to import)

    arguments = {"input_size": (3, *image_size)} if image_size else {}
    return _from_timm_settings(resolve_data_config(arguments, model=model))  # type: ignore[no-untyped-call]


def _from_timm_settings(config: Mapping[str, Any]) -> Preprocessing:
    size = as_image_size(config["input_size"][-2:])
    mode = config["crop_mode"]
    if mode not in ("center", "squash"):
        raise ModelError(f"the model's crop mode {short_repr(mode)} is not supported, only 'center' and 'squash'")
    before_crop = tuple(math.floor(edge / config["crop_pct"]) for edge in size)
    interpolation = config["interpolation"]
    if mode == "center" and before_crop[0] != before_crop[1]:
        interpolation = "bilinear"  # timm's own transform ignores the setting here
    return Preprocessing(
        image_size=size,
        mean=_triple("mean", config["mean"]),
        std=_positive_triple("std", config["std"]),
        interpolation=interpolation,
        resize="squash" if mode == "squash" else "shorter",
        resize_size=(before_crop[0], before_crop[1]),
    )


def from_torchvision(preset: Any) -> Preprocessing:
    """Read the transforms of torchvision weights (``weights.transforms()``)."""
    sizes = (preset.crop_size, preset.resize_size)  # a number, alone or in a list, or height and width
    crop, before_crop = (size if isinstance(size, int) or len(size) == 2 else size[0] for size in sizes)
    return Preprocessing(
        image_size=as_image_size(crop),
        mean=_triple("mean", preset.mean),
        std=_positive_triple("std", preset.std),
        interpolation=preset.interpolation.value,
        resize="shorter" if isinstance(before_crop, int) else "squash",
        resize_size=as_image_size(before_crop),
    )


def from_processor(settings: Mapping[str, Any], fallback_size: tuple[int, int]) -> Preprocessing:
    """Read the settings of a transformers image processor (its ``to_dict()``).

    Args:
        settings: The processor's settings.
        fallback_size: The size to resize to if the processor does not resize.
    """
    if "data_config" in settings:  # a timm model inside transformers has timm's settings
        return _from_timm_settings(settings["data_config"])
    foreign = [name for name in _FOREIGN_SETTINGS if settings.get(name)]
    if foreign:
        raise ModelError(f"the image processor's setting {foreign[0]!r} is not supported")
    resize: Resize = "squash"
    before_crop = fallback_size
    if settings.get("do_resize", True):
        resize, before_crop = _processor_resize(settings.get("size") or {})
    crop = settings.get("crop_size") if settings.get("do_center_crop") else None
    normalised = settings.get("do_normalize", True)
    return Preprocessing(
        image_size=_edges(crop) if crop else before_crop,
        mean=_triple("mean", settings["image_mean"]) if normalised else (0.0, 0.0, 0.0),
        std=_positive_triple("std", settings["image_std"]) if normalised else (1.0, 1.0, 1.0),
        interpolation=Image.Resampling(int(settings.get("resample") or 0)).name.lower(),
        resize=resize,
        resize_size=before_crop,
        rescale=float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0,
        crop_rounding="down",
    )


def from_video_processor(settings: Mapping[str, Any], config: Any) -> VolumePreprocessing:
    """Read the settings of a transformers processor of clips and the configuration of its model.

    ViViT's processor subtracts 1 after its factor on the pixels (``offset``).
    """
    known = dict(settings)
    if known.pop("offset", False) and known.get("do_rescale", True):
        if known.get("do_normalize", True):
            known["image_mean"] = [mean + 1 for mean in known["image_mean"]]
        else:
            known |= {"do_normalize": True, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}
    frame = from_processor(known, as_image_size(config.image_size))
    frames = int(getattr(config, "num_frames", None) or config.frames_per_clip)
    return VolumePreprocessing(**vars(frame), depth=frames, clip=True, frames_first=True)


def as_volume_size(value: Any) -> tuple[int, int, int] | None:
    """Return (depth, height, width) from three integers; None for anything else, such as an image size."""
    try:
        lengths = [operator.index(length) for length in value] if isinstance(value, Iterable) else []
    except TypeError:
        return None
    if len(lengths) != 3:
        return None
    if min(lengths) < 1 or math.prod(lengths) > MAX_PIXELS:
        raise ModelError(f"the size of a volume is three numbers above 0 and {MAX_PIXELS:,} voxels at most")
    return lengths[0], lengths[1], lengths[2]


def as_image_size(value: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, int]:
    """Return (height, width) from one integer or two, of any integer type."""
    try:
        edges = [operator.index(edge) for edge in (value if isinstance(value, Iterable) else (value, value))]
    except TypeError:
        edges = []
    if len(edges) != 2 or min(edges) < 1:
        raise ModelError(f"an image size is one positive number or height and width, not {short_repr(value)}")
    if edges[0] * edges[1] > MAX_PIXELS:
        raise ModelError(f"an image size of {edges[0]} x {edges[1]} is more than {MAX_PIXELS:,} pixels")
    return edges[0], edges[1]


def check_patches(name: str, size: tuple[int, int], patch: tuple[int, int]) -> None:
    """Check that the image size is a multiple of the patch size.

    Raises:
        ModelError: It is not; the message names the nearest valid sizes.
    """
    edges = list(zip(size, patch, strict=True))
    if not any(edge % side for edge, side in edges):
        return
    below, above = ([max(1, round_(edge / side)) * side for edge, side in edges] for round_ in (math.floor, math.ceil))
    nearest = " or ".join(dict.fromkeys(f"{height} x {width}" for height, width in (below, above)))
    raise ModelError(f"{name}: an image size must be a multiple of the patch size {patch[0]}, such as {nearest}")


def _processor_resize(size: Mapping[str, int]) -> tuple[Resize, tuple[int, int]]:
    given = {name: value for name, value in size.items() if value is not None}
    if set(given) == {"shortest_edge"}:
        return "shorter", as_image_size(given["shortest_edge"])
    if set(given) == {"height", "width"}:
        return "squash", _edges(given)
    raise ModelError(f"the image processor's size {short_repr(dict(given))} is not supported")


def _edges(size: Mapping[str, int]) -> tuple[int, int]:
    return as_image_size((size["height"], size["width"]))


def _triple(name: str, value: float | Sequence[float]) -> Triple:
    """Return three numbers from one or three, of any numeric type."""
    try:
        values = np.asarray(value, dtype=np.float64).reshape(-1).tolist()
    except (TypeError, ValueError):
        values = []
    if len(values) == 1:
        values *= 3
    if len(values) != 3 or not all(map(math.isfinite, values)):
        raise ModelError(f"{name} takes one finite number or three, not {short_repr(value)}")
    return values[0], values[1], values[2]


def _positive_triple(name: str, value: float | Sequence[float]) -> Triple:
    values = _triple(name, value)
    if min(values) <= 0:
        raise ModelError(f"{name} must be positive, not {short_repr(value)}")
    return values
