"""The kind ``imagenet``: the ImageNet (ILSVRC 2012) validation images, in folders or flat with a label file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from vitreous.datasets.files import (
    IMAGENET_CLASSES,
    TABLE,
    FileDataSet,
    Item,
    ListError,
    add_label,
    image_names,
    number_in,
    read_labels,
    read_list,
    read_table,
)
from vitreous.errors import MissingDependencyError

KAGGLE = "LOC_val_solution.csv"
CAFFE = "val.txt"
DEVKIT = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
CLASS_MAP = "map_clsloc.txt"
SYNSETS = "imagenet_2012_validation_synset_labels.txt"
FILES = (KAGGLE, CAFFE, DEVKIT, SYNSETS, TABLE)
_BELOW = (".", "ILSVRC2012_devkit_t12/data", "devkit/data", "data")
# Where the images may be below the given folder: directly, or as torchvision, the archive and Kaggle have it.
_IMAGE_FOLDERS = (".", "val", "validation", "ILSVRC2012_img_val", "ILSVRC/Data/CLS-LOC/val", "Data/CLS-LOC/val")


@cache
def imagenet_names() -> tuple[str, ...]:
    """Return the name of every class in index order."""
    from timm.data.imagenet_info import ImageNetInfo  # noqa: PLC0415  (timm takes a second to import)

    return tuple(ImageNetInfo("imagenet-1k").label_descriptions())


@cache
def imagenet_indices() -> dict[str, int]:
    """Return the class index of every WordNet ID, such as n01440764."""
    from timm.data.imagenet_info import ImageNetInfo  # noqa: PLC0415

    numbers: list[str] = ImageNetInfo("imagenet-1k").label_names()  # type: ignore[no-untyped-call]
    return {number: index for index, number in enumerate(numbers)}


def is_wordnet_number(text: str) -> bool:
    """Whether a text has the form of a WordNet ID, such as n01440764."""
    return len(text) == 9 and text[0] == "n" and text[1:].isdecimal()


def read_validation_labels(*places: Path) -> dict[str, int] | None:
    """Return the class index of every image by stem; None without a label file.

    Args:
        places: Folders to search, with their parents and a development kit in them.

    Raises:
        ListError: The file is damaged, or its class order is not defined by the files present.
    """
    readers = (_read_kaggle, _read_caffe, _read_devkit, _read_synsets, _read_labels)
    for name, read in zip(FILES, readers, strict=True):
        for folder in _folders(places):
            if (folder / name).is_file():
                return read(folder / name)
    return None


def _folders(places: tuple[Path, ...]) -> Iterator[Path]:
    for place in places:
        for start in (place, place.parent):
            yield from (start / below for below in _BELOW)


def _read_kaggle(file: Path) -> dict[str, int]:
    """Read ``ILSVRC2012_val_00048981,n03995372 85 1 499 272``: a WordNet ID, then boxes."""
    known = imagenet_indices()
    labels: dict[str, int] = {}
    for number, row in enumerate(read_table(file), start=1):
        if number == 1 and row and row[0] == "ImageId":
            continue
        word = row[1].split()[:1] if len(row) == 2 else []
        if not word or word[0] not in known:
            raise ListError(f"{file}, line {number}: this is not an image's name and a WordNet ID")
        add_label(labels, row[0], known[word[0]], f"{file}, line {number}")
    return labels


def _read_caffe(file: Path) -> dict[str, int]:
    """Read ``ILSVRC2012_val_00000001.JPEG 65``: the class index, from 0, in the order of the sorted WordNet IDs.

    Some copies have the WordNet ID instead, ``ILSVRC2012_val_00000001.JPEG n01751748``.
    """
    known = imagenet_indices()
    labels: dict[str, int] = {}
    by_index: bool | None = None  # decided by the first line
    for number, words in _lines(read_list(file)):
        index = number_in(words[1]) if len(words) == 2 else None
        is_index = index is not None and index < IMAGENET_CLASSES
        if not is_index and (len(words) != 2 or words[1] not in known):
            raise ListError(
                f"{file}, line {number}: this is not an image's name and an index below {IMAGENET_CLASSES} or a "
                f"WordNet ID of the {IMAGENET_CLASSES} classes"
            )
        by_index = is_index if by_index is None else by_index
        if is_index != by_index:
            raise ListError(f"{file}, line {number}: indices and WordNet IDs are mixed")
        stem = words[0].rpartition("/")[2].partition(".")[0]
        label = known[words[1]] if index is None or not is_index else index
        add_label(labels, stem, label, f"{file}, line {number}")
    return labels


def _read_devkit(file: Path) -> dict[str, int]:
    """Read one ILSVRC2012_ID per line for images 1, 2, ...: from 1, in the order of the development kit."""
    indices = _devkit_order(file.parent)
    labels = {}
    for number, words in _lines(read_list(file)):
        label = indices.get(number_in(words[0]) or 0) if len(words) == 1 else None
        if label is None:
            raise ListError(f"{file}, line {number}: this is not a class number from 1 to {IMAGENET_CLASSES}")
        labels[f"ILSVRC2012_val_{number:08d}"] = label
    return labels


def _read_synsets(file: Path) -> dict[str, int]:
    """Read one WordNet ID per line for images 1, 2, ..."""
    known = imagenet_indices()
    labels = {}
    for number, words in _lines(read_list(file)):
        if len(words) != 1 or words[0] not in known:
            raise ListError(f"{file}, line {number}: this is not a WordNet ID of the {IMAGENET_CLASSES} classes")
        labels[f"ILSVRC2012_val_{number:08d}"] = known[words[0]]
    return labels


def _read_labels(file: Path) -> dict[str, int]:
    """Read a table of files and class indices or names."""
    labels: dict[str, int] = {}
    for name, index in read_labels(file, imagenet_names()).labels.items():
        if index >= IMAGENET_CLASSES:
            raise ListError(f"{file}: {name} has class {index}, and there are {IMAGENET_CLASSES} classes")
        add_label(labels, name.rpartition("/")[2].partition(".")[0], index, str(file))
    return labels


def _devkit_order(folder: Path) -> dict[int, int]:
    """Return the class index of every ILSVRC2012_ID, from the files of the development kit."""
    if (folder / CLASS_MAP).is_file():
        numbers = _read_class_map(folder / CLASS_MAP)
    elif (folder / META).is_file():
        numbers = _read_meta(folder / META)
    else:
        raise ListError(
            f"{folder / DEVKIT}: its class numbers are in the development kit's own order, which needs {META} or "
            f"{CLASS_MAP} beside it"
        )
    known = imagenet_indices()
    if sorted(numbers) != list(range(1, IMAGENET_CLASSES + 1)) or set(numbers.values()) != set(known):
        raise ListError(f"{folder}: the development kit does not describe the {IMAGENET_CLASSES} classes")
    return {number: known[word] for number, word in numbers.items()}


def _read_class_map(file: Path) -> dict[int, str]:
    """Read ``n02119789 1 kit_fox``."""
    numbers = {}
    # The class names after the numbers are unused and may have any encoding.
    for number, words in _lines(file.read_text(encoding="utf-8", errors="replace")):
        label = number_in(words[1]) if len(words) > 1 else None
        if label is None or not is_wordnet_number(words[0]):
            raise ListError(f"{file}, line {number}: this is not a WordNet ID and a class number")
        numbers[label] = words[0]
    return numbers


def _read_meta(file: Path) -> dict[int, str]:
    """Read ``meta.mat`` of the development kit; the leaves of its hierarchy are the classes."""
    try:
        matlab: Any = import_module("scipy.io")  # an extra
    except ImportError as error:
        raise MissingDependencyError(f'{file} needs scipy to be read: pip install "vitreous[datasets]"') from error
    try:
        synsets = matlab.loadmat(file, squeeze_me=True, variable_names=["synsets"])["synsets"]
        leaves = synsets[synsets["num_children"] == 0]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}
    except Exception as error:  # damaged files can raise any exception
        raise ListError(
            f"{file}: this is not the table of the ILSVRC 2012 development kit, or a damaged one"
        ) from error


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the words of each line that is not empty."""
    for number, line in enumerate(text.split("\n"), start=1):
        if words := line.split():
            yield number, words


class ImageNet(FileDataSet):
    """The ImageNet validation images with the usual class indices."""

    kind = "imagenet"
    summary = f"ImageNet validation: a folder per WordNet ID, or flat with one of {', '.join(FILES)}"
    origin = "ImageNet (ILSVRC 2012, validation images and development kit) comes from https://www.image-net.org"

    def _list(self) -> Sequence[Item]:
        if not self.path.is_dir():
            raise self._error("this is not a folder")
        places = [self.path / folder for folder in _IMAGE_FOLDERS]
        # Class folders take precedence everywhere: there may be a stray image above them.
        for place in places:
            if numbers := wordnet_folders(place):
                self.root = place
                return self._in_folders(numbers)
        for place in places:
            if images := image_names(place):
                self.root = place
                return self._flat(images)
        raise self._error("there are neither images nor folders such as n01440764 in it or in its folder val")

    @property
    def class_names(self) -> tuple[str, ...]:
        return imagenet_names()

    def _in_folders(self, numbers: list[str]) -> list[Item]:
        known = imagenet_indices()
        if unknown := [number for number in numbers if number not in known]:
            raise self._error(f"the folder {unknown[0]} is none of the 1000 classes")
        files = [(number, name) for number in numbers for name in image_names(self.root / number)]
        return [Item(f"{number}/{name}", f"{number}/{name}", known[number]) for number, name in files]

    def _flat(self, images: list[str]) -> list[Item]:
        labels = read_validation_labels(self.path, self.root)
        if labels is None:
            raise self._error(f"its images are not in folders, and there is no label file ({', '.join(FILES)})")
        stems = [(name, name.partition(".")[0]) for name in images]
        if unlabelled := [name for name, stem in stems if stem not in labels]:
            raise self._error(f"the label file does not list {unlabelled[0]}")
        return [Item(name, name, labels[stem]) for name, stem in stems]


def wordnet_folders(place: Path) -> list[str]:
    """Return the sorted names of folders such as n01440764; empty if there is no such place."""
    if not place.is_dir():
        return []
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if is_wordnet_number(entry.name) and entry.is_dir())
