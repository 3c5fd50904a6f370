"""Data sets with masks: ImageNet-Segmentation, Oxford-IIIT Pets and Pascal VOC."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from vitreous._utils.messages import error_message, errors_as
from vitreous.datasets.dataset import IGNORED, DataSet, Mask, Sample
from vitreous.datasets.files import (
    IMAGENET_COLUMN,
    TABLE,
    FileDataSet,
    Item,
    ListError,
    add_label,
    by_stem,
    check_mask,
    image_names,
    number_in,
    read_indices,
    read_labels,
    read_list,
    read_values,
    renumbered,
    stem_of,
)
from vitreous.datasets.imagenet import imagenet_indices, imagenet_names, wordnet_folders
from vitreous.errors import DataError, MissingDependencyError
from vitreous.inputs.images import MAX_PIXELS

_FILE = "gtsegs_ijcv.mat"


class ImageNetSegmentation(DataSet):
    """4,276 ImageNet images with a mask of their object.

    The file is a Matlab 7.3 file: cell arrays are arrays of references, axes are stored in reverse order, and each
    entry of ``gt`` is a cell whose first entry is the mask. The optional ``id`` names the image after its class
    (n01440764_10026). A class outside of the 1000 of ILSVRC gives no label.
    """

    kind = "imagenet-seg"
    summary = f"ImageNet-Segmentation: the file {_FILE} (extra vitreous[datasets])"
    origin = f"{_FILE} comes from http://calvin-vision.net/bigstuff/proj-imagenet/data"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._file_path = self.path / _FILE if self.path.is_dir() else self.path
        if not self._file_path.is_file():
            raise self._error(f"there is no {_FILE} in it")
        with errors_as(DataError, f"{self._file_path}: the file is damaged"):
            self._read_index()

    def _read_index(self) -> None:
        """Open the file and read the references of images and masks."""
        self._file = self._open()
        self._images, self._masks = (self._cells(name) for name in ("img", "gt"))
        if len(self._images) != len(self._masks):
            raise self._error(f"there are {len(self._images)} images, but {len(self._masks)} masks")
        if not len(self._images):
            raise self._error("it holds no images")
        self._ids = self._read_ids()

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        number = range(len(self))[index]
        identifier = self._ids[number]
        return f"{number:04d}-{identifier}" if identifier else f"{number:04d}"

    def load(self, index: int) -> Sample:
        name, label = self.name(index), self._label(index)
        where = f"{self._file_path}, image {name}"
        try:
            image = self._read_image(self._file[self._images[index]], where)
            cell = self._file[self._masks[index]]
            # In the published file an entry is a cell; a mask without the cell is accepted too.
            stored = self._file[cell[0, 0]] if cell.dtype == object else cell
            mask = self._read_mask(stored, where)
        except DataError:
            raise
        except Exception as error:  # damaged bytes can raise any exception
            raise DataError(f"{where}: it cannot be read ({error_message(error)})") from error
        check_mask(mask, image, Path(where))
        return Sample(name, image, label, mask, (label,))

    @property
    def class_names(self) -> tuple[str, ...]:
        return imagenet_names()

    def _records(self) -> Iterator[str]:
        with self._file_path.open("rb") as file:
            yield hashlib.file_digest(file, "sha256").hexdigest()
        for index in range(len(self)):
            yield self.name(index)

    def _open(self) -> Any:
        try:
            h5py = import_module("h5py")  # an extra
        except ImportError as error:
            raise MissingDependencyError('imagenet-seg needs h5py: pip install "vitreous[datasets]"') from error
        try:
            return h5py.File(self._file_path, "r")
        except Exception as error:  # damaged bytes can raise any exception
            raise self._error("it is not an HDF5 file (Matlab 7.3), or a damaged one") from error

    def _cells(self, name: str) -> Any:
        """Return the references of a cell array."""
        try:
            return self._file[f"value/{name}"][:].reshape(-1)
        except Exception as error:
            raise self._error(f"there is no /value/{name} in the file") from error

    def _read_ids(self) -> list[str | None]:
        """Return the ImageNet name of each image, if the file has them."""
        if "value/id" not in self._file:
            return [None] * len(self)
        cells = self._cells("id")
        if len(cells) != len(self):
            raise self._error(f"there are {len(self)} images, but {len(cells)} names")
        try:
            return [_text(self._file[cell]) for cell in cells]
        except Exception as error:  # damaged references and codes can raise any exception
            raise self._error(f"the names in /value/id cannot be read ({error_message(error)})") from error

    def _label(self, index: int) -> int | None:
        return imagenet_indices().get((self._ids[index] or "").partition("_")[0])

    def _read_image(self, stored: Any, where: str) -> Image.Image:
        if stored.dtype != np.uint8 or stored.ndim not in {2, 3} or (stored.ndim == 3 and stored.shape[0] != 3):
            _refuse(stored, where, "image")
        _check_size(stored, where)
        return Image.fromarray(np.ascontiguousarray(stored[()].T)).convert("RGB")

    def _read_mask(self, stored: Any, where: str) -> Mask:
        if stored.dtype.kind not in "uifb" or stored.ndim != 2:
            _refuse(stored, where, "mask")
        _check_size(stored, where)
        values = stored[()].T
        mask: Mask = np.where(values < 0, IGNORED, values != 0).astype(np.int16)  # -1 is ignored
        return mask


def _text(stored: Any) -> str:
    """Read a Matlab string (16-bit codes in a column), reduced to the characters of file names."""
    characters = [chr(code) for code in stored[()].reshape(-1)[:100]]
    return "".join(character for character in characters if character.isalnum() or character in "_-.")


def _check_size(stored: Any, where: str) -> None:
    if stored.size > 3 * MAX_PIXELS:
        raise DataError(f"{where}: more than {MAX_PIXELS:,} pixels, refused")


def _refuse(stored: Any, where: str, what: str) -> NoReturn:
    raise DataError(f"{where}: {stored.dtype} of shape {stored.shape} is not a {what}")


_IMAGES = "validation"
_MASKS = "validation-segmentation"
_IGNORED = 1000
_SIZES = (50, 300, 919)


class ImageNetS(FileDataSet):
    """ImageNet-S 50, 300 or 919: images and masks in one folder per WordNet ID.

    A mask stores red + 256 green: 0 for background, 1000 for ignored pixels, otherwise the position of the class among
    the sorted WordNet IDs of the data set, from 1. The label is the class of the image's folder.
    """

    kind = "imagenet-s"
    summary = f"ImageNet-S: {_IMAGES}/ and {_MASKS}/ with a folder per WordNet ID"
    origin = "ImageNet-S comes from https://github.com/LUSSeg/ImageNet-S and needs ImageNet's own images"

    def _list(self) -> Sequence[Item]:
        for folder in (_IMAGES, _MASKS):
            if not (self.path / folder).is_dir():
                raise self._error(f"there is no folder {folder}")
        numbers = wordnet_folders(self.path / _MASKS)
        known = imagenet_indices()
        self._classes = [known[number] for number in self._categories(numbers)]
        items = []
        for number in numbers:
            images = by_stem(image_names(self.path / _IMAGES / number))
            masks = by_stem(image_names(self.path / _MASKS / number))
            items += [
                Item(
                    f"{number}/{stem}",
                    f"{_IMAGES}/{number}/{images.get(stem, f'{stem}.JPEG')}",
                    known[number],
                    f"{_MASKS}/{number}/{mask}",
                )
                for stem, mask in masks.items()
            ]
        return items

    @property
    def class_names(self) -> tuple[str, ...]:
        return imagenet_names()

    def _records(self) -> Iterator[str]:
        yield ",".join(map(str, self._classes))  # the meaning of the numbers in the masks depends on the class list
        yield from super()._records()

    def _categories(self, folders: list[str]) -> list[str]:
        """Return the WordNet IDs in the order of their numbers in the masks."""
        known = imagenet_indices()
        if unknown := [number for number in folders if number not in known]:
            raise self._error(f"the folder {_MASKS}/{unknown[0]} is none of ImageNet's 1000 classes")
        # The folders may be a subset of a larger data set, whose class list then defines the numbers.
        for place in (self.path, self.path.parent):
            fitting = {file: listed for file, listed in _lists(place).items() if set(folders) <= set(listed)}
            if folders in fitting.values():
                return folders
            if len(fitting) > 1:
                names = " and ".join(file.name for file in fitting)
                raise self._error(f"{names} in {place} hold all its classes and number them differently: keep its own")
            if fitting:
                return next(iter(fitting.values()))
        if len(folders) in _SIZES:
            return folders
        raise self._error(
            f"{_MASKS} has {len(folders)} folders instead of {', '.join(map(str, _SIZES))}, and there is no list "
            "ImageNetS_categories_im919.txt (or 300, 50) of all classes to number them by"
        )

    def _read_mask(self, item: Item) -> tuple[Mask, tuple[int | None, ...]]:
        assert item.mask is not None
        file = self.root / item.mask
        colours = read_values(file)
        if colours.ndim != 3:
            raise DataError(f"{file}: this mask is not in colours, so that it holds no classes")
        numbers = colours[..., 0].astype(np.int16) + 256 * colours[..., 1].astype(np.int16)
        return renumbered(numbers, self._classes, ignored=_IGNORED, file=file)


def _lists(place: Path) -> dict[Path, list[str]]:
    """Return the classes of every ImageNet-S class list in a folder, in the order of their numbers."""
    read = {file: sorted(read_list(file).split()) for file in sorted(place.glob("ImageNetS_categories_im*.txt"))}
    known = imagenet_indices()
    return {file: listed for file, listed in read.items() if len(listed) in _SIZES and set(listed) <= set(known)}


# Mask value by trimap value: 1 foreground, 2 background, 3 border.
_TRIMAP = np.array([IGNORED, 1, 0, IGNORED], dtype=np.int16)
_LISTS = ("test.txt", "list.txt")
_BREEDS = 37


class Pets(FileDataSet):
    """Oxford-IIIT Pet with its trimaps.

    In the original layout the label is the breed, 0 to 36, and the samples are the test split if it is listed. In a
    copy with a ``labels.csv`` the label is the one in the table, preferably an ImageNet index.
    """

    kind = "pets"
    summary = "Oxford-IIIT Pet: images/, annotations/trimaps/ and annotations/test.txt, or a copy with a labels.csv"
    origin = "Oxford-IIIT Pet (images.tar.gz, annotations.tar.gz) comes from https://www.robots.ox.ac.uk/~vgg/data/pets"

    def _list(self) -> Sequence[Item]:
        self._names: tuple[str, ...] | None = None
        self._classes: int | None
        self.root = next((p for p in (self.path, self.path / "oxford-iiit-pet") if (p / "images").is_dir()), self.path)
        if not (self.root / "images").is_dir():
            raise self._error("there is no folder images")
        return self._copy() if (self.root / TABLE).is_file() else self._original()

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return imagenet_names() if self._is_imagenet else self._names

    @property
    def classes(self) -> int | None:
        return self._classes

    def _copy(self) -> list[Item]:
        table = read_labels(self.root / TABLE)
        self._is_imagenet = table.column == IMAGENET_COLUMN
        self._classes = _BREEDS if table.column == "breed_index" else table.classes(None)
        stems = [stem_of(name.rpartition("/")[2]) for name in table.labels]
        self._refuse_repeated(stems)
        return self._items_of(dict(zip(stems, table.labels.values(), strict=True)), "trimaps")

    # Not torchvision.datasets.OxfordIIITPet: it imports torch, requires its own folder name, and does not report lines.
    def _original(self) -> list[Item]:
        self._is_imagenet = False
        self._classes = _BREEDS
        annotations = self.root / "annotations"
        found = next((annotations / name for name in _LISTS if (annotations / name).is_file()), None)
        if found is None:
            raise self._error("there is neither annotations/test.txt nor annotations/list.txt")
        labels = _read_list(found)
        names = {label: stem.rpartition("_")[0] for stem, label in labels.items()}
        if sorted(names) == list(range(_BREEDS)):
            self._names = tuple(names[label] for label in range(_BREEDS))
        return self._items_of(labels, "annotations/trimaps")

    def _items_of(self, labels: dict[str, int], trimaps: str) -> list[Item]:
        if not (self.root / trimaps).is_dir():
            raise self._error(f"there is no folder {trimaps}")
        files = by_stem(image_names(self.root / "images"))
        return [
            Item(stem, f"images/{files.get(stem, f'{stem}.jpg')}", label, f"{trimaps}/{stem}.png")
            for stem, label in labels.items()
        ]

    def _read_mask(self, item: Item) -> tuple[Mask, tuple[int | None, ...]]:
        assert item.mask is not None
        values = read_indices(self.root / item.mask)
        if values.min() < 1 or values.max() > 3:
            other = values.min() if values.min() < 1 else values.max()
            raise DataError(f"{self.root / item.mask}: a trimap holds 1, 2 and 3 only, not {other}")
        return _TRIMAP[values], (item.label,)


def _read_list(file: Path) -> dict[str, int]:
    """Read lines such as ``Abyssinian_100 1 1 1``: name, class number from 1, species, number of the breed."""
    labels: dict[str, int] = {}
    for number, line in enumerate(read_list(file).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        stem, *numbers = line.split()
        breed = number_in(numbers[0]) if numbers else None
        if breed is None or not 1 <= breed <= _BREEDS:
            raise ListError(
                f"{file}, line {number}: this is not an image's name and a class number from 1 to {_BREEDS}"
            )
        add_label(labels, stem, breed - 1, f"{file}, line {number}")
    return labels


CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)

_VOID = 255
_LIST = "ImageSets/Segmentation/val.txt"


class Voc(FileDataSet):
    """PASCAL VOC 2012 segmentation, validation split; the label is the class with the largest area."""

    kind = "voc"
    summary = f"PASCAL VOC 2012: VOCdevkit/VOC2012 with JPEGImages/, SegmentationClass/ and {_LIST}"
    origin = "PASCAL VOC 2012 comes from http://host.robots.ox.ac.uk/pascal/VOC/voc2012"

    # Not torchvision.datasets.VOCSegmentation: it imports torch, requires its own folder name, and trusts listed paths.
    def _list(self) -> Sequence[Item]:
        places = [self.path / below for below in (".", "VOC2012", "VOCdevkit/VOC2012")]
        self.root = next((place for place in places if (place / "JPEGImages").is_dir()), self.path)
        for folder in ("JPEGImages", "SegmentationClass"):
            if not (self.root / folder).is_dir():
                raise self._error(f"there is no folder {folder}")
        if not (self.root / _LIST).is_file():
            raise self._error(f"there is no {_LIST}")
        names = read_list(self.root / _LIST).split()
        if strange := [name for name in names if not name.replace("_", "").isalnum()]:
            raise self._error(f"{_LIST} holds {strange[0]!r}, which is not an image's name")
        return [Item(name, f"JPEGImages/{name}.jpg", mask=f"SegmentationClass/{name}.png") for name in names]

    @property
    def class_names(self) -> tuple[str, ...]:
        return CLASSES

    def _read_mask(self, item: Item) -> tuple[Mask, tuple[int | None, ...]]:
        assert item.mask is not None
        file = self.root / item.mask
        return renumbered(read_indices(file), range(len(CLASSES)), ignored=_VOID, file=file)

    def _label(self, _item: Item, mask: Mask, objects: tuple[int | None, ...]) -> int | None:
        areas = np.bincount(mask[mask > 0], minlength=len(objects) + 1)[1:]
        return objects[int(areas.argmax())] if objects else None
