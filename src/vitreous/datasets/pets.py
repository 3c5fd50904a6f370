"""The kind ``pets``: Oxford-IIIT Pet with its trimaps, in the original layout or as a copy with a ``labels.csv``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitreous.datasets.dataset import IGNORED, Mask
from vitreous.datasets.files import (
    IMAGENET_COLUMN,
    TABLE,
    FileDataSet,
    Item,
    ListError,
    add_label,
    by_stem,
    image_names,
    number_in,
    read_indices,
    read_labels,
    read_list,
    stem_of,
)
from vitreous.datasets.imagenet import imagenet_names
from vitreous.errors import DataError

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
