"""The kind ``imagenet-s``: ImageNet-S, validation photos of ImageNet with the classes of their pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitreous.datasets.dataset import Mask
from vitreous.datasets.files import FileDataSet, Item, by_stem, photo_names
from vitreous.datasets.imagenet import imagenet_indices, imagenet_names, wordnet_folders
from vitreous.datasets.lists import read_list
from vitreous.datasets.masks import read_values, renumbered
from vitreous.errors import DataError

_PHOTOS = "validation"
_MASKS = "validation-segmentation"
_IGNORED = 1000
_SIZES = (50, 300, 919)


class ImageNetS(FileDataSet):
    """ImageNet-S 50, 300 or 919: photos and masks in folders called by WordNet numbers.

    A mask stores red + 256 green: 0 for background, 1000 for what is not counted, else the place of the class among
    the set's sorted WordNet numbers, from 1. The label is the class of the photo's folder.
    """

    kind = "imagenet-s"
    summary = f"ImageNet-S: {_PHOTOS}/ and {_MASKS}/ with a folder per WordNet number"
    origin = "ImageNet-S comes from https://github.com/LUSSeg/ImageNet-S and needs ImageNet's own photos"

    def _list(self) -> Sequence[Item]:
        for folder in (_PHOTOS, _MASKS):
            if not (self.path / folder).is_dir():
                raise self._error(f"there is no folder {folder}")
        numbers = wordnet_folders(self.path / _MASKS)
        known = imagenet_indices()
        self._classes = [known[number] for number in self._categories(numbers)]
        items = []
        for number in numbers:
            photos = by_stem(photo_names(self.path / _PHOTOS / number))
            masks = by_stem(photo_names(self.path / _MASKS / number))
            items += [
                Item(
                    f"{number}/{stem}",
                    f"{_PHOTOS}/{number}/{photos.get(stem, f'{stem}.JPEG')}",
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
        yield ",".join(map(str, self._classes))  # what the numbers in the masks mean, which another list changes
        yield from super()._records()

    def _categories(self, folders: list[str]) -> list[str]:
        """Return the set's classes in the order of their numbers in the masks."""
        known = imagenet_indices()
        if unknown := [number for number in folders if number not in known]:
            raise self._error(f"the folder {_MASKS}/{unknown[0]} is none of ImageNet's 1000 classes")
        # Folders may be some of a larger set, whose list tells which number is whose.
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
    """Return the classes of every list in a folder that is one of ImageNet-S, in the order of their numbers."""
    read = {file: sorted(read_list(file).split()) for file in sorted(place.glob("ImageNetS_categories_im*.txt"))}
    known = imagenet_indices()
    return {file: listed for file, listed in read.items() if len(listed) in _SIZES and set(listed) <= set(known)}
