"""The kind ``voc``: the PASCAL VOC 2012 segmentation validation set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitreous.datasets.dataset import Mask
from vitreous.datasets.files import FileDataSet, Item, read_indices, read_list, renumbered

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
