"""Mosaics of photos of different classes, made of any data set with labels: it is known exactly where a class is."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from PIL import Image

from vitreous.datasets.dataset import DataSet, DerivedDataSet, Review, Sample
from vitreous.errors import DataError

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


def _photo(sample: Sample | Review) -> Sample:
    assert isinstance(sample, Sample)
    return sample
