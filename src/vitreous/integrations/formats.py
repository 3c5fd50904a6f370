"""Export maps: COCO and VOC masks, HDF5, zarr, FiftyOne heatmaps.

``Explanation.save`` writes folders with an ``explanation.npz`` for numpy; DICOM and NIfTI are in ``medical``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitreous._utils.messages import errors_as, short_repr
from vitreous._utils.storage import StorageError, atomic_file, atomic_folder, expanded
from vitreous.errors import InputError, MissingDependencyError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import display_maps, framed_maps

if TYPE_CHECKING:
    import os

__all__ = ["add_fiftyone_heatmaps", "heatmap_masks", "read_maps", "to_coco", "write_maps", "write_voc_masks"]

Mask = NDArray[np.bool_]
Size = tuple[int, int]
_LONGEST_HEATMAP = 512  # pixels of a heatmap's longer edge, because FiftyOne stores it in its database
_VERSION = 1


def heatmap_masks(
    explanation: Explanation,
    method: str,
    *,
    threshold: float = 0.5,
    share: float | None = None,
    photo_sizes: Sequence[Size] | None = None,
) -> list[list[Mask]]:
    """Return masks of the highest parts of maps.

    Args:
        explanation: the explanation.
        method: one of its methods.
        threshold: threshold on the smooth map, which is scaled to 0..1 from its minimum, or from 0 for signed maps, to
            its maximum.
        share: instead of a threshold, the fraction of pixels in the mask.
        photo_sizes: height and width of the images before preprocessing: masks then have these sizes and are false
            outside the model's crop. By default they have the size of the model's input.

    Returns:
        For every image the masks (height, width) of its explained classes.

    Raises:
        InputError: an argument is invalid.
    """
    given: dict[str, Any] = {"threshold": threshold, "share": share}
    for name, value in given.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value <= 1):
            raise InputError(f"{name} must be above 0 and at most 1, not {short_repr(value)}")
    if method not in explanation.scores:
        raise InputError(f"{method!r} was not explained: the methods are {', '.join(explanation.methods)}")
    found = []
    for index in range(len(explanation)):
        maps = [_unit_map(explanation, method, index, number, photo_sizes) for number in _classes(explanation)]
        found.append([_mask(map_, threshold, share) for map_ in maps])
    return found


def _classes(explanation: Explanation) -> range:
    return range(explanation.classes_per_image)


def _unit_map(
    explanation: Explanation, method: str, index: int, target_index: int, photo_sizes: Sequence[Size] | None
) -> NDArray[np.float64]:
    """One map in 0..1; NaN outside the model's crop."""
    scores = explanation.scores_of(method, index, target_index).double()
    shown = scores.clamp(min=0) if explanation.signed[method] else scores
    grid, geometry = explanation.grid_of(method), explanation.geometry
    if photo_sizes is None:
        size = explanation.image_size
        return display_maps(shown, grid, size, signed=False, smooth=True, geometry=geometry).cpu().numpy()
    if len(photo_sizes) != len(explanation):
        raise InputError(f"there are {len(photo_sizes)} photo sizes for {len(explanation)} images")
    if explanation.preprocessing is None:
        raise InputError("photo_sizes needs the preprocessing of the images: explain images, not a tensor")
    height, width = photo_sizes[index]
    frame = explanation.preprocessing.frame((height, width))
    whole = np.full((height, width), np.nan)
    part = framed_maps(shown, grid, frame, signed=False, smooth=True, geometry=geometry)
    whole[frame.rows, frame.columns] = part.cpu().numpy()
    return whole


def _mask(map_: NDArray[np.float64], threshold: float, share: float | None) -> Mask:
    seen = np.isfinite(map_)
    if share is None:
        return seen & (np.where(seen, map_, -np.inf) >= threshold)
    values = np.where(seen, map_, -np.inf).ravel()
    highest = np.argsort(-values, kind="stable")[: max(1, round(share * int(seen.sum())))]
    mask = np.zeros(values.size, dtype=np.bool_)
    mask[highest] = True
    return mask.reshape(map_.shape)


# COCO -----------------------------------------------------------------------------------------------------------------


def to_coco(
    explanation: Explanation,
    method: str,
    file: str | os.PathLike[str] | None = None,
    *,
    form: Literal["rle", "polygon"] = "rle",
    threshold: float = 0.5,
    share: float | None = None,
    photo_sizes: Sequence[Size] | None = None,
    file_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return masks of the highest parts of maps as COCO instance annotations.

    Args:
        explanation: the explanation.
        method: one of its methods.
        file: JSON file to write; none by default.
        form: ``rle``: COCO's compressed run lengths; ``polygon``: outlines along pixel edges, with holes filled.
        threshold: see ``heatmap_masks``.
        share: see ``heatmap_masks``.
        photo_sizes: see ``heatmap_masks``.
        file_names: file names of the images; by default those of ``Explanation.save``, ``image-0.png`` and so on.

    Returns:
        The content: ``images``, ``categories`` (the explained classes), ``annotations``.
    """
    if form not in {"rle", "polygon"}:
        raise InputError(f"form={form!r} is not one of rle, polygon")
    masks = heatmap_masks(explanation, method, threshold=threshold, share=share, photo_sizes=photo_sizes)
    names = [f"image-{index}.png" for index in range(len(masks))] if file_names is None else list(file_names)
    if len(names) != len(masks):
        raise InputError(f"there are {len(names)} file names for {len(masks)} images")
    categories: dict[int, str] = {}
    annotations: list[dict[str, Any]] = []
    for index, of_image in enumerate(masks):
        for number, mask in enumerate(of_image):
            category = explanation.class_index(index, number)
            categories[category] = explanation.label(index, number)
            if mask.any():
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": index, "category_id": category, **_segment(mask, form)}
                )
    content = {
        "info": {
            "description": f"vitreous: {method}, {'threshold' if share is None else 'share'} "
            f"{threshold if share is None else share}"
        },
        "images": [
            {"id": index, "file_name": names[index], "height": of_image[0].shape[0], "width": of_image[0].shape[1]}
            for index, of_image in enumerate(masks)
        ],
        "categories": [{"id": number, "name": name} for number, name in sorted(categories.items())],
        "annotations": annotations,
    }
    if file is not None:
        with atomic_file(expanded(Path(file))) as draft:
            draft.write_text(json.dumps(content), encoding="utf-8")
    return content


def _segment(mask: Mask, form: str) -> dict[str, Any]:
    if form == "polygon":
        mask = _filled(mask)
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    top, left = int(rows[0]), int(columns[0])
    box = [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]
    segmentation = {"size": list(mask.shape), "counts": run_lengths(mask)} if form == "rle" else outlines(mask)
    return {"segmentation": segmentation, "area": int(mask.sum()), "bbox": box, "iscrowd": 0}


def run_lengths(mask: Mask) -> str:
    """Encode a mask as COCO's compressed run lengths: column by column, starting with zeros."""
    flat = np.concatenate([[False], mask.ravel(order="F")])
    counts = np.diff(np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]), [mask.size]])).tolist()
    text = []
    for place, count in enumerate(counts):
        # From the fourth on, the difference to the count two before: signed, five bits per character, lowest first.
        left = count - counts[place - 2] if place > 2 else count
        more = True
        while more:
            bits, left = left & 0x1F, left >> 5
            more = left != (-1 if bits & 0x10 else 0)
            text.append(chr(48 + (bits | 0x20 if more else bits)))
    return "".join(text)


def _filled(mask: Mask) -> Mask:
    """Fill the holes of a mask."""
    outside = np.zeros((mask.shape[0] + 2, mask.shape[1] + 2), dtype=np.bool_)
    free = ~np.pad(mask, 1)
    waiting = [(0, 0)]
    outside[0, 0] = True
    while waiting:
        row, column = waiting.pop()
        # Diagonal steps count: pixels of the mask that touch at a corner do not enclose a hole.
        for other in ((row + down, column + across) for down in (-1, 0, 1) for across in (-1, 0, 1)):
            inside = 0 <= other[0] < free.shape[0] and 0 <= other[1] < free.shape[1]
            if inside and free[other] and not outside[other]:
                outside[other] = True
                waiting.append(other)
    return ~outside[1:-1, 1:-1]


def outlines(mask: Mask) -> list[list[int]]:
    """Return the outlines of a mask without holes, along pixel edges, as alternating x and y of the corners."""
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    # Edges run clockwise around pixels: the direction of each, the pixel on its other side, and where it starts.
    directions = ((0, 1), (1, 0), (0, -1), (-1, 0))
    behind = (padded[:-2, 1:-1], padded[1:-1, 2:], padded[2:, 1:-1], padded[1:-1, :-2])
    starts = ((0, 0), (0, 1), (1, 1), (1, 0))
    edges: dict[tuple[int, int], set[int]] = {}
    for way, (other, (down, across)) in enumerate(zip(behind, starts, strict=True)):
        for row, column in np.argwhere(inside & ~other).tolist():
            edges.setdefault((row + down, column + across), set()).add(way)
    found = []
    while edges:
        start = min(edges)
        place, way, corners = start, -1, list[int]()
        while way < 0 or place != start:
            ways = edges[place]
            # Where two pixels touch at a corner, turning right stays with the same one.
            turned = next(turn for turn in (way + 1, way, way - 1, way + 2) if turn % 4 in ways) % 4
            ways.remove(turned)
            if not ways:
                del edges[place]
            if turned != way:
                corners += [place[1], place[0]]
            place, way = (place[0] + directions[turned][0], place[1] + directions[turned][1]), turned
        found.append(corners)
    return found


# VOC ------------------------------------------------------------------------------------------------------------------


def write_voc_masks(
    explanation: Explanation,
    method: str,
    directory: str | os.PathLike[str],
    *,
    threshold: float = 0.5,
    share: float | None = None,
    photo_sizes: Sequence[Size] | None = None,
    names: Sequence[str] | None = None,
) -> list[Path]:
    """Write masks of the highest parts of maps as indexed PNGs with the PASCAL VOC palette.

    A pixel is n in the mask of the n-th explained class of the image, and 0 elsewhere; later classes win overlaps.

    Args:
        explanation: the explanation.
        method: one of its methods.
        directory: the folder to write into, such as ``SegmentationObject``.
        threshold: see ``heatmap_masks``.
        share: see ``heatmap_masks``.
        photo_sizes: see ``heatmap_masks``.
        names: file names without suffix; ``image-0`` and so on by default.

    Returns:
        The files.
    """
    masks = heatmap_masks(explanation, method, threshold=threshold, share=share, photo_sizes=photo_sizes)
    stems = [f"image-{index}" for index in range(len(masks))] if names is None else list(names)
    if len(stems) != len(masks) or len(set(stems)) != len(stems):
        raise InputError(f"names must be {len(masks)} different names, one per image")
    if explanation.classes_per_image > 254:
        raise InputError("a VOC mask can hold at most 254 classes")
    files = []
    for stem, of_image in zip(stems, masks, strict=True):
        values = np.zeros(of_image[0].shape, dtype=np.uint8)
        for number, mask in enumerate(of_image, start=1):
            values[mask] = number
        picture = Image.fromarray(values)
        picture.putpalette(_voc_palette())
        file = expanded(Path(directory)) / f"{stem}.png"
        with atomic_file(file) as draft:
            picture.save(draft, format="PNG")
        files.append(file)
    return files


def _voc_palette() -> bytes:
    """VOC palette: the bits of the index, distributed over the channels from the highest bit on."""
    colours = np.zeros((256, 3), dtype=np.uint8)
    for index in range(256):
        for bit in range(8):
            for channel in range(3):
                colours[index, channel] |= ((index >> (3 * bit + channel)) & 1) << (7 - bit)
    return colours.tobytes()


# HDF5 and zarr --------------------------------------------------------------------------------------------------------


def write_maps(explanation: Explanation, file: str | os.PathLike[str]) -> Path:
    """Write the maps of all methods to HDF5 (``.h5``, ``.hdf5``) or zarr (``.zarr``).

    The arrays ``maps/0``, ``maps/1``, ... have shape (batch, rows, columns), or (batch, k, rows, columns) for k
    classes, and the spelling in their attribute ``method``. The file also has ``target`` and ``logits``; the rest is in
    attributes. Images are not written.

    Args:
        explanation: the explanation; its targets must be classes.
        file: the file, which is replaced; for zarr a folder that must not exist.

    Examples:
        >>> from vitreous.integrations.formats import read_maps, write_maps
        >>> read_maps(write_maps(explanation, "maps.h5")).methods == explanation.methods
        True
    """
    if explanation.targets:
        raise InputError("targets that are not classes cannot be written to this format: use explanation.save(folder)")
    place = expanded(Path(file))
    if place.suffix in {".h5", ".hdf5"}:
        h5py = _package("h5py", "formats")
        with atomic_file(place) as draft, h5py.File(draft, "w") as opened:
            _fill(opened, explanation, lambda group, name, values: group.create_dataset(name, data=values))
    elif place.suffix == ".zarr":
        if place.exists():
            raise StorageError(f"{place} exists already")
        zarr = _package("zarr", "formats")
        with atomic_folder(place, overwrite=False) as draft:
            root = zarr.open_group(str(draft), mode="w")
            _fill(root, explanation, lambda group, name, values: group.create_array(name, data=values))
    else:
        raise InputError(f"{place.name}: the suffix must be .h5, .hdf5 or .zarr")
    return place


def _fill(root: Any, explanation: Explanation, put: Callable[[Any, str, NDArray[Any]], Any]) -> None:
    root.attrs["format"], root.attrs["version"] = "vitreous-maps", _VERSION
    details = {
        "methods": list(explanation.methods),
        "signed": dict(explanation.signed),
        "grid": explanation.grid,
        "image_size": explanation.image_size,
        "class_names": explanation.class_names,
        "scale": explanation.scale,
        "provenance": dict(explanation.provenance),
    }
    root.attrs["details"] = json.dumps(details)
    put(root, "target", explanation.target.cpu().numpy())
    put(root, "logits", _array(explanation.logits))
    maps = root.create_group("maps")
    for number, method in enumerate(explanation.methods):
        scores = _array(explanation.scores[method])
        values = scores.reshape(*scores.shape[:-1], *explanation.grid_of(method))
        written = put(maps, f"{number}", values)  # spellings may contain any character
        written.attrs["method"] = method
        written.attrs["signed"] = bool(explanation.signed[method])


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def read_maps(file: str | os.PathLike[str]) -> Explanation:
    """Read a file of ``write_maps``.

    Raises:
        StorageError: the file was not written by ``write_maps``, or is damaged.
    """
    place = expanded(Path(file))
    if not place.exists():
        raise StorageError(f"{place} does not exist")
    if place.suffix == ".zarr":
        zarr = _package("zarr", "formats")
        with errors_as(StorageError, f"{place} cannot be read"):
            return _explanation(zarr.open_group(str(place), mode="r"), place)
    h5py = _package("h5py", "formats")
    with errors_as(StorageError, f"{place} cannot be read"), closing(h5py.File(place, "r")) as opened:
        return _explanation(opened, place)


def _explanation(root: Any, place: Path) -> Explanation:
    if root.attrs.get("format") != "vitreous-maps" or root.attrs.get("version") != _VERSION:
        raise StorageError(f"{place} was not written by vitreous.integrations.formats.write_maps")
    details = json.loads(root.attrs["details"])
    target = torch.from_numpy(np.array(root["target"]))
    maps = {method: torch.from_numpy(np.array(root[f"maps/{at}"])) for at, method in enumerate(details["methods"])}
    return Explanation(
        scores={method: values.flatten(target.dim()) for method, values in maps.items()},
        grid=tuple(details["grid"]),
        target=target,
        logits=torch.from_numpy(np.array(root["logits"])),
        image_size=tuple(details["image_size"]),
        signed=details["signed"],
        class_names=details["class_names"],
        scale=details["scale"],
        provenance=details["provenance"],
    )


# FiftyOne -------------------------------------------------------------------------------------------------------------


def add_fiftyone_heatmaps(
    samples: Iterable[Any], explanation: Explanation, methods: Sequence[str] | None = None, *, prefix: str = "vitreous"
) -> None:
    """Add maps to FiftyOne samples as ``Heatmap`` labels, one field per method; samples of a dataset are saved.

    A heatmap covers the whole image at no more than 512 pixels and is 0 outside the model's crop. Its range is 0..1;
    negative scores are clamped.

    Args:
        samples: one sample per explained image, in order, such as a view of a dataset.
        explanation: explanation of the images at their ``filepath``, for one class each.
        methods: the methods to add; all by default.
        prefix: prefix of the field names.
    """
    fiftyone = _package("fiftyone", "fiftyone")
    given = list(samples)
    if len(given) != len(explanation):
        raise InputError(f"there are {len(given)} samples for {len(explanation)} explained images")
    sizes = [_heatmap_size(sample) for sample in given]
    for method in explanation.methods if methods is None else methods:
        field = f"{prefix}_{''.join(letter if letter.isalnum() else '_' for letter in method)}"
        for index, sample in enumerate(given):
            placed = None if explanation.preprocessing is None else sizes
            map_ = np.nan_to_num(_unit_map(explanation, method, index, 0, placed))
            sample[field] = fiftyone.Heatmap(map=map_.astype(np.float32), range=[0, 1])
    for sample in given:
        if getattr(sample, "in_dataset", False):
            sample.save()


def _heatmap_size(sample: Any) -> Size:
    metadata = getattr(sample, "metadata", None)
    width, height = getattr(metadata, "width", None), getattr(metadata, "height", None)
    if not width or not height:
        with Image.open(sample.filepath) as photo:
            width, height = photo.size
    factor = min(1, _LONGEST_HEATMAP / max(width, height))
    return max(1, round(height * factor)), max(1, round(width * factor))


def _package(name: str, extra: str) -> Any:
    from importlib import import_module  # noqa: PLC0415

    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f'{name} is not installed: pip install "vitreous[{extra}]"') from error
