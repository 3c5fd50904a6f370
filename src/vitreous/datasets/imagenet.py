"""The kind ``imagenet``: the ImageNet (ILSVRC 2012) validation photos, in folders or flat with a label file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vitreous.datasets.files import FileDataSet, Item, photo_names
from vitreous.datasets.imagenet_classes import imagenet_indices, imagenet_names, is_wordnet_number
from vitreous.datasets.imagenet_labels import FILES, read_validation_labels

# Where the photos are below the folder asked for: itself, torchvision's, the archive's, Kaggle's.
_PHOTO_FOLDERS = (".", "val", "validation", "ILSVRC2012_img_val", "ILSVRC/Data/CLS-LOC/val", "Data/CLS-LOC/val")


class ImageNet(FileDataSet):
    """ImageNet's validation photos with the class index that every ImageNet model uses."""

    kind = "imagenet"
    summary = f"ImageNet validation: a folder per WordNet number, or flat with one of {', '.join(FILES)}"
    origin = "ImageNet (ILSVRC 2012, validation images and development kit) comes from https://www.image-net.org"

    def _list(self) -> Sequence[Item]:
        if not self.path.is_dir():
            raise self._error("this is not a folder")
        places = [self.path / folder for folder in _PHOTO_FOLDERS]
        # Folders come first everywhere, for a stray picture may lie above them.
        for place in places:
            if numbers := wordnet_folders(place):
                self.root = place
                return self._in_folders(numbers)
        for place in places:
            if photos := photo_names(place):
                self.root = place
                return self._flat(photos)
        raise self._error("there are neither photos nor folders such as n01440764 in it or in its folder val")

    @property
    def class_names(self) -> tuple[str, ...]:
        return imagenet_names()

    def _in_folders(self, numbers: list[str]) -> list[Item]:
        known = imagenet_indices()
        if unknown := [number for number in numbers if number not in known]:
            raise self._error(f"the folder {unknown[0]} is none of the 1000 classes")
        files = [(number, name) for number in numbers for name in photo_names(self.root / number)]
        return [Item(f"{number}/{name}", f"{number}/{name}", known[number]) for number, name in files]

    def _flat(self, photos: list[str]) -> list[Item]:
        labels = read_validation_labels(self.path, self.root)
        if labels is None:
            raise self._error(f"its photos are not in folders, and there is no label file ({', '.join(FILES)})")
        stems = [(name, name.partition(".")[0]) for name in photos]
        if unlabelled := [name for name, stem in stems if stem not in labels]:
            raise self._error(f"the label file says nothing of {unlabelled[0]}")
        return [Item(name, name, labels[stem]) for name, stem in stems]


def wordnet_folders(place: Path) -> list[str]:
    """Return the folders that are called like n01440764, sorted; an absent place has none."""
    if not place.is_dir():
        return []
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if is_wordnet_number(entry.name) and entry.is_dir())
