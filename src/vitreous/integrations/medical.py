"""Medical images: DICOM and NIfTI in, windowed as told, and overlays out as secondary captures of DICOM.

What a model of images sees is 8-bit RGB, so a window says which values become black and white. A model of volumes is
given a tensor by ``read_volume``. Nothing here is for diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from vitreous import __version__
from vitreous._utils.messages import errors_as, short_repr
from vitreous._utils.storage import atomic_file, expanded
from vitreous.errors import ImageError, InputError, MissingDependencyError
from vitreous.inputs.images import MAX_PIXELS

if TYPE_CHECKING:
    import os

__all__ = ["read_dicom", "read_nifti", "read_volume", "write_secondary_capture"]

Window = tuple[float, float] | Literal["file", "range"]
_COPIED = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyInstanceUID", "StudyID", "StudyDate"),
    *("StudyTime", "StudyDescription", "AccessionNumber", "ReferringPhysicianName", "BodyPartExamined", "Laterality"),
)


def read_dicom(
    file: str | os.PathLike[str], *, window: Window = "file", frames: Sequence[int] | None = None
) -> list[Image.Image]:
    """Read the frames of a DICOM file as 8-bit RGB images, which ``explain`` takes.

    Args:
        file: one frame or several, grey (up to 16 bits, stored values become those of the modality first, such as
            Hounsfield units) or colour, which is not windowed.
        window: centre and width in units of the modality, such as ``(40, 400)`` for soft tissue in CT; ``"file"``: the
            first window or table in the file, of each frame where it says so, and where it has none as ``"range"``;
            ``"range"``: from the smallest to the largest value of the frames.
        frames: which ones, from 0; all by default.

    Raises:
        ImageError: it cannot be read.

    Examples:
        >>> from vitreous.integrations.medical import read_dicom
        >>> pictures = read_dicom("scan.dcm", window=(40, 400))
    """
    pydicom = _package("pydicom")
    place = expanded(Path(file))
    with errors_as(ImageError, f"{place} is no DICOM image that can be read"):
        dataset = pydicom.dcmread(place)
        count = int(dataset.get("NumberOfFrames", 1) or 1)
        chosen = _chosen(frames, count)
        _check_size(int(dataset.Rows) * int(dataset.Columns) * len(chosen), place)
        stored = pydicom.pixels.pixel_array(dataset)  # colours as RGB
        stored = stored if count > 1 else stored[None]
        if int(dataset.get("SamplesPerPixel", 1)) > 1:
            return [Image.fromarray(_eight_bits(stored[frame], dataset)).convert("RGB") for frame in chosen]
        values = [_modality_values(dataset, stored[frame], frame) for frame in chosen]
        window = _checked_window(window)
        whole = _range_of(values)
        grey = [
            _file_window(dataset, array, frame, whole)
            if window == "file"
            else _windowed(array, whole if window == "range" else window)
            for frame, array in zip(chosen, values, strict=True)
        ]
        inverted = str(dataset.PhotometricInterpretation) == "MONOCHROME1"
        return [Image.fromarray(255 - each if inverted else each).convert("RGB") for each in grey]


def _chosen(wanted: Sequence[int] | None, count: int) -> list[int]:
    chosen = list(range(count)) if wanted is None else [int(number) for number in wanted]
    outside = [number for number in chosen if not -count <= number < count]
    if outside or not chosen:
        raise InputError(f"{outside[0] if outside else 'nothing'} is asked for, and there are {count}, counted from 0")
    return [number % count for number in chosen]


def _check_size(pixels: int, place: Path) -> None:
    if pixels > MAX_PIXELS:
        raise ImageError(f"{place}: more than {MAX_PIXELS:,} pixels, refused: choose fewer of them")


def _checked_window(window: Any) -> Window:
    if isinstance(window, str):
        if window in {"file", "range"}:
            return window  # type: ignore[return-value]  # one of the two
    elif isinstance(window, Sequence) and len(window) == 2:
        centre, width = float(window[0]), float(window[1])
        if np.isfinite(centre) and np.isfinite(width) and width > 0:
            return centre, width
    raise InputError(
        f"window must be (centre, width) with a width above 0, 'file' or 'range', not {short_repr(window)}"
    )


def _groups(dataset: Any, frame: int) -> list[Any]:
    """Where values of a frame are said: its own functional groups, the shared ones, the file itself."""
    own, shared = dataset.get("PerFrameFunctionalGroupsSequence"), dataset.get("SharedFunctionalGroupsSequence")
    return [*([own[frame]] if own else []), *([shared[0]] if shared else [])]


def _described(dataset: Any, frame: int, sequence: str, keyword: str) -> Any:
    """The part of the file that has a keyword for a frame, or None."""
    for group in _groups(dataset, frame):
        if sequence in group and keyword in group[sequence][0]:
            return group[sequence][0]
    return dataset if keyword in dataset else None


def _modality_values(dataset: Any, stored: NDArray[Any], frame: int) -> NDArray[np.float64]:
    pixels = _package("pydicom").pixels
    said = _described(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope")
    if said is None:
        return np.asarray(pixels.apply_modality_lut(stored, dataset), dtype=np.float64)
    return stored * float(said.RescaleSlope) + float(said.RescaleIntercept)


def _file_window(
    dataset: Any, values: NDArray[np.float64], frame: int, whole: tuple[float, float]
) -> NDArray[np.uint8]:
    if "VOILUTSequence" in dataset:
        looked_up = np.asarray(
            _package("pydicom").pixels.apply_voi_lut(values.astype(np.int64), dataset), dtype=np.float64
        )
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        return _scaled(looked_up, 0, 2**bits - 1)
    said = _described(dataset, frame, "FrameVOILUTSequence", "WindowCenter")
    if said is None:
        return _windowed(values, whole)
    centre, width = (_first(said[keyword].value) for keyword in ("WindowCenter", "WindowWidth"))
    return _windowed(values, (centre, width), str(said.get("VOILUTFunction", "LINEAR") or "LINEAR").upper())


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, Sequence) and not isinstance(value, str) else value)


def _range_of(values: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """All values as a window."""
    low, high = min(float(each.min()) for each in values), max(float(each.max()) for each in values)
    return (low + high) / 2 + 0.5, high - low + 1


def _windowed(
    values: NDArray[np.float64], window: tuple[float, float] | str, function: str = "LINEAR"
) -> NDArray[np.uint8]:
    """Values in a window as 0..255, by the functions of DICOM (PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    assert not isinstance(window, str)
    centre, width = window
    if function == "SIGMOID":
        return _scaled(1 / (1 + np.exp(-4 * (values - centre) / width)), 0, 1)
    if function == "LINEAR_EXACT":
        return _scaled(values, centre - width / 2, centre + width / 2)
    return _scaled(values, centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2)


def _scaled(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    if high <= low:  # a window of one value: below it black, above it white
        return np.where(values <= low, 0, 255).astype(np.uint8)
    return ((values - low) * (255 / (high - low))).round().clip(0, 255).astype(np.uint8)


def _eight_bits(colour: NDArray[Any], dataset: Any) -> NDArray[np.uint8]:
    bits = int(dataset.get("BitsStored", 8))
    return colour.astype(np.uint8) if bits <= 8 else _scaled(colour.astype(np.float64), 0, 2**bits - 1)


def read_nifti(
    file: str | os.PathLike[str],
    *,
    window: tuple[float, float] | Literal["range"] = "range",
    axis: int = 2,
    slices: Sequence[int] | None = None,
    radiological: bool = False,
) -> list[Image.Image]:
    """Read slices of a NIfTI volume as 8-bit RGB images, which ``explain`` takes.

    The volume is brought into the directions right, anterior, superior first. Slices are upright: anterior (of axial
    ones) or superior (of the others) is at the top.

    Args:
        file: a volume of three axes, or a picture of two.
        window: centre and width in the volume's units; ``"range"``: from its smallest to its largest value.
        axis: across which slices lie: 0 sagittal, 1 coronal, 2 axial.
        slices: which ones, from 0; all by default.
        radiological: the patient's right side is on the left; otherwise on the right, as the volume has it.

    Raises:
        ImageError: it cannot be read.

    Examples:
        >>> from vitreous.integrations.medical import read_nifti
        >>> pictures = read_nifti("brain.nii.gz", window=(50, 100), slices=[40, 41])
    """
    place = expanded(Path(file))
    if axis not in {0, 1, 2}:
        raise InputError(f"axis must be 0, 1 or 2, not {short_repr(axis)}")
    with errors_as(ImageError, f"{place} is no NIfTI image that can be read"):
        volume = _nifti_values(place)
        checked = _checked_window(window)
        if checked == "file":
            raise InputError("a NIfTI file says no window: give (centre, width) or 'range'")
        chosen = _chosen(slices, volume.shape[axis])
        function = "LINEAR" if checked == "range" else "LINEAR_EXACT"
        used = _range_of([volume]) if checked == "range" else checked
        flip = radiological and axis != 0
        planes = np.moveaxis(volume, axis, 0)
        grey = [np.rot90(_windowed(planes[number], used, function)) for number in chosen]
        return [Image.fromarray(np.ascontiguousarray(each[:, ::-1] if flip else each)).convert("RGB") for each in grey]


def read_volume(
    file: str | os.PathLike[str],
    *,
    window: tuple[float, float] | Literal["range"] | None = None,
    size: Sequence[int] | None = None,
    axes: Literal["xyz", "zyx"] = "xyz",
) -> Tensor:
    """Read a NIfTI volume, or the frames of a DICOM file, as the input of a model of volumes.

    Args:
        file: ``.nii`` or ``.nii.gz``, brought into the directions right, anterior, superior; anything else as DICOM,
            whose frames are taken in their order, in units of the modality.
        window: centre and width, which become 0 to 1, and values outside are cut off; ``"range"``: from the smallest to
            the largest value; ``None``: the values as they are.
        size: resize to these three lengths, trilinearly.
        axes: of NIfTI: ``xyz`` as MONAI's loaders give it, or ``zyx``: axial slices first. Frames of DICOM are first.

    Returns:
        (1, 1, depth, height, width) in float32.

    Raises:
        ImageError: it cannot be read.

    Examples:
        >>> from vitreous.integrations.medical import read_volume
        >>> volume = read_volume("brain.nii.gz", window="range", size=(4, 16, 16), axes="zyx")
        >>> volume.shape
        torch.Size([1, 1, 4, 16, 16])
    """
    place = expanded(Path(file))
    if axes not in {"xyz", "zyx"}:
        raise InputError(f"axes must be xyz or zyx, not {short_repr(axes)}")
    checked = None if window is None else _checked_window(window)
    if checked == "file":
        raise InputError("window must be (centre, width), 'range' or None for a volume")
    lengths = None if size is None else [int(length) for length in size]
    if lengths is not None and (len(lengths) != 3 or min(lengths) < 1):
        raise InputError(f"size must be three lengths above 0, not {short_repr(size)}")
    nifti = place.name.lower().endswith((".nii", ".nii.gz"))
    with errors_as(ImageError, f"{place} is no volume that can be read"):
        values = _nifti_values(place) if nifti else _dicom_values(place)
        if nifti and axes == "zyx":
            values = values.transpose(2, 1, 0)
        if checked is not None:
            low, high = float(values.min()), float(values.max())
            if not isinstance(checked, str):
                centre, width = checked
                low, high = centre - width / 2, centre + width / 2
            values = ((values - low) / (high - low if high > low else 1)).clip(0, 1)
        volume = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))[None, None]
    if lengths is None:
        return volume
    return functional.interpolate(volume, size=lengths, mode="trilinear", align_corners=False)


def _nifti_values(place: Path) -> NDArray[np.float64]:
    """The numbers of a volume, (right, anterior, superior)."""
    nibabel = _package("nibabel")
    image = nibabel.as_closest_canonical(nibabel.load(place))
    shape = tuple(int(length) for length in image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) not in {2, 3}:
        raise ImageError(f"{place}: {len(shape)} axes, and a volume has three: choose one of them before")
    _check_size(int(np.prod(shape)), place)
    volume = np.asarray(image.dataobj, dtype=np.float64).reshape(shape if len(shape) == 3 else (*shape, 1))
    if not np.isfinite(volume).all():
        raise ImageError(f"{place}: values that are not finite")
    return volume


def _dicom_values(place: Path) -> NDArray[np.float64]:
    """The numbers of all frames, (frame, row, column)."""
    pydicom = _package("pydicom")
    dataset = pydicom.dcmread(place)
    if int(dataset.get("SamplesPerPixel", 1)) > 1:
        raise ImageError(f"{place}: colours, and a volume has one number for each voxel")
    count = int(dataset.get("NumberOfFrames", 1) or 1)
    _check_size(int(dataset.Rows) * int(dataset.Columns) * count, place)
    stored = pydicom.pixels.pixel_array(dataset)
    stored = stored if count > 1 else stored[None]
    return np.stack([_modality_values(dataset, stored[frame], frame) for frame in range(count)])


def write_secondary_capture(
    picture: Image.Image | Sequence[Image.Image],
    file: str | os.PathLike[str],
    *,
    source: Any = None,
    description: str = "vitreous heat map",
    series_number: int = 9000,
) -> Path:
    """Write an overlay, or one for every frame, as a secondary capture of DICOM.

    Patient and study are those of the source. The series and the image are new, the image is marked as derived, and it
    names the source. Where the source holds a patient's data, the result does too.

    Args:
        picture: such as ``explanation.overlay("tokentm", photo=...)``; several of one size are frames of one file.
        file: where it is written.
        source: the DICOM file that was explained, or its data set; None for a study of its own without a patient.
        description: of the new series.
        series_number: of the new series.

    Returns:
        The file.

    Examples:
        >>> from vitreous.integrations.medical import write_secondary_capture
        >>> file = write_secondary_capture(explanation.overlay("gae", photo="demo.jpg"), "overlay.dcm")
    """
    pydicom = _package("pydicom")
    uid = import_module("pydicom.uid")
    pictures = [picture] if isinstance(picture, Image.Image) else list(picture)
    if not pictures or len({each.size for each in pictures}) > 1:
        raise InputError("a secondary capture holds one picture, or several of one size")
    dataset = pydicom.Dataset()
    found = pydicom.dcmread(source, stop_before_pixels=True) if isinstance(source, str) or _is_path(source) else source
    for keyword in _COPIED if found is not None else ():
        if keyword in found:
            dataset[keyword] = found[keyword]
    if found is None:
        dataset.PatientID, dataset.PatientName, dataset.StudyInstanceUID = "", "", uid.generate_uid()
    several = len(pictures) > 1
    capture = uid.MultiFrameTrueColorSecondaryCaptureImageStorage if several else uid.SecondaryCaptureImageStorage
    dataset.SOPClassUID, dataset.SOPInstanceUID = capture, uid.generate_uid()
    dataset.SeriesInstanceUID, dataset.SeriesNumber, dataset.InstanceNumber = uid.generate_uid(), series_number, 1
    dataset.Modality, dataset.ConversionType = "OT", "WSD"
    dataset.ImageType = ["DERIVED", "SECONDARY"]
    dataset.SeriesDescription = description[:64]
    dataset.DerivationDescription = f"Heat map of a model's explanation by vitreous {__version__}; not for diagnosis"
    dataset.Manufacturer, dataset.SoftwareVersions = "vitreous", __version__
    if found is not None and "SOPInstanceUID" in found:
        reference = pydicom.Dataset()
        reference.ReferencedSOPClassUID = found.SOPClassUID
        reference.ReferencedSOPInstanceUID = found.SOPInstanceUID
        dataset.SourceImageSequence = [reference]
    pixels = np.stack([np.asarray(each.convert("RGB")) for each in pictures])
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PlanarConfiguration = 3, "RGB", 0
    dataset.Rows, dataset.Columns = pixels.shape[1:3]
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 8, 8, 7, 0
    if several:
        dataset.NumberOfFrames = len(pictures)
    content = pixels.tobytes()
    dataset.PixelData = content + b"\0" * (len(content) % 2)
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = capture
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    place = expanded(Path(file))
    with atomic_file(place) as draft:
        dataset.save_as(draft, enforce_file_format=True)
    return place


def _is_path(source: Any) -> bool:
    return hasattr(source, "__fspath__")


def _package(name: str) -> Any:
    try:
        module = import_module(name)
        if name == "pydicom":
            import_module("pydicom.pixels")
    except ImportError as error:
        raise MissingDependencyError(f'{name} is not installed: pip install "vitreous[medical]"') from error
    return module
