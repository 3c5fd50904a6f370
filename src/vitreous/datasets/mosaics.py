"""Mosaics of photos of different classes, made of any data set with labels: exact truth about where a class is."""

from __future__ import annotations

import hashlib

import numpy as np
from PIL import Image

from vitreous.datasets.dataset import DataSet, DerivedDataSet, Review, Sample
from vitreous.errors import DataError

_CELL = 224  # pixels of a photo in a mosaic, before the model's own resizing


class Mosaics(DerivedDataSet):
    """For every photo of a data set a square of photos, with that photo in one cell and other classes in all others.

    A mosaic has the name and the label of its photo, and a mask of the photo's cell. Which photos stand around it, and
    where it stands, depends on its name and on ``cells`` alone. Photos are squashed to the cells.

    Args:
        listed: photos with labels.
        cells: in each direction.

    Raises:
        DataError: there are too few classes, or no labels.
    """

    form = "in mosaics of"

    def __init__(self, listed: DataSet, cells: int) -> None:
        super().__init__(listed, cells)
        self._cells = cells
        self._labels = listed.labels() or [_photo(listed.load(index)).label for index in range(len(listed))]
        known = {label for label in self._labels if label is not None}
        if len(known) < cells**2:
            raise DataError(
                f"{listed.path}: a mosaic of {cells} x {cells} needs photos of {cells**2} classes, and those of "
                f"{listed.kind} have labels of {len(known)}"
            )
        self._of_class: dict[int, list[int]] = {label: [] for label in sorted(known)}
        for index, label in enumerate(self._labels):
            if label is not None:
                self._of_class[label].append(index)

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
        members, place = self._plan(index, label)
        mosaic = Image.new("RGB", (_CELL * self._cells, _CELL * self._cells))
        mask = np.zeros((_CELL * self._cells, _CELL * self._cells), dtype=np.int16)
        for cell, member in enumerate(members):
            top, left = (_CELL * part for part in divmod(cell, self._cells))
            photo = sample if cell == place else _photo(self._listed.load(member))
            mosaic.paste(photo.image.convert("RGB").resize((_CELL, _CELL), Image.Resampling.BICUBIC), (left, top))
            if cell == place:
                mask[top : top + _CELL, left : left + _CELL] = 1
        return Sample(sample.name, mosaic, label, mask, (label,))

    def _plan(self, index: int, label: int) -> tuple[list[int], int]:
        """The photos of all cells, and the cell of the photo itself."""
        seed = hashlib.sha256(f"mosaic {self._cells}|{self.name(index)}".encode()).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:8], "big")))
        others = [each for each in self._of_class if each != label]
        chosen = random.choice(len(others), self._cells**2 - 1, replace=False)
        members = [int(random.choice(self._of_class[others[place]])) for place in chosen]
        place = int(random.integers(self._cells**2))
        return [*members[:place], index, *members[place:]], place


def _photo(sample: Sample | Review) -> Sample:
    assert isinstance(sample, Sample)
    return sample
