"""The folder of a saved explanation: its files, their names, writing and reading.

Every stored value is checked before it is used, also how photos were preprocessed.

``collect_provenance`` records versions, model and methods, so that a result can be reproduced.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from PIL import Image

from vitreous import __version__
from vitreous._utils.messages import error_message, errors_as
from vitreous._utils.storage import MANIFEST, PNG_LEVEL, StorageError, atomic_folder, read_manifest, write_manifest
from vitreous.errors import ModelError, VitreousError
from vitreous.explanation.views import find_view
from vitreous.inputs.patch_geometry import PatchGeometry
from vitreous.inputs.target import restore_target, store_target
from vitreous.models.preprocessing import CropRounding, Preprocessing, Resize

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from vitreous.explanation.explanation import Explanation
    from vitreous.inputs.target import Target


_LONGEST_EDGE = 2**31


def read_preprocessing(stored: object) -> Preprocessing | None:
    """Give what was saved; JSON has lists for tuples. Folders of earlier versions have none.

    Raises:
        StorageError: A field is missing, unknown, or holds what it cannot hold.
    """
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise StorageError("its preprocessing is no table")
    for name, value in stored.items():
        check = _CHECKS.get(name)
        if check is None:
            raise StorageError(f"its preprocessing has an unknown field {name!r}")
        if not check(value):
            raise StorageError(f"its preprocessing cannot have {name} = {value!r}")
    missing = next((name for name in ("image_size", "mean", "std") if name not in stored), None)
    if missing is not None:
        raise StorageError(f"its preprocessing lacks {missing}")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    try:
        return Preprocessing(**fields)
    except ModelError as error:
        raise StorageError(f"its preprocessing is not valid: {error}") from error


def _is_number(value: Any) -> bool:
    # Written so that neither NaN nor a whole number that no float can hold passes.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_edge(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LONGEST_EDGE


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_edge, value))


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "image_size": _is_size,
    "mean": _is_triple,
    "std": lambda value: _is_triple(value) and min(value) > 0,
    "interpolation": lambda value: isinstance(value, str) and value.upper() in Image.Resampling.__members__,
    "resize": lambda value: value in get_args(Resize),
    "resize_size": lambda value: value is None or _is_size(value),
    "rescale": lambda value: _is_number(value) and value > 0,
    "crop_rounding": lambda value: value in get_args(CropRounding),
}


ARRAYS = "explanation.npz"

_FORMAT = "vitreous-explanation"
_SCHEMA = 1
_LONGEST_NAME = 100
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
}


def write(explanation: Explanation, directory: Path, *, overwrite: bool, pictures: Mapping[str, Image.Image]) -> Path:
    """Write an explanation and further images into a folder that appears complete or not at all."""
    names = file_names(explanation.methods)
    _check_picture_names(pictures)
    with atomic_folder(directory, overwrite=overwrite) as folder:
        np.savez(folder / ARRAYS, **arrays_of(explanation))
        contents = {
            "provenance": explanation.provenance,
            "grid": explanation.grid,
            "image_size": explanation.image_size,
            "class_names": explanation.class_names,
            "preprocessing": None if explanation.preprocessing is None else asdict(explanation.preprocessing),
            "scale": explanation.scale,
            "images_note": explanation.images_note,
            "left_out": explanation.left_out,
            "geometry": None if explanation.geometry is None else asdict(explanation.geometry),
            "logits_dtype": _dtype_name(explanation.logits),
            "targets": [store_target(target)[0] for target in explanation.targets],
            "methods": [_describe_method(explanation, method, names[method]) for method in explanation.methods],
            "images": _write_images(explanation, folder),
            "overlays": _write_overlays(explanation, names, folder),
            "pictures": sorted(pictures),
        }
        for name, picture in pictures.items():
            _write_picture(picture, folder, name)
        write_manifest(folder, _FORMAT, _SCHEMA, contents)
    return directory


def read(directory: Path) -> dict[str, Any]:
    """Verify a folder and read the fields of the explanation in it."""
    manifest = read_manifest(directory, _FORMAT, _SCHEMA)
    try:
        arrays = _read_arrays(directory / ARRAYS)
        methods = manifest["methods"]
        return {
            "scores": {m["spelling"]: _tensor(arrays[m["array"]], m["dtype"]) for m in methods},
            "signed": {m["spelling"]: m["signed"] for m in methods},
            "target": _tensor(arrays["target"], "int64"),
            "logits": _tensor(arrays["logits"], manifest["logits_dtype"]),
            "grid": manifest["grid"],
            "image_size": manifest["image_size"],
            "class_names": manifest["class_names"],
            "images": _read_images(directory, manifest),
            "preprocessing": _preprocessing(directory, manifest),
            "provenance": manifest["provenance"],
            "scale": manifest.get("scale"),  # folders of earlier versions have none of these
            "images_note": manifest.get("images_note"),
            "left_out": manifest.get("left_out", {}),
            "geometry": None if manifest.get("geometry") is None else PatchGeometry(**manifest["geometry"]),
            "targets": _read_targets(manifest.get("targets", []), arrays),
            "target_values": torch.from_numpy(arrays["target-values"]) if "target-values" in arrays else None,
        }
    except VitreousError:
        raise
    except Exception as error:  # forged values can raise any exception
        raise StorageError(f"{directory / MANIFEST} is damaged: {error_message(error)} does not fit") from error


def file_names(spellings: tuple[str, ...]) -> dict[str, str]:
    """Give each method spelling a unique name that is valid on every file system."""
    names: dict[str, str] = {}
    for spelling in spellings:
        name = re.sub(r"[^a-z0-9._]+", "-", spelling.lower()).strip("-.")
        if not name or len(name) > _LONGEST_NAME or name in names.values():
            digest = hashlib.sha256(spelling.encode(errors="backslashreplace")).hexdigest()[:8]
            name = f"{name[:_LONGEST_NAME]}-{digest}".lstrip("-")
        names[spelling] = name
    return names


def _check_picture_names(pictures: Mapping[str, Image.Image]) -> None:
    """Raise unless the further images have plain names that collide with no other file."""
    for name in pictures:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.png", name) or name.startswith(("image-", "overlay-")):
            raise StorageError(f"{name!r} cannot be used as the name of an image; use one such as comparison.png")


def _preprocessing(directory: Path, manifest: Mapping[str, Any]) -> Preprocessing | None:
    try:
        return read_preprocessing(manifest.get("preprocessing"))
    except StorageError as error:
        raise StorageError(f"{directory / MANIFEST} is damaged: {error}") from error


def arrays_of(explanation: Explanation) -> dict[str, Any]:
    """Give all arrays, by their names in the archive."""
    names = file_names(explanation.methods)
    scores = {_array_name(names[method]): _array(scores) for method, scores in explanation.scores.items()}
    values = {} if explanation.target_values is None else {"target-values": _array(explanation.target_values)}
    tensors = {
        f"target-{number}-{name}": _array(tensor)
        for number, target in enumerate(explanation.targets)
        for name, tensor in store_target(target)[1].items()
    }
    return {"target": _array(explanation.target), "logits": _array(explanation.logits), **values, **tensors, **scores}


def _read_targets(stored: list[dict[str, Any]], arrays: Mapping[str, NDArray[Any]]) -> tuple[Target, ...]:
    """Read the targets that are not classes."""
    return tuple(
        restore_target(one, {name: torch.from_numpy(arrays[f"target-{number}-{name}"]) for name in one["tensors"]})
        for number, one in enumerate(stored)
    )


def _array_name(file_name: str) -> str:
    return f"scores-{file_name}"


def _array(tensor: Tensor) -> NDArray[Any]:
    """Convert a tensor to numpy; bfloat16, which numpy lacks, becomes float32 without loss."""
    tensor = tensor.cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(array: NDArray[Any], dtype: str) -> Tensor:
    if array.dtype.kind not in "fi":
        raise ValueError(f"an array of {array.dtype}")
    return torch.from_numpy(array).to(_DTYPES[dtype])


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe_method(explanation: Explanation, method: str, name: str) -> dict[str, Any]:
    return {
        "spelling": method,
        "signed": explanation.signed[method],
        "array": _array_name(name),
        "dtype": _dtype_name(explanation.scores[method]),
    }


def _write_images(explanation: Explanation, folder: Path) -> list[str] | None:
    """Write the images that the model saw and return their file names."""
    if explanation.images is None:
        return None
    return [_write_picture(image, folder, f"image-{index}.png") for index, image in enumerate(explanation.images)]


def _write_overlays(explanation: Explanation, names: Mapping[str, str], folder: Path) -> list[dict[str, Any]]:
    """Write an overlay for each image, class and method that can be shown, and describe them."""
    if explanation.images is None:
        return []
    draw_overlay = find_view(explanation, "overlay")
    overlays = []
    maps = [(i, t) for i in range(len(explanation)) for t in range(explanation.classes_per_image)]
    for method in explanation.methods:
        # A map with NaN is stored as an array only.
        for index, target_index in [position for position in maps if explanation.shows(method, *position)]:
            file = f"overlay-{index}-{target_index}-{names[method]}.png"
            _write_picture(draw_overlay(explanation, method, index, target_index), folder, file)
            label, number = explanation.label(index, target_index), explanation.class_index(index, target_index)
            overlays.append({"file": file, "method": method, "image": index, "class_index": number, "label": label})
    return overlays


def _write_picture(picture: Image.Image, folder: Path, name: str) -> str:
    picture.save(folder / name, format="PNG", compress_level=PNG_LEVEL)
    return name


def _read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    with errors_as(StorageError, f"{file} is damaged"):
        with zipfile.ZipFile(file) as archive:
            # Only uncompressed members: a small compressed file could unpack to any size.
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise StorageError(f"{file} is damaged: vitreous writes arrays that are not compressed")
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)


def _read_images(directory: Path, manifest: Mapping[str, Any]) -> tuple[Image.Image, ...] | None:
    names = manifest["images"]
    if names is None:
        return None
    # Only files that are listed have been verified, and are known to be inside the folder.
    return tuple(_read_image(directory / name) for name in names if manifest["files"][name])


def _read_image(file: Path) -> Image.Image:
    try:
        with Image.open(file, formats=["PNG"]) as image:
            image.load()
            return image.copy()
    except Exception as error:  # decoders can raise any exception on damaged bytes
        raise StorageError(f"{file} is damaged: {error_message(error)}") from error


# Listed only if imported: other libraries did not contribute to the result.
_PARTICIPANTS = ("timm", "transformers", "torchvision", "open_clip")


def collect_provenance(
    *,
    methods: Iterable[str] = (),
    model: str | None = None,
    model_class: str | None = None,
    family: str | None = None,
    fingerprint: str | None = None,
    **details: Any,
) -> dict[str, Any]:
    """Describe the running software and the model in plain JSON values.

    Args:
        methods: Method spellings.
        model: The name the model was loaded by.
        model_class: The qualified name of the model's class.
        family: The model's class.
        fingerprint: A hash of the model, its weights included, where it is known.
        **details: Anything else worth recording; JSON values only.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "model_class": model_class,
        "family": family,
        "fingerprint": fingerprint,
        "methods": list(methods),
        "versions": software_versions(),
        **details,
    }


def software_versions() -> dict[str, str]:
    """Give the versions of python, vitreous, torch and of the model libraries that are imported."""
    versions = {"python": platform.python_version(), "vitreous": __version__}
    for name in ("torch", *_PARTICIPANTS):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "unknown"))
    return versions
