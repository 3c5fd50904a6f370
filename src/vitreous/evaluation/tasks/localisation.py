"""Whether a map lies on the object: pointing game, energy in the mask, and rank accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.evaluation.tasks.batch import Case, PhotoBatch, Picture
from vitreous.evaluation.tasks.segmentation import Segmented, Upsampling, maps_of_pixels, mask_of, segmented_class
from vitreous.evaluation.tasks.task import PhotoTask, Values
from vitreous.metrics import localisation
from vitreous.metrics.metric import Metric


@dataclass(frozen=True)
class Localisation(PhotoTask):
    """Where the maximum, the positive relevance and the most relevant pixels of a map lie.

    Attributes:
        explained: The class whose map is measured.
        upsampling: How a map of patches gets the size of the mask.
        tolerance: How many pixels beside an object still count as on it, for the maximum.
        mask_resize: How the mask gets the size of the model's input.
        foreground: What of the mask.
        ignored: Pixels of the mask that do not count.
    """

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

    def measure(self, batch: PhotoBatch, cases: Sequence[Case]) -> list[Values]:
        found = []
        for case, map_ in zip(cases, maps_of_pixels(batch, cases, self.explained, self.upsampling), strict=True):
            mask = mask_of(batch.pictures[case.image])
            found.append(
                {
                    "pointing_game": localisation.pointing_game(map_, mask, self.tolerance),
                    "energy_in_mask": localisation.energy_in_mask(map_, mask),
                    "rank_accuracy": localisation.rank_accuracy(map_, mask),
                }
            )
        return found
