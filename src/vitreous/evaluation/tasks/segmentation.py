"""Agreement of a map with a mask: segmentation by one or several thresholds, average precision and localisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vitreous._utils.torch_state import in_float64
from vitreous.evaluation.tasks.task import (
    Case,
    Explained,
    ImageBatch,
    ImageTask,
    MissingAnnotationError,
    Picture,
    Purpose,
    Values,
    enlarged,
    label_of,
)
from vitreous.metrics import localisation
from vitreous.metrics import segmentation as counts
from vitreous.metrics.metric import Floats, Metric, min_max, row
from vitreous.metrics.segmentation import (
    GRADTOKEN_THRESHOLDS,
    best_threshold,
    held_out_threshold,
    in_its_half,
    threshold_prefix,
)

Segmented = Explained | Literal["largest object"]
Upsampling = Literal["bilinear", "nearest"]

Search = Literal["highest mIoU"]
HeldOut = Literal["each half of the photos, by the hash of their names, has the threshold of the other"]
OF_THE_OTHER_HALF: HeldOut = "each half of the photos, by the hash of their names, has the threshold of the other"


@dataclass(frozen=True)
class Segmentation(ImageTask):
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

    purpose: ClassVar[Purpose] = "localisation"
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

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        maps = maps_of_pixels(batch, cases, self.explained, self.upsampling)
        return [self.count(map_, mask_of(batch.pictures[case.image])) for map_, case in zip(maps, cases, strict=True)]

    def count(self, map_: Floats, mask: NDArray[np.int16]) -> Values:
        """The columns of one map that has the size of its mask."""
        values = row(counts.COUNTS, counts.count_pixels(counts.above_mean(map_), mask))
        return values | counts.two_class_map().row(counts.two_class_average_precision(map_, mask))


@dataclass(frozen=True)
class AveragePrecision(ImageTask):
    """Average precision of every map against its mask.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mask.
        mask_resize: How the mask gets the size of the model's input.
        foreground: What of the mask; all objects where their classes are not known.
        ignored: Pixels of the mask that do not count.
    """

    purpose: ClassVar[Purpose] = "localisation"
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

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        maps = maps_of_pixels(batch, cases, self.explained, self.upsampling)
        values = []
        for map_, case in zip(maps, cases, strict=True):
            picture = batch.pictures[case.image]
            mask = mask_of_class(picture, segmented_class(picture, self.explained))
            values.append(counts.mean_average_precision().row(counts.mask_average_precision(map_, mask)))
        return values


@dataclass(frozen=True)
class GridPointing(ImageTask):
    """Grid Pointing Game: how much of a map lies in the cell of a mosaic that shows the explained class.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mosaic.
        share: What is measured of the cell.
    """

    purpose: ClassVar[Purpose] = "localisation"
    kind: ClassVar[str] = "grid pointing game"

    explained: Explained = "label"
    upsampling: Upsampling = "nearest"
    share: Literal["of the positive scores"] = "of the positive scores"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return localisation.mean_grid_share(), localisation.mean_grid_hit()

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (segmented_class(picture, self.explained),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        shares, hits = self.metrics
        found = []
        for map_, case in zip(maps_of_pixels(batch, cases, self.explained, self.upsampling), cases, strict=True):
            cell = mask_of(batch.pictures[case.image])
            share = shares.row(localisation.energy_in_mask(map_, cell))
            found.append(share | hits.row(localisation.pointing_game(map_, cell)))
        return found


def maps_of_pixels(
    batch: ImageBatch, cases: Sequence[Case], explained: Segmented, upsampling: Upsampling
) -> Iterator[Floats]:
    """The maps of some cases at the size of the model's input, in float64, so that ties are only those of the map."""
    for case in cases:
        map_ = batch.map_of(case, segmented_class(batch.pictures[case.image], explained))
        runner = batch.runner
        yield enlarged(in_float64(map_[None]), runner.size, upsampling, runner.geometry)[0].cpu().numpy()


def mask_of(picture: Picture) -> NDArray[np.int16]:
    """The mask of a image.

    Raises:
        MissingAnnotationError: it has none, or no pixel of it counts.
    """
    if picture.mask is None:
        raise MissingAnnotationError("the image has no mask")
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


@dataclass(frozen=True)
class Localisation(ImageTask):
    """Where the maximum, the positive relevance and the most relevant pixels of a map lie.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mask.
        tolerance: How many pixels beside an object still count as on it, for the maximum.
        mask_resize: How the mask gets the size of the model's input.
        foreground: What of the mask.
        ignored: Pixels of the mask that do not count.
    """

    purpose: ClassVar[Purpose] = "localisation"
    kind: ClassVar[str] = "localisation"

    explained: Segmented = "predicted"
    upsampling: Upsampling = "bilinear"
    tolerance: int = 0
    mask_resize: Literal["nearest"] = "nearest"
    foreground: Literal["all objects"] = "all objects"
    ignored: Literal[-1] = -1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return localisation.pointing_accuracy(), localisation.mean_energy_in_mask(), localisation.mean_rank_accuracy()

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (segmented_class(picture, self.explained),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        found = []
        for case, map_ in zip(cases, maps_of_pixels(batch, cases, self.explained, self.upsampling), strict=True):
            mask = mask_of(batch.pictures[case.image])
            pointing, energy, rank = self.metrics
            found.append(
                pointing.row(localisation.pointing_game(map_, mask, self.tolerance))
                | energy.row(localisation.energy_in_mask(map_, mask))
                | rank.row(localisation.rank_accuracy(map_, mask))
            )
        return found


@dataclass(frozen=True)
class ThresholdSearch(ImageTask):
    """Foreground and background by one threshold for all maps of a method.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mask.
        scaling: Of the map, before it is thresholded.
        thresholds: What is searched; foreground is strictly above.
        chosen_by: Which threshold is best.
        held_out: How the threshold beside the best one is chosen.
        mask_resize: How the mask gets the size of the model's input.
        foreground: What of the mask.
        ignored: Pixels of the mask that do not count.
    """

    purpose: ClassVar[Purpose] = "localisation"
    kind: ClassVar[str] = "segmentation with a searched threshold"

    explained: Segmented = "predicted"
    upsampling: Upsampling = "bilinear"
    scaling: Literal["min-max per map"] = "min-max per map"
    thresholds: tuple[float, ...] = GRADTOKEN_THRESHOLDS
    chosen_by: Search = "highest mIoU"
    held_out: HeldOut = OF_THE_OTHER_HALF
    mask_resize: Literal["nearest"] = "nearest"
    foreground: Literal["all objects"] = "all objects"
    ignored: Literal[-1] = -1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        made = (counts.pixel_accuracy, counts.mean_iou)
        best = tuple(best_threshold(metric, self.thresholds) for metric in made)
        return *best, *(held_out_threshold(metric, self.thresholds) for metric in made), counts.two_class_map()

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (segmented_class(picture, self.explained),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        maps = maps_of_pixels(batch, cases, self.explained, self.upsampling)
        return [self._count(batch.pictures[case.image], map_) for map_, case in zip(maps, cases, strict=True)]

    def _count(self, picture: Picture, map_: Floats) -> Values:
        mask = mask_of(picture)
        values: Values = {}
        found = counts.count_at_thresholds(map_, mask, self.thresholds)
        for threshold, each in zip(self.thresholds, found, strict=True):
            values |= row([f"{threshold_prefix(threshold)}{name}" for name in counts.COUNTS], each)
        precision = counts.two_class_map().row(counts.two_class_average_precision(map_, mask))
        return in_its_half(picture.name, values) | precision


@dataclass(frozen=True)
class ClassSegmentation(ImageTask):
    """Every pixel gets the class whose map is highest there, or none.

    Attributes:
        classes: How many there are, background included.
        explained: The classes whose maps are made.
        outputs: Which output of the model stands for a class.
        upsampling: How maps of patches get the size of the mask.
        scaling: Of each map, before maps are compared and thresholded.
        pixel: The class of a pixel; where no map lies strictly above the threshold it is background.
        thresholds: What is searched.
        chosen_by: Which threshold is best.
        held_out: How the threshold beside the best one is chosen.
        mask_resize: How the mask gets the size of the model's input.
        ignored: Pixels of the mask that do not count.
    """

    purpose: ClassVar[Purpose] = "localisation"
    kind: ClassVar[str] = "segmentation of several classes"

    classes: int = 21
    explained: Literal["all classes of the mask"] = "all classes of the mask"
    outputs: Literal["class n is output n; output n + 1 where output 0 is background"] = (
        "class n is output n; output n + 1 where output 0 is background"
    )
    upsampling: Upsampling = "bilinear"
    scaling: Literal["min-max per map"] = "min-max per map"
    pixel: Literal["the class of the highest map above the threshold"] = (
        "the class of the highest map above the threshold"
    )
    thresholds: tuple[float, ...] = GRADTOKEN_THRESHOLDS
    chosen_by: Search = "highest mIoU"
    held_out: HeldOut = OF_THE_OTHER_HALF
    mask_resize: Literal["nearest"] = "nearest"
    ignored: Literal[-1] = -1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        made = [partial(make, self.classes) for make in (counts.classes_pixel_accuracy, counts.classes_mean_iou)]
        chosen_by = made[1]
        best = tuple(best_threshold(metric, self.thresholds, chosen_by=chosen_by) for metric in made)
        return *best, *(held_out_threshold(metric, self.thresholds, chosen_by=chosen_by) for metric in made)

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return tuple(known + self._shift(picture) for known in self._present(picture))

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        return [self._count(batch, case) for case in cases]

    def _count(self, batch: ImageBatch, case: Case) -> Values:
        picture = batch.pictures[case.image]
        present, shift = self._present(picture), self._shift(picture)
        maps = [in_float64(batch.map_of(case, known + shift)[None]) for known in present]
        size, geometry = batch.runner.size, batch.runner.geometry
        enlarged_maps = (enlarged(map_, size, self.upsampling, geometry).cpu().numpy() for map_ in maps)
        scaled = np.concatenate([min_max(map_) for map_ in enlarged_maps])
        highest, best = scaled.max(axis=0), np.array(present)[scaled.argmax(axis=0)] + 1
        truth = self._truth(picture)
        values: Values = {}
        for threshold in self.thresholds:
            columns = counts.class_columns(self.classes, threshold_prefix(threshold))
            predicted = np.where(highest > threshold, best, 0)
            values |= row(columns, counts.count_classes(predicted, truth, self.classes))
        return in_its_half(picture.name, values)

    def _truth(self, picture: Picture) -> NDArray[np.int64]:
        """0 for background, class + 1 for objects, -1 for pixels that do not count or whose class is not known."""
        classes = [0, *(-1 if known is None else known + 1 for known in picture.objects), -1]
        return np.array(classes)[mask_of(picture)]

    def _present(self, picture: Picture) -> list[int]:
        """The classes of the mask, in order."""
        mask = mask_of(picture)
        objects = enumerate(picture.objects, start=1)
        present = sorted({known for number, known in objects if known is not None and (mask == number).any()})
        if not present:
            raise MissingAnnotationError("the mask has no object whose class is known")
        if present[-1] >= self.classes - 1:
            raise MissingAnnotationError(f"the mask has the class {present[-1]}, and there are {self.classes - 1}")
        return present

    def _shift(self, picture: Picture) -> int:
        shift = picture.classes - (self.classes - 1)
        if shift not in (0, 1):
            raise MissingAnnotationError(
                f"the model has {picture.classes} outputs; {self.classes - 1} or {self.classes} are needed, one for "
                "every class, with or without background"
            )
        return shift
