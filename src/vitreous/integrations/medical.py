"""Read DICOM and NIfTI images, and write overlays as DICOM secondary captures.

Models of images take 8-bit RGB, so a window maps the stored values to black and white; 3-D models take the tensor that
``read_volume`` gives. Not for diagnostic use.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from importlib import import_module
from numbers import Real
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
# Copied from the source. Elements of type 2 in the IOD must be present; they are empty where nothing is known.
_TYPE_2 = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime"),
    *("AccessionNumber", "ReferringPhysicianName", "PatientOrientation", "Laterality"),
)
_OPTIONAL = ("SpecificCharacterSet", "StudyInstanceUID", "StudyDescription", "BodyPartExamined")
_LOSSY = ("LossyImageCompression", "LossyImageCompressionRatio", "LossyImageCompressionMethod")


def read_dicom(
    file: str | os.PathLike[str], *, window: Window = "file", frames: Sequence[int] | None = None
) -> list[Image.Image]:
    """Read the frames of a DICOM file as 8-bit RGB images, which ``explain`` takes.

    Args:
        file: a file with one or several frames. Greyscale values (up to 16 bits) are converted to the units of the
            modality, such as Hounsfield units, and windowed; colour and palette images are not windowed.
        window: centre and width in units of the modality, such as ``(40, 400)`` for soft tissue in CT; ``"file"``: the
            first window or VOI LUT in the file, per frame where given, or ``"range"`` if it has none; ``"range"``: from
            the smallest to the largest value of the frames.
        frames: indices from 0; all frames by default.

    Raises:
        ImageError: the file cannot be read, is compressed with a codec that is not installed, or holds values that are
            not finite.
        InputError: the window or the frames are invalid.

    Examples:
        >>> from vitreous.integrations.medical import read_dicom
        >>> pictures = read_dicom("scan.dcm", window=(40, 400))
    """
    pydicom = _package("pydicom")
    place = expanded(Path(file))
    window, wanted = _checked_window(window), _checked_numbers(frames, "frames")
    with errors_as(ImageError, f"{place} cannot be read as a DICOM image"):
        dataset, stored, chosen = _read_frames(place, wanted)
        if str(dataset.PhotometricInterpretation) == "PALETTE COLOR":
            stored = pydicom.pixels.apply_color_lut(stored, dataset)
            bits = 8 * stored.dtype.itemsize
            return [Image.fromarray(_eight_bits(stored[frame], bits)).convert("RGB") for frame in chosen]
        if int(dataset.get("SamplesPerPixel", 1)) > 1:
            bits = int(dataset.get("BitsStored", 8))
            return [Image.fromarray(_eight_bits(stored[frame], bits)).convert("RGB") for frame in chosen]
        values = [_finite(_modality_values(dataset, stored[frame], frame), place) for frame in chosen]
        whole = _range_of(values)
        grey = [
            _file_window(dataset, array, frame, whole)
            if window == "file"
            else _windowed(array, whole if window == "range" else window)
            for frame, array in zip(chosen, values, strict=True)
        ]
        inverted = str(dataset.PhotometricInterpretation) == "MONOCHROME1"
        return [Image.fromarray(255 - each if inverted else each).convert("RGB") for each in grey]


def _read_dataset(place: Path, **options: Any) -> Any:
    pydicom = _package("pydicom")
    try:
        return pydicom.dcmread(place, **options)
    except pydicom.errors.InvalidDicomError as error:
        raise ImageError(f"{place} is not a DICOM file: the DICM prefix of its header is missing") from error


def _read_frames(place: Path, wanted: Sequence[int] | None) -> tuple[Any, NDArray[Any], list[int]]:
    """The data set of a file, the stored values of its frames, frame first, and which frames are read."""
    dataset = _read_dataset(place)
    count = int(dataset.get("NumberOfFrames", 1) or 1)
    chosen = _chosen(wanted, count, "frame")
    _check_size(int(dataset.Rows) * int(dataset.Columns) * len(chosen), place)
    _check_codec(dataset, place)
    stored = _package("pydicom").pixels.pixel_array(dataset)  # converts YBR to RGB
    return dataset, stored if count > 1 else stored[None], chosen


def _finite(values: NDArray[np.float64], place: Path) -> NDArray[np.float64]:
    if not np.isfinite(values).all():
        raise ImageError(f"{place} holds values that are not finite (NaN or infinite)")
    return values


def _check_codec(dataset: Any, place: Path) -> None:
    """Say which package decompresses the pixels, where none is installed."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_encapsulated:
        return
    decoder = _package("pydicom").pixels.get_decoder(syntax)
    if not decoder.is_available:
        raise ImageError(
            f"{place} is compressed ({syntax.name}), and no installed package decompresses it: "
            'pip install "pylibjpeg[all]", or convert the file to an uncompressed transfer syntax'
        )


def _checked_numbers(numbers: Any, what: str) -> list[int] | None:
    if numbers is None:
        return None
    try:
        return [operator.index(number) for number in numbers]
    except TypeError as error:
        raise InputError(f"{what} must be a list of whole numbers, not {short_repr(numbers)}") from error


def _chosen(wanted: Sequence[int] | None, count: int, what: str) -> list[int]:
    chosen = list(range(count)) if wanted is None else list(wanted)
    if not chosen:
        raise InputError(f"no {what} was chosen: give at least one index, or None for all")
    for number in chosen:
        if not -count <= number < count:
            raise InputError(f"there is no {what} {number}: there are {count}, counted from 0")
    return [number % count for number in chosen]


def _check_size(pixels: int, place: Path) -> None:
    if pixels > MAX_PIXELS:
        raise ImageError(f"{place} has more than {MAX_PIXELS:,} pixels: choose fewer frames or slices")


def _checked_window(window: Any) -> Window:
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


def _item_with(dataset: Any, frame: int, sequence: str, keyword: str) -> Any:
    """The item that has a value for a keyword and a frame: of a functional group, the dataset itself, or None."""
    groups = [group[sequence][0] for group in _groups(dataset, frame) if sequence in group]
    # Elements without a value are common: exporters write WindowCenter and leave it empty.
    return next((item for item in (*groups, dataset) if item.get(keyword) or item.get(keyword) == 0), None)


def _modality_values(dataset: Any, stored: NDArray[Any], frame: int) -> NDArray[np.float64]:
    pixels = _package("pydicom").pixels
    item = _item_with(dataset, frame, "PixelValueTransformationSequence", "RescaleSlope")
    if item is None:
        return np.asarray(pixels.apply_modality_lut(stored, dataset), dtype=np.float64)
    return stored * float(item.RescaleSlope) + float(item.get("RescaleIntercept") or 0)


def _file_window(
    dataset: Any, values: NDArray[np.float64], frame: int, whole: tuple[float, float]
) -> NDArray[np.uint8]:
    if "VOILUTSequence" in dataset:
        looked_up = np.asarray(
            _package("pydicom").pixels.apply_voi_lut(values.astype(np.int64), dataset), dtype=np.float64
        )
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        return _scaled(looked_up, 0, 2**bits - 1)
    item = _item_with(dataset, frame, "FrameVOILUTSequence", "WindowCenter")
    centre, width = (0.0, 0.0) if item is None else (_first(item.get(key)) for key in ("WindowCenter", "WindowWidth"))
    if item is None or width <= 0:  # a width of 0 or none is invalid, and no window
        return _windowed(values, whole)
    return _windowed(values, (centre, width), str(item.get("VOILUTFunction", "LINEAR") or "LINEAR").upper())


def _first(value: Any) -> float:
    value = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and value else value
    return float(value or 0)


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


def _eight_bits(colour: NDArray[Any], bits: int) -> NDArray[np.uint8]:
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

    The volume is reoriented to RAS+ (right, anterior, superior) first. Slices are upright: anterior is at the top of
    axial slices, superior at the top of sagittal and coronal ones.

    Args:
        file: a 3-D volume, or a 2-D image.
        window: centre and width in the volume's units; ``"range"``: from its smallest to its largest value.
        axis: the axis that is sliced: 0 sagittal, 1 coronal, 2 axial.
        slices: indices from 0; all slices by default.
        radiological: show the patient's right side on the left (radiological convention).

    Raises:
        ImageError: the file cannot be read, has more than three axes, or holds colours, complex numbers or values that
            are not finite.
        InputError: the window, axis or slices are invalid.

    Examples:
        >>> from vitreous.integrations.medical import read_nifti
        >>> pictures = read_nifti("brain.nii.gz", window=(50, 100), slices=[40, 41])
    """
    place = expanded(Path(file))
    if isinstance(axis, bool) or axis not in {0, 1, 2}:
        raise InputError(f"axis must be 0, 1 or 2, not {short_repr(axis)}")
    checked, wanted = _checked_window(window), _checked_numbers(slices, "slices")
    if checked == "file":
        raise InputError("NIfTI files have no window: give (centre, width) or 'range'")
    with errors_as(ImageError, f"{place} cannot be read as a NIfTI image"):
        volume = _nifti_values(place)
        if volume.shape[2] == 1 and axis != 2:
            raise InputError(f"{place} is a 2-D image: axis must be 2")
        chosen = _chosen(wanted, volume.shape[axis], "slice")
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
    """Read a NIfTI volume, or the frames of a DICOM file, as the input of a 3-D model.

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
    checked = None if window is None else _checked_window(window)
    if checked == "file":
        raise InputError("window must be (centre, width), 'range' or None for a volume")
    lengths = None if size is None else [int(length) for length in size]
    if lengths is not None and (len(lengths) != 3 or min(lengths) < 1):
        raise InputError(f"size must be three lengths above 0, not {short_repr(size)}")
    nifti = place.name.lower().endswith((".nii", ".nii.gz"))
    with errors_as(ImageError, f"{place} cannot be read as a volume"):
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
    """The values of a volume, (right, anterior, superior); a 2-D image is a volume of one slice."""
    nibabel = _package("nibabel")
    image = nibabel.as_closest_canonical(nibabel.load(place))
    shape = tuple(int(length) for length in image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) not in {2, 3} or 0 in shape:
        raise ImageError(f"{place} has shape {shape}: give one 3-D volume or 2-D image")
    if image.get_data_dtype().kind not in "iuf":
        raise ImageError(f"{place} holds {image.get_data_dtype()} values: they must be real numbers")
    _check_size(int(np.prod(shape)), place)
    return _finite(
        np.asarray(image.dataobj, dtype=np.float64).reshape(shape if len(shape) == 3 else (*shape, 1)), place
    )


def _dicom_values(place: Path) -> NDArray[np.float64]:
    """The values of all frames in units of the modality, (frame, row, column)."""
    dataset, stored, chosen = _read_frames(place, None)
    if int(dataset.get("SamplesPerPixel", 1)) > 1 or str(dataset.PhotometricInterpretation) == "PALETTE COLOR":
        raise ImageError(f"{place} holds colours: a volume has one value per voxel")
    return _finite(np.stack([_modality_values(dataset, stored[frame], frame) for frame in chosen]), place)


def write_secondary_capture(
    picture: Image.Image | Sequence[Image.Image],
    file: str | os.PathLike[str],
    *,
    source: Any = None,
    description: str = "vitreous heat map",
    series_number: int = 9000,
) -> Path:
    """Write an overlay, or one per frame, as a DICOM secondary capture.

    Patient and study are copied from the source, patient data included. The series and the instance are new; the image
    is marked as derived and references the source.

    Args:
        picture: such as ``explanation.overlay("tokentm", photo=...)``; several of one size become frames of one file.
        file: the file to write.
        source: the DICOM file that was explained, or its dataset; None for a new study without a patient.
        description: series description, at most 64 characters.
        series_number: number of the new series.

    Returns:
        The file.

    Raises:
        InputError: there is no picture, or sizes differ.
        ImageError: the source cannot be read.

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
    found = source
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        place = expanded(Path(source))
        with errors_as(ImageError, f"{place} cannot be read as a DICOM file"):
            found = _read_dataset(place, stop_before_pixels=True)
    for keyword in _TYPE_2:
        setattr(dataset, keyword, None if found is None else found.get(keyword))
    for keyword in (*_OPTIONAL, *_LOSSY) if found is not None else ():
        if keyword in found:
            dataset[keyword] = found[keyword]
    if "StudyInstanceUID" not in dataset:
        dataset.StudyInstanceUID = uid.generate_uid()
    several = len(pictures) > 1
    capture = uid.MultiFrameTrueColorSecondaryCaptureImageStorage if several else uid.SecondaryCaptureImageStorage
    dataset.SOPClassUID, dataset.SOPInstanceUID = capture, uid.generate_uid()
    dataset.SeriesInstanceUID, dataset.SeriesNumber, dataset.InstanceNumber = uid.generate_uid(), series_number, 1
    dataset.Modality, dataset.ConversionType = "OT", "WSD"
    dataset.ImageType = ["DERIVED", "SECONDARY"]
    dataset.SeriesDescription = description[:64]
    dataset.DerivationDescription = f"Heat map of a model's explanation by vitreous {__version__}; not for diagnosis"
    # Text in the source's pixels stays in the overlay; where the source does not say, assume that there may be some.
    dataset.BurnedInAnnotation = (None if found is None else found.get("BurnedInAnnotation")) or "YES"
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
        dataset.PageNumberVector = list(range(1, len(pictures) + 1))
        dataset.FrameIncrementPointer = dataset["PageNumberVector"].tag
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


def _package(name: str) -> Any:
    try:
        module = import_module(name)
        if name == "pydicom":
            import_module("pydicom.pixels")
    except ImportError as error:
        raise MissingDependencyError(f'{name} is not installed: pip install "vitreous[medical]"') from error
    return module
