"""Segmentation of the foreground by a map, as Chefer et al. and SkipPLUS measure it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vitreous.evaluation.tasks.batch import Case, PhotoBatch, Picture, enlarged
from vitreous.evaluation.tasks.task import Explained, MissingAnnotationError, PhotoTask, Values, label_of
from vitreous.float64 import in_float64
from vitreous.metrics import segmentation as counts
from vitreous.metrics.metric import Floats, Metric, row

Segmented = Explained | Literal["largest object"]
Upsampling = Literal["bilinear", "nearest"]


@dataclass(frozen=True)
class Segmentation(PhotoTask):
    """Foreground and background by one threshold per map.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mask.
        scaling: Of the map, before it is thresholded.
        threshold: What is foreground.
        mask_resize: How the mask gets the size of the model's input.
        foreground: What of the mask.
        ignored: Pixels of the mask that do not count.
    """

    kind: ClassVar[str] = "segmentation"

    explained: Segmented = "predicted"
    upsampling: Upsampling = "bilinear"
    scaling: Literal["min-max per map"] = "min-max per map"
    threshold: Literal["strictly above the mean"] = "strictly above the mean"
    mask_resize: Literal["nearest"] = "nearest"
    foreground: Literal["all objects"] = "all objects"
    ignored: Literal[-1] = -1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return counts.pixel_accuracy(), counts.two_class_map(), counts.mean_iou()

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (segmented_class(picture, self.explained),)

    def measure(self, batch: PhotoBatch, cases: Sequence[Case]) -> list[Values]:
        maps = maps_of_pixels(batch, cases, self.explained, self.upsampling)
        return [self.count(map_, mask_of(batch.pictures[case.image])) for map_, case in zip(maps, cases, strict=True)]

    def count(self, map_: Floats, mask: NDArray[np.int16]) -> Values:
        """The columns of one map that has the size of its mask."""
        values = row(counts.COUNTS, counts.count_pixels(counts.above_mean(map_), mask))
        return values | {"two_class_average_precision": counts.two_class_average_precision(map_, mask)}


@dataclass(frozen=True)
class AveragePrecision(PhotoTask):
    """Average precision of every map against its mask.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mask.
        mask_resize: How the mask gets the size of the model's input.
        foreground: What of the mask; all objects where their classes are not known.
        ignored: Pixels of the mask that do not count.
    """

    kind: ClassVar[str] = "average precision"

    explained: Segmented = "largest object"
    upsampling: Upsampling = "nearest"
    mask_resize: Literal["nearest"] = "nearest"
    foreground: Literal["objects of the explained class"] = "objects of the explained class"
    ignored: Literal[-1] = -1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (counts.mean_average_precision(),)

    @property
    def uses_labels(self) -> bool:
        """The foreground is the objects of the explained class, whichever that is."""
        return True

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (segmented_class(picture, self.explained),)

    def measure(self, batch: PhotoBatch, cases: Sequence[Case]) -> list[Values]:
        maps = maps_of_pixels(batch, cases, self.explained, self.upsampling)
        values = []
        for map_, case in zip(maps, cases, strict=True):
            picture = batch.pictures[case.image]
            mask = mask_of_class(picture, segmented_class(picture, self.explained))
            values.append({"average_precision": counts.mask_average_precision(map_, mask)})
        return values


def maps_of_pixels(
    batch: PhotoBatch, cases: Sequence[Case], explained: Segmented, upsampling: Upsampling
) -> Iterator[Floats]:
    """The maps of some cases at the size of the model's input, in float64, so that ties are only those of the map."""
    for case in cases:
        map_ = batch.map_of(case, segmented_class(batch.pictures[case.image], explained))
        runner = batch.runner
        yield enlarged(in_float64(map_[None]), runner.size, upsampling, runner.geometry)[0].cpu().numpy()


def mask_of(picture: Picture) -> NDArray[np.int16]:
    """The mask of a photo.

    Raises:
        MissingAnnotationError: it has none, or no pixel of it counts.
    """
    if picture.mask is None:
        raise MissingAnnotationError("the photo has no mask")
    if not (picture.mask >= 0).any():
        raise MissingAnnotationError("the mask has no pixel that counts")
    return picture.mask


def mask_of_class(picture: Picture, target: int) -> NDArray[np.int16]:
    """1 where an object of a class is, 0 elsewhere, -1 what does not count."""
    mask = mask_of(picture)
    numbers = [number for number, known in enumerate(picture.objects, start=1) if known == target]
    # A mask that names no classes has one kind of object, and that is what is looked for.
    wanted = np.isin(mask, numbers) if any(known is not None for known in picture.objects) else mask > 0
    return np.where(mask < 0, mask, wanted.astype(np.int16)).astype(np.int16)


def segmented_class(picture: Picture, explained: Segmented) -> int:
    """The class whose map is held against the mask.

    Raises:
        MissingAnnotationError: the mask, or the class, is not known.
    """
    mask = mask_of(picture)
    if explained == "predicted":
        return picture.predicted
    if explained == "label":
        return label_of(picture)
    areas: dict[int, int] = {}
    for number, known in enumerate(picture.objects, start=1):
        if known is not None and 0 <= known < picture.classes:
            areas[known] = areas.get(known, 0) + int((mask == number).sum())
    if not any(areas.values()):
        return label_of(picture)
    return max(areas, key=lambda known: (areas[known], -known))
