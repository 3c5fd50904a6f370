"""Data sets in plain folders: ``masks``, ``labelled``, ``volumes``, ``mura``; and mosaics of any data set with labels.

MURA is a folder of radiographs of the upper limb, labelled normal or abnormal. A mosaic has photos of different
classes, so that it is known exactly where a class is.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from vitreous.datasets.dataset import AnySample, DataSet, DerivedDataSet, Mask, Sample, VolumeSample
from vitreous.datasets.files import (
    NAMES,
    TABLE,
    FileDataSet,
    Item,
    ListError,
    by_stem,
    content_hashes,
    image_names,
    read_class_names,
    read_labels,
    read_list,
    read_nonzero,
    stem_of,
)
from vitreous.errors import DataError, ImageError
from vitreous.inputs.volumes import frame_files

_SUFFIX = "_mask"


class MaskedFolder(FileDataSet):
    """``images/`` and ``masks/`` with equal names, or ``NAME.jpg`` next to ``NAME_mask.png``.

    Black is background and everything else is the object. A ``labels.csv`` may name the object's class.
    """

    kind = "masks"
    summary = "images/ and masks/ with equal names, or NAME.jpg beside NAME_mask.png; black is background"
    origin = "such a set is a folder of your own images in images/ with masks of the same names in masks/"

    def _list(self) -> Sequence[Item]:
        items = self._two_folders() if (self.path / "images").is_dir() else self._side_by_side()
        if items and not any((self.path / item.mask).is_file() for item in items if item.mask):
            raise self._error("none of its images has a mask")
        self._names = read_class_names(self.path / NAMES)
        labels = self._labels()
        return [item._replace(label=labels.get(item.name, labels.get(stem_of(item.name)))) for item in items]

    # An image without a mask stays in the list, so that it is reported and not silently dropped.

    def _two_folders(self) -> list[Item]:
        if not (self.path / "masks").is_dir():
            raise self._error("there is no folder masks beside images")
        images, masks = image_names(self.path / "images"), by_stem(image_names(self.path / "masks"))
        found = [(file, masks.get(stem_of(file), f"{stem_of(file)}.png")) for file in images]
        return [Item(file, f"images/{file}", mask=f"masks/{mask}") for file, mask in found]

    def _side_by_side(self) -> list[Item]:
        files = image_names(self.path)
        stems = by_stem(files)
        images = [file for file in files if not stem_of(file).endswith(_SUFFIX)]
        masks = [f"{stem_of(file)}{_SUFFIX}" for file in images]
        return [Item(file, file, mask=stems.get(mask, f"{mask}.png")) for file, mask in zip(images, masks, strict=True)]

    def _labels(self) -> dict[str, int]:
        """Return the label of each image by file name, and by stem if it is unique."""
        self._classes: int | None = None
        if not (self.path / TABLE).is_file():
            return {}
        listed = read_labels(self.path / TABLE, self._names)
        self._classes = listed.classes(self._names)
        files = [name.rpartition("/")[2] for name in listed.labels]
        self._refuse_repeated(files, f" in {TABLE}")
        labels = dict(zip(files, listed.labels.values(), strict=True))
        # An image may be listed without its suffix, or with the suffix of its mask, if no other has the same stem.
        stems = Counter(map(stem_of, files))
        return {stem_of(file): label for file, label in labels.items() if stems[stem_of(file)] == 1} | labels

    def _read_mask(self, item: Item) -> tuple[Mask, tuple[int | None, ...]]:
        assert item.mask is not None
        return read_nonzero(self.root / item.mask), (item.label,)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._names

    @property
    def classes(self) -> int | None:
        return self._classes


class Labelled(FileDataSet):
    """Images next to or below a ``labels.csv``; a ``class_names.json`` next to it names the classes."""

    kind = "labelled"
    summary = "a folder of images with a labels.csv (columns such as file and class_index)"
    origin = "such a set is a folder of your own images with a labels.csv that has the columns file and class_index"

    def _list(self) -> Sequence[Item]:
        folder = self.path if self.path.is_dir() else self.path.parent
        table = next((place / TABLE for place in (folder, folder.parent) if (place / TABLE).is_file()), None)
        if table is None:
            raise self._error(f"there is no {TABLE} in it or above it")
        self._names = read_class_names(table.parent / NAMES)
        listed = read_labels(table, self._names)
        labels, self._classes = listed.labels, listed.classes(self._names)
        places = (table.parent, folder, table.parent / "images")  # that names in the table may be relative to
        candidates = ((place, _files(place, labels)) for place in places)
        found = next((each for each in candidates if any(_is_file(each[0] / file) for file in each[1])), None)
        if found is None:
            raise self._error(f"none of the {len(labels)} images that {TABLE} names is there")
        self.root, files = found
        return [Item(name, file, label) for file, (name, label) in zip(files, labels.items(), strict=True)]

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._names

    @property
    def classes(self) -> int | None:
        return self._classes


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:  # not a valid file name
        return False


def _files(folder: Path, names: Collection[str]) -> list[str]:
    """Return the file of each name; a table may omit suffixes."""
    complete = all(stem_of(name) != name for name in names)
    found = {} if complete else by_stem(image_names(folder))
    return [found.get(name, name) for name in names]


class Volumes(DataSet):
    """Volumes or clips below a ``labels.csv``; a ``class_names.json`` next to it names the classes."""

    kind = "volumes"
    holds = "volumes"
    summary = (
        "a folder of volumes (.nii, .npy, DICOM) or of folders of frames, with a labels.csv (file and class_index)"
    )
    origin = "such a set is a folder of your own volumes with a labels.csv that has the columns file and class_index"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        if not (self.path / TABLE).is_file():
            raise self._error(f"there is no {TABLE} in it")
        try:
            self._names = read_class_names(self.path / NAMES)
            listed = read_labels(self.path / TABLE, self._names)
        except ListError as error:
            raise self._error(str(error)) from error
        except OSError as error:
            raise self._unreadable(error) from error
        self._labels, self._classes = list(listed.labels.items()), listed.classes(self._names)
        if not any((self.path / name).exists() for name, _ in self._labels):
            raise self._error(f"none of the {len(self._labels)} volumes that {TABLE} names is there")

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return self._labels[index][0]

    def load(self, index: int) -> VolumeSample:
        name, label = self._labels[index]
        if not (self.path / name).exists():
            raise ImageError(f"{self.path / name}: there is no such file or folder of frames")
        return VolumeSample(name, self.path / name, label)

    def labels(self) -> list[int | None]:
        return [label for _, label in self._labels]

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._names

    @property
    def classes(self) -> int | None:
        return self._classes

    def _records(self) -> Iterator[str]:
        for name, label in self._labels:
            place = self.path / name
            files = frame_files(place) if place.is_dir() else [place]
            yield "|".join(map(str, (name, label, *(file.name for file in files), *content_hashes(files))))


_FOLDER = "MURA-v1.1"
_LIST = "valid_image_paths.csv"
_LABELS = {"negative": 0, "positive": 1}


class Mura(FileDataSet):
    """The validation split of MURA-v1.1; the folder of a study ends in ``positive`` (abnormal) or ``negative``."""

    kind = "mura"
    summary = f"MURA-v1.1: {_LIST} and valid/; label 1 for positive (abnormal) studies"
    origin = "MURA comes from https://stanfordmlgroup.github.io/competitions/mura"

    def _list(self) -> Sequence[Item]:
        self.root = next((p for p in (self.path, self.path / _FOLDER) if (p / _LIST).is_file()), self.path)
        if not (self.root / _LIST).is_file():
            raise self._error(f"there is no {_LIST}")
        if not (self.root / "valid").is_dir():
            raise self._error("there is no folder valid")
        lines = read_list(self.root / _LIST).splitlines()
        return [self._item(line.strip(), number) for number, line in enumerate(lines, start=1) if line.strip()]

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(_LABELS)

    def _item(self, line: str, number: int) -> Item:
        """Read ``MURA-v1.1/valid/XR_WRIST/patient11185/study1_positive/image1.png``."""
        parts = PurePosixPath(line).parts
        inside = parts[1:] if parts[:1] == (_FOLDER,) else parts
        answer = inside[-2].rpartition("_")[2] if len(inside) > 1 else ""
        if answer not in _LABELS or ".." in inside or inside[0] != "valid":
            raise self._error(f"line {number} of {_LIST} does not name an image of a positive or negative study")
        file = "/".join(inside)
        return Item(file, file, _LABELS[answer])


_CELL = 224  # pixels of a photo in a mosaic, before the model's own resizing


class Mosaics(DerivedDataSet):
    """For every photo of a data set a square mosaic that shows it together with photos of other classes.

    A mosaic has the name and the label of its photo, and a mask of the cells of its class. The other photos and the
    arrangement depend on the photo's name and the two settings alone. Photos are squashed to the cells.

    Args:
        listed: photos with labels.
        cells: in each direction.
        classes: how many classes a mosaic shows, each in equally many cells; ``None`` for one class per cell.

    Raises:
        DataError: there are too few classes, or no labels.
    """

    def __init__(self, listed: DataSet, cells: int, classes: int | None = None) -> None:
        super().__init__(listed, cells)
        self._cells, self._shown = cells, cells**2 if classes is None else classes
        if self._shown < 2 or cells**2 % self._shown:
            raise DataError(f"{cells**2} cells cannot show {self._shown} classes in equally many cells each")
        self._labels = listed.labels() or [_photo(listed.load(index)).label for index in range(len(listed))]
        known = {label for label in self._labels if label is not None}
        if len(known) < self._shown:
            raise DataError(
                f"{listed.path}: a mosaic of {cells} x {cells} needs photos of {self._shown} classes, and those of "
                f"{listed.kind} have labels of {len(known)}"
            )
        self._of_class: dict[int, list[int]] = {label: [] for label in sorted(known)}
        for index, label in enumerate(self._labels):
            if label is not None:
                self._of_class[label].append(index)

    @property
    def form(self) -> str:  # type: ignore[override]
        """What is different from the underlying data set."""
        return "in mosaics of" if self._shown == self._cells**2 else f"with {self._shown} classes in mosaics of"

    def name(self, index: int) -> str:
        return self._listed.name(index)

    def labels(self) -> list[int | None] | None:
        return self._labels

    def load(self, index: int) -> Sample:
        """Read a photo and those around it; one without a label stands alone and has no mask."""
        sample = _photo(self._listed.load(index))
        label = self._labels[index]
        if label is None:
            return Sample(sample.name, sample.image)
        mosaic = Image.new("RGB", (_CELL * self._cells, _CELL * self._cells))
        mask = np.zeros((_CELL * self._cells, _CELL * self._cells), dtype=np.int16)
        for cell, member in enumerate(self._plan(index, label)):
            top, left = (_CELL * part for part in divmod(cell, self._cells))
            photo = sample if member == index else _photo(self._listed.load(member))
            mosaic.paste(photo.image.convert("RGB").resize((_CELL, _CELL), Image.Resampling.BICUBIC), (left, top))
            if self._labels[member] == label:
                mask[top : top + _CELL, left : left + _CELL] = 1
        return Sample(sample.name, mosaic, label, mask, (label,))

    def _plan(self, index: int, label: int) -> list[int]:
        """The photos of all cells."""
        seed = hashlib.sha256(f"mosaic {self._cells}|{self.name(index)}".encode()).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:8], "big")))
        others = [each for each in self._of_class if each != label]
        chosen = random.choice(len(others), self._shown - 1, replace=False)
        if self._shown == self._cells**2:
            members = [int(random.choice(self._of_class[others[place]])) for place in chosen]
            place = int(random.integers(self._cells**2))
            return [*members[:place], index, *members[place:]]
        each = self._cells**2 // self._shown
        own = [other for other in self._of_class[label] if other != index] or [index]
        members = [index, *_draw(random, own, each - 1)]
        for place in chosen:
            members += _draw(random, self._of_class[others[place]], each)
        return [members[place] for place in random.permutation(len(members))]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._listed, self._cells, self._shown)


def _draw(random: np.random.Generator, photos: list[int], count: int) -> list[int]:
    """Some photos of a class; none twice if there are enough."""
    return [int(photo) for photo in random.choice(photos, count, replace=len(photos) < count)]


def _photo(sample: AnySample) -> Sample:
    assert isinstance(sample, Sample)
    return sample
