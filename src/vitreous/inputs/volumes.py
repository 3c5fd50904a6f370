"""Read volumes and clips as tensors: NIfTI, DICOM, arrays of numpy, and folders of frames.

Not for diagnostic use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vitreous._utils.messages import errors_as, short_repr
from vitreous._utils.storage import expanded
from vitreous.errors import ImageError, InputError, MissingDependencyError
from vitreous.inputs.images import MAX_PIXELS, SUFFIXES, read_image

if TYPE_CHECKING:
    import os

Window = tuple[float, float] | Literal["file", "range"]
VolumeWindow = tuple[float, float] | Literal["range"] | None
Axes = Literal["xyz", "zyx"]
VOLUME_SUFFIXES = (".nii", ".nii.gz", ".npy", ".dcm", ".dicom")


def is_volume_file(name: str) -> bool:
    """Whether a file is a volume by the end of its name."""
    return name.lower().endswith(VOLUME_SUFFIXES)


def read_volume(
    file: str | os.PathLike[str],
    *,
    window: VolumeWindow = None,
    size: Sequence[int] | None = None,
    axes: Axes = "xyz",
) -> Tensor:
    """Read a volume or a clip as a tensor, as 3-D models take it.

    Args:
        file: ``.nii`` or ``.nii.gz``, brought into the directions right, anterior, superior; ``.npy``: (depth, height,
            width), with channels in front, or 8-bit (depth, height, width, channels) as libraries of videos give it;
            a folder of image files, the frames of a clip, ordered by the numbers in their names; anything else as
            DICOM, whose frames are taken in their order, in units of the modality. 8-bit values become 0 to 1.
        window: centre and width, which become 0 to 1, and values outside are cut off; ``"range"``: from the smallest to
            the largest value; ``None``: the values as they are.
        size: resize to these three lengths, trilinearly.
        axes: of NIfTI: ``xyz`` as MONAI's loaders give it, or ``zyx``: axial slices first. All others have their frames
            or slices first.

    Returns:
        (1, channels, depth, height, width) in float32; a clip has three channels, a scan one.

    Raises:
        ImageError: the file cannot be read as a volume.
        InputError: the window, size or axes are invalid.

    Examples:
        >>> from vitreous.integrations.medical import read_volume
        >>> volume = read_volume("brain.nii.gz", window="range", size=(4, 16, 16), axes="zyx")
        >>> volume.shape
        torch.Size([1, 1, 4, 16, 16])
    """
    place = expanded(Path(file))
    if axes not in {"xyz", "zyx"}:
        raise InputError(f"axes must be xyz or zyx, not {short_repr(axes)}")
    checked = None if window is None else checked_window(window)
    if checked == "file":
        raise InputError("window must be (centre, width), 'range' or None for a volume")
    lengths = None if size is None else [int(length) for length in size]
    if lengths is not None and (len(lengths) != 3 or min(lengths) < 1):
        raise InputError(f"size must be three lengths above 0, not {short_repr(size)}")
    with errors_as(ImageError, f"{place} cannot be read as a volume"):
        values = _values(place, axes)
        if checked is not None:
            low, high = float(values.min()), float(values.max())
            if not isinstance(checked, str):
                centre, width = checked
                low, high = centre - width / 2, centre + width / 2
            values = ((values - low) / (high - low if high > low else 1)).clip(0, 1)
        volume = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))[None]
    if lengths is None:
        return volume
    return functional.interpolate(volume, size=lengths, mode="trilinear", align_corners=False)


def _values(place: Path, axes: str) -> NDArray[Any]:
    """The values of a file or folder, (channels, depth, height, width)."""
    name = place.name.lower()
    if place.is_dir():
        return _frame_values(place)
    if name.endswith((".nii", ".nii.gz")):
        values = nifti_values(place)
        return (values.transpose(2, 1, 0) if axes == "zyx" else values)[None]
    return _array_values(place) if name.endswith(".npy") else _dicom_values(place)[None]


def _frame_values(folder: Path) -> NDArray[np.float32]:
    """The image files of a folder as frames, 0 to 1, (3, frames, height, width)."""
    files = frame_files(folder)
    if not files:
        raise ImageError(f"{folder} holds no image files, which would be the frames of a clip")
    frames = [np.asarray(read_image(file)) for file in files]
    if len({frame.shape for frame in frames}) > 1:
        raise ImageError(f"the frames in {folder} have different sizes")
    check_size(frames[0].shape[0] * frames[0].shape[1] * len(frames), folder)
    values: NDArray[np.float32] = np.stack(frames).transpose(3, 0, 1, 2).astype(np.float32)
    return values / np.float32(255)


def frame_files(folder: Path) -> list[Path]:
    """The image files of a folder, ordered by the numbers in their names: frame 2 comes before frame 10."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    return sorted(files, key=lambda file: [(int(n), "") if n.isdigit() else (-1, n) for n in _pieces(file.name)])


def _pieces(name: str) -> list[str]:
    return [piece for piece in re.split(r"(\d+)", name) if piece]


def _array_values(place: Path) -> NDArray[Any]:
    """An array of numpy as (channels, depth, height, width)."""
    values = np.load(place, mmap_mode="r", allow_pickle=False)
    if values.dtype.kind not in "iufb":
        raise ImageError(f"{place} holds {values.dtype} values: they must be real numbers")
    if values.ndim == 4 and values.dtype == np.uint8 and values.shape[-1] in {1, 3} and values.shape[0] not in {1, 3}:
        values = values.transpose(3, 0, 1, 2)
    elif values.ndim == 3:
        values = values[None]
    if values.ndim != 4 or 0 in values.shape:
        raise ImageError(
            f"{place} has shape {tuple(values.shape)}: a volume has (depth, height, width), or channels before them"
        )
    check_size(int(np.prod(values.shape[1:])), place)
    scale = 255 if values.dtype == np.uint8 else 1
    return check_finite(np.asarray(values, dtype=np.float64) / scale, place)


def nifti_values(place: Path) -> NDArray[np.float64]:
    """The values of a volume, (right, anterior, superior); a 2-D image is a volume of one slice."""
    nibabel = medical_package("nibabel")
    image = nibabel.as_closest_canonical(nibabel.load(place))
    shape = tuple(int(length) for length in image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) not in {2, 3} or 0 in shape:
        raise ImageError(f"{place} has shape {shape}: give one 3-D volume or 2-D image")
    if image.get_data_dtype().kind not in "iuf":
        raise ImageError(f"{place} holds {image.get_data_dtype()} values: they must be real numbers")
    check_size(int(np.prod(shape)), place)
    return check_finite(
        np.asarray(image.dataobj, dtype=np.float64).reshape(shape if len(shape) == 3 else (*shape, 1)), place
    )


def _dicom_values(place: Path) -> NDArray[np.float64]:
    """The values of all frames in units of the modality, (frame, row, column)."""
    dataset, stored, chosen = read_frames(place, None)
    if int(dataset.get("SamplesPerPixel", 1)) > 1 or str(dataset.PhotometricInterpretation) == "PALETTE COLOR":
        raise ImageError(f"{place} holds colours: a volume has one value per voxel")
    return check_finite(np.stack([modality_values(dataset, stored[frame], frame) for frame in chosen]), place)


def read_dataset(place: Path, **options: Any) -> Any:
    """The data set of a DICOM file; ``options`` are those of pydicom."""
    pydicom = medical_package("pydicom")
    try:
        return pydicom.dcmread(place, **options)
    except pydicom.errors.InvalidDicomError as error:
        raise ImageError(f"{place} is not a DICOM file: the DICM prefix of its header is missing") from error


def read_frames(place: Path, wanted: Sequence[int] | None) -> tuple[Any, NDArray[Any], list[int]]:
    """The data set of a file, the stored values of its frames, frame first, and which frames are read."""
    dataset = read_dataset(place)
    count = int(dataset.get("NumberOfFrames", 1) or 1)
    chosen = chosen_indices(wanted, count, "frame")
    check_size(int(dataset.Rows) * int(dataset.Columns) * len(chosen), place)
    _check_codec(dataset, place)
    stored = medical_package("pydicom").pixels.pixel_array(dataset)  # converts YBR to RGB
    return dataset, stored if count > 1 else stored[None], chosen


def check_finite(values: NDArray[np.float64], place: Path) -> NDArray[np.float64]:
    """The same values, all of which must be finite."""
    if not np.isfinite(values).all():
        raise ImageError(f"{place} holds values that are not finite (NaN or infinite)")
    return values


def _check_codec(dataset: Any, place: Path) -> None:
    """Say which package decompresses the pixels, where none is installed."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_encapsulated:
        return
    decoder = medical_package("pydicom").pixels.get_decoder(syntax)
    if not decoder.is_available:
        raise ImageError(
            f"{place} is compressed ({syntax.name}), and no installed package decompresses it: "
            'pip install "pylibjpeg[all]", or convert the file to an uncompressed transfer syntax'
        )


def chosen_indices(wanted: Sequence[int] | None, count: int, what: str) -> list[int]:
    """Indices of frames or slices, from 0; negative ones count from the end, and None stands for all."""
    chosen = list(range(count)) if wanted is None else list(wanted)
    if not chosen:
        raise InputError(f"no {what} was chosen: give at least one index, or None for all")
    for number in chosen:
        if not -count <= number < count:
            raise InputError(f"there is no {what} {number}: there are {count}, counted from 0")
    return [number % count for number in chosen]


def check_size(pixels: int, place: Path) -> None:
    """Refuse more pixels or voxels than fit into memory."""
    if pixels > MAX_PIXELS:
        raise ImageError(f"{place} has more than {MAX_PIXELS:,} pixels: choose fewer frames or slices")


def checked_window(window: Any) -> Window:
    """A window as given, with its numbers as floats."""
    if isinstance(window, str):
        if window in {"file", "range"}:
            return window  # type: ignore[return-value]  # one of the two
    elif isinstance(window, Sequence) and len(window) == 2 and all(isinstance(each, Real) for each in window):
        centre, width = float(window[0]), float(window[1])
        if np.isfinite(centre) and np.isfinite(width) and width > 0:
            return centre, width
    raise InputError(
        f"window must be (centre, width) with a width above 0, 'file' or 'range', not {short_repr(window)}"
    )


def _groups(dataset: Any, frame: int) -> list[Any]:
    """Functional groups of a frame: its own, then the shared ones."""
    own, shared = dataset.get("PerFrameFunctionalGroupsSequence"), dataset.get("SharedFunctionalGroupsSequence")
    return [*([own[frame]] if own else []), *([shared[0]] if shared else [])]


def item_with(dataset: Any, frame: int, sequence: str, keyword: str) -> Any:
    """The item that has a value for a keyword and a frame: of a functional group, the dataset itself, or None."""
    groups = [group[sequence][0] for group in _groups(dataset, frame) if sequence in group]
    # Elements without a value are common: exporters write WindowCenter and leave it empty.
    return next((item for item in (*groups, dataset) if item.get(keyword) or item.get(keyword) == 0), None)


def modality_values(dataset: Any, stored: NDArray[Any], frame: int) -> NDArray[np.float64]:
    """The values of a frame in units of the modality, such as Hounsfield units."""
    pixels = medical_package("pydicom").pixels
    item = item_with(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope")
    if item is None:
        return np.asarray(pixels.apply_modality_lut(stored, dataset), dtype=np.float64)
    return stored * float(item.RescaleSlope) + float(item.get("RescaleIntercept") or 0)


def medical_package(name: str) -> Any:
    """Import pydicom or nibabel, or say how to install them."""
    try:
        module = import_module(name)
        if name == "pydicom":
            import_module("pydicom.pixels")
    except ImportError as error:
        raise MissingDependencyError(f'{name} is not installed: pip install "vitreous[medical]"') from error
    return module
