"""Read DICOM and NIfTI images, and write overlays as DICOM secondary captures.

Models of images take 8-bit RGB, so a window maps the stored values to black and white; 3-D models take the tensor that
``read_volume`` gives. Not for diagnostic use.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitreous import __version__
from vitreous._utils.messages import errors_as, short_repr
from vitreous._utils.storage import atomic_file, expanded
from vitreous.errors import ImageError, InputError
from vitreous.inputs.volumes import (
    Window,
    check_finite,
    checked_window,
    chosen_indices,
    item_with,
    medical_package,
    modality_values,
    nifti_values,
    read_dataset,
    read_frames,
    read_volume,
)

if TYPE_CHECKING:
    import os

__all__ = ["read_dicom", "read_nifti", "read_volume", "write_secondary_capture"]

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
    pydicom = medical_package("pydicom")
    place = expanded(Path(file))
    window, wanted = checked_window(window), _checked_numbers(frames, "frames")
    with errors_as(ImageError, f"{place} cannot be read as a DICOM image"):
        dataset, stored, chosen = read_frames(place, wanted)
        if str(dataset.PhotometricInterpretation) == "PALETTE COLOR":
            stored = pydicom.pixels.apply_color_lut(stored, dataset)
            bits = 8 * stored.dtype.itemsize
            return [Image.fromarray(_eight_bits(stored[frame], bits)).convert("RGB") for frame in chosen]
        if int(dataset.get("SamplesPerPixel", 1)) > 1:
            bits = int(dataset.get("BitsStored", 8))
            return [Image.fromarray(_eight_bits(stored[frame], bits)).convert("RGB") for frame in chosen]
        values = [check_finite(modality_values(dataset, stored[frame], frame), place) for frame in chosen]
        whole = _range_of(values)
        grey = [
            _file_window(dataset, array, frame, whole)
            if window == "file"
            else _windowed(array, whole if window == "range" else window)
            for frame, array in zip(chosen, values, strict=True)
        ]
        inverted = str(dataset.PhotometricInterpretation) == "MONOCHROME1"
        return [Image.fromarray(255 - each if inverted else each).convert("RGB") for each in grey]


def _checked_numbers(numbers: Any, what: str) -> list[int] | None:
    if numbers is None:
        return None
    try:
        return [operator.index(number) for number in numbers]
    except TypeError as error:
        raise InputError(f"{what} must be a list of whole numbers, not {short_repr(numbers)}") from error


def _file_window(
    dataset: Any, values: NDArray[np.float64], frame: int, whole: tuple[float, float]
) -> NDArray[np.uint8]:
    if "VOILUTSequence" in dataset:
        looked_up = np.asarray(
            medical_package("pydicom").pixels.apply_voi_lut(values.astype(np.int64), dataset), dtype=np.float64
        )
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        return _scaled(looked_up, 0, 2**bits - 1)
    item = item_with(dataset, frame, "FrameVOILUTSequence", "WindowCenter")
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
    checked, wanted = checked_window(window), _checked_numbers(slices, "slices")
    if checked == "file":
        raise InputError("NIfTI files have no window: give (centre, width) or 'range'")
    with errors_as(ImageError, f"{place} cannot be read as a NIfTI image"):
        volume = nifti_values(place)
        if volume.shape[2] == 1 and axis != 2:
            raise InputError(f"{place} is a 2-D image: axis must be 2")
        chosen = chosen_indices(wanted, volume.shape[axis], "slice")
        function = "LINEAR" if checked == "range" else "LINEAR_EXACT"
        used = _range_of([volume]) if checked == "range" else checked
        flip = radiological and axis != 0
        planes = np.moveaxis(volume, axis, 0)
        grey = [np.rot90(_windowed(planes[number], used, function)) for number in chosen]
        return [Image.fromarray(np.ascontiguousarray(each[:, ::-1] if flip else each)).convert("RGB") for each in grey]


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
    pydicom = medical_package("pydicom")
    uid = import_module("pydicom.uid")
    pictures = [picture] if isinstance(picture, Image.Image) else list(picture)
    if not pictures or len({each.size for each in pictures}) > 1:
        raise InputError("a secondary capture holds one picture, or several of one size")
    dataset = pydicom.Dataset()
    found = source
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        place = expanded(Path(source))
        with errors_as(ImageError, f"{place} cannot be read as a DICOM file"):
            found = read_dataset(place, stop_before_pixels=True)
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
