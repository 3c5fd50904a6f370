"""``measure``: photos in, one row of numbers out for every photo and method, under one protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vitreous.anatomy import find_anatomy
from vitreous.benchmark.tasks.batch import Batch, Case, Picture
from vitreous.benchmark.tasks.task import MissingAnnotationError, Task, Values
from vitreous.datasets.sample import IGNORED, Sample
from vitreous.errors import VitreousError
from vitreous.explaining import explain
from vitreous.models import LoadedModel, Preprocessing, TwoSided
from vitreous.pixels import find_pixels
from vitreous.protocols.protocol import Protocol, Resize
from vitreous.subject import Subject

Row = dict[str, str | int | float | None]

# Photos are measured so many at a time, and their maps are made from tapes of so many: enough to keep a processor
# busy, few enough that the tapes of all blocks of a large model fit into memory.
_MEASURED_TOGETHER = 16
_EXPLAINED_TOGETHER = 8


def columns_of(protocol: Protocol) -> tuple[str, ...]:
    """The names of all numbers in a row."""
    return tuple(dict.fromkeys(column for task in protocol.tasks for column in task.columns))


def measure(model: LoadedModel, samples: Sequence[Sample], protocol: Protocol, methods: Sequence[str]) -> list[Row]:
    """Measure the maps of all methods on some photos.

    All methods share tapes. What a row says does not depend on the other photos, beyond rounding.

    Args:
        model: What is explained.
        samples: The photos.
        protocol: How it is measured.
        methods: Spellings, as ``protocol.spellings`` gives them.

    Returns:
        One row per photo and method, photos in order: ``image``, ``method``, ``error`` (a sentence where it could not
        be measured) and the protocol's columns. Where a protocol has several tasks and a photo lacks what one of them
        has to know (a label, a mask), the columns of that task are None.
    """
    fitted = replace(model, preprocessing=resized(model.preprocessing, protocol.resize))
    rows: list[Row] = []
    for first in range(0, len(samples), _MEASURED_TOGETHER):
        rows += _rows(fitted, samples[first : first + _MEASURED_TOGETHER], protocol, methods)
    return rows


def _rows(model: LoadedModel, samples: Sequence[Sample], protocol: Protocol, methods: Sequence[str]) -> list[Row]:
    """Rows of a few photos; one that cannot be prepared does not take part, so that it spoils no other."""
    prepared: list[Tensor | str] = [_pixels(model, sample) for sample in samples]
    usable = [number for number, pixels in enumerate(prepared) if isinstance(pixels, Tensor)]
    measurement = _Measurement(model, [samples[number] for number in usable], protocol, methods)
    measurement.measure(torch.cat([pixels for pixels in prepared if isinstance(pixels, Tensor)]) if usable else None)
    rows: list[Row] = []
    for number, (sample, pixels) in enumerate(zip(samples, prepared, strict=True)):
        for method in methods:
            if isinstance(pixels, str):
                rows.append(_row(protocol, sample.name, method, {}, pixels))
            else:
                case = Case(usable.index(number), method)
                rows.append(
                    _row(protocol, sample.name, method, measurement.values.get(case, {}), measurement.errors.get(case))
                )
    return rows


def _row(protocol: Protocol, image: str, method: str, values: Values, error: str | None) -> Row:
    row: Row = {"image": image, "method": method, "error": error}
    known = {} if error is not None else values
    return row | {column: known.get(column) for column in columns_of(protocol)}


def _pixels(model: LoadedModel, sample: Sample) -> Tensor | str:
    """The model's input for one photo, or what is wrong with it."""
    try:
        return find_pixels(model, model.model, [sample.image])[0]
    except VitreousError as error:
        return str(error)


def resized(preprocessing: Preprocessing, resize: Resize) -> Preprocessing:
    """A model's preprocessing with the protocol's way to resize."""
    return preprocessing if resize == "model" else replace(preprocessing, resize="squash", resize_size=None)


@dataclass
class _Measurement:
    """A few photos on their way from samples to rows."""

    model: LoadedModel
    samples: Sequence[Sample]
    protocol: Protocol
    methods: Sequence[str]
    values: dict[Case, Values] = field(default_factory=dict)
    errors: dict[Case, str] = field(default_factory=dict)

    def measure(self, pixels: Tensor | None) -> None:
        """Fill ``values`` and ``errors``."""
        try:
            if pixels is not None:
                self._measure(pixels)
        except VitreousError as error:
            self._fail(range(len(self.samples)), str(error))

    def _measure(self, pixels: Tensor) -> None:
        subject, logits = _first_run(self.model, pixels)
        if logits.shape[1] == 1:  # one logit for "yes" has two answers that can be right, and be explained
            self.model = replace(self.model, model=TwoSided(self.model.model).eval())
            subject, logits = _first_run(self.model, pixels)
        pictures = tuple(self._picture(sample, row) for sample, row in zip(self.samples, logits, strict=True))
        wanted = [self._targets(image, picture) for image, picture in enumerate(pictures)]
        maps: dict[Case, dict[int, Tensor]] = {}
        for images in _alike([len(set().union(*targets.values())) for targets in wanted]):
            maps |= self._maps(pixels, images, [sorted(set().union(*wanted[image].values())) for image in images])
        batch = Batch(self.model, subject, pictures, logits, maps)
        for task in self.protocol.tasks:
            cases = [case for case in maps if task in wanted[case.image] and case not in self.errors]
            self._ask(task, batch, sorted(cases, key=lambda case: (case.image, self.methods.index(case.method))))

    def _picture(self, sample: Sample, logits: Tensor) -> Picture:
        mask = sample.mask
        return Picture(
            name=sample.name,
            predicted=int(logits.argmax()),
            classes=len(logits),
            label=sample.label,
            mask=None if mask is None else self.model.preprocessing.displayed_mask(mask, outside=IGNORED),
            objects=sample.objects,
        )

    def _targets(self, image: int, picture: Picture) -> dict[Task, frozenset[int]]:
        """The classes that each task wants to see explained; tasks that lack an annotation are left out."""
        wanted: dict[Task, frozenset[int]] = {}
        reasons: list[str] = []
        for task in self.protocol.tasks:
            try:
                wanted[task] = frozenset(task.targets(picture))
            except MissingAnnotationError as error:
                reasons.append(str(error))
        if not wanted:
            self._fail([image], "; ".join(dict.fromkeys(reasons)))
        return wanted

    def _maps(self, pixels: Tensor, images: Sequence[int], targets: list[list[int]]) -> dict[Case, dict[int, Tensor]]:
        """Maps of all methods for a few photos, each for equally many classes."""
        try:
            return self._explained(pixels, images, targets, self.methods)
        except VitreousError:
            pass  # one method cannot do it: find out which, and go on with the others
        maps: dict[Case, dict[int, Tensor]] = {}
        for method in self.methods:
            try:
                maps |= self._explained(pixels, images, targets, [method])
            except VitreousError as error:
                self.errors |= {Case(image, method): str(error) for image in images}
        return maps

    def _explained(
        self, pixels: Tensor, images: Sequence[int], targets: list[list[int]], methods: Sequence[str]
    ) -> dict[Case, dict[int, Tensor]]:
        explanation = explain(self.model, pixels[list(images)], methods, target=torch.tensor(targets))
        maps: dict[Case, dict[int, Tensor]] = {}
        for method, scores in explanation.scores.items():
            finite = scores.isfinite().flatten(1).all(dim=1).tolist()
            grids = scores.detach().reshape(len(images), -1, *explanation.grid_of(method))
            for image, grid, classes, is_finite in zip(images, grids, targets, finite, strict=True):
                case = Case(image, method)
                maps[case] = dict(zip(classes, grid, strict=True))
                if not is_finite:
                    self.errors[case] = f"{method} gave a map with NaN or infinite scores"
        return maps

    def _ask(self, task: Task, batch: Batch, cases: Sequence[Case]) -> None:
        try:
            found = task.measure(batch, cases) if cases else []
        except VitreousError as error:
            self.errors |= dict.fromkeys(cases, str(error))
            return
        for case, values in zip(cases, found, strict=True):
            self.values.setdefault(case, {}).update(values)

    def _fail(self, images: Sequence[int], reason: str) -> None:
        self.errors |= {Case(image, method): reason for image in images for method in self.methods}


def _first_run(model: LoadedModel, pixels: Tensor) -> tuple[Subject, Tensor]:
    """A model with photos, and what it says of them."""
    mean, std = (pixels.new_tensor(values) for values in (model.preprocessing.mean, model.preprocessing.std))
    subject = Subject(model.model, find_anatomy(model.model), pixels, black=-mean / std)
    return subject, subject.logits(pixels)


def _alike(counts: Sequence[int]) -> Iterator[list[int]]:
    """Positions with equal counts, a few at a time; those with none are left out."""
    for count in sorted(set(counts) - {0}):
        alike = [position for position, each in enumerate(counts) if each == count]
        yield from (alike[first : first + _EXPLAINED_TOGETHER] for first in range(0, len(alike), _EXPLAINED_TOGETHER))
