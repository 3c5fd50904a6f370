"""``measure``: photos or texts in, one row of numbers out for each of them and every method, under one protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from vitreous.datasets.sample import Review, Sample
from vitreous.errors import VitreousError
from vitreous.evaluation.protocols.protocol import Protocol
from vitreous.evaluation.runner.material import Maps, Material
from vitreous.evaluation.runner.photo_material import PhotoMaterial
from vitreous.evaluation.runner.text_material import TextMaterial
from vitreous.evaluation.tasks.batch import EXPLAINED_TOGETHER, Batch, Case, Seen
from vitreous.evaluation.tasks.task import MissingAnnotationError, Task, Values
from vitreous.models import LoadedModel
from vitreous.models.text_models import LoadedTextModel
from vitreous.reason import reason_of
from vitreous.spelling import parse

Row = dict[str, str | int | float | None]

_MEASURED_TOGETHER = 16  # photos or texts
_OF_THE_MOMENT = (MemoryError, torch.OutOfMemoryError)  # they say nothing of a photo, so they are not kept as its error


def columns_of(protocol: Protocol) -> tuple[str, ...]:
    """The names of all numbers in a row."""
    return tuple(dict.fromkeys(column for task in protocol.tasks for column in task.columns))


def material_of(model: LoadedModel | LoadedTextModel, protocol: Protocol) -> Material:
    """What a protocol reads, for a model."""
    return TextMaterial(model) if isinstance(model, LoadedTextModel) else PhotoMaterial(model, protocol.resize)


def measure(
    model: LoadedModel | LoadedTextModel | Material,
    samples: Iterable[Sample | Review],
    protocol: Protocol,
    methods: Sequence[str],
) -> list[Row]:
    """Measure the maps of all methods on some photos or texts.

    All methods share tapes. What a row says does not depend on the other photos, beyond rounding.

    Args:
        model: What is explained, or the material of it that is kept from one call to the next.
        samples: The photos, or the texts; a few at a time are in memory.
        protocol: How it is measured.
        methods: Spellings, as ``protocol.spellings`` gives them.

    Raises:
        MethodError: a spelling is wrong.

    Returns:
        One row per photo and method, photos in order: ``image``, ``method``, ``error`` (a sentence where it could not
        be measured) and the protocol's columns. Where a protocol has several tasks and a photo lacks what one of them
        has to know (a label, a mask), the columns of that task are None.
    """
    material = model if isinstance(model, Material) else material_of(model, protocol)
    methods = list(dict.fromkeys(parse(method).spelling for method in methods))  # blanks around it are not part of it
    rows: list[Row] = []
    left = iter(samples)
    while some := list(islice(left, _MEASURED_TOGETHER)):
        rows += _rows(material, some, protocol, methods)
    return rows


def _rows(
    material: Material, samples: Sequence[Sample | Review], protocol: Protocol, methods: Sequence[str]
) -> list[Row]:
    """Rows of a few photos; one that cannot be prepared does not take part, so that it spoils no other."""
    prepared: dict[int, Any] = {}
    problems: dict[int, str] = {}
    for number, sample in enumerate(samples):
        try:
            prepared[number] = material.prepare(sample)
        except VitreousError as error:
            problems[number] = str(error)
    asked = _Asked(material, protocol, methods)
    usable = [samples[number] for number in prepared]
    found = dict(zip(prepared, _measured(asked, usable, list(prepared.values())), strict=True))
    columns = columns_of(protocol)
    return [
        _row(columns, sample.name, method, *(found[number][method] if number in found else ({}, problems[number])))
        for number, sample in enumerate(samples)
        for method in methods
    ]


def _row(columns: Sequence[str], image: str, method: str, values: Values, error: str | None) -> Row:
    row: Row = {"image": image, "method": method, "error": error}
    known = {} if error is not None else values
    return row | {column: known.get(column) for column in columns}


@dataclass(frozen=True)
class _Asked:
    """What is measured on all photos or texts."""

    material: Material
    protocol: Protocol
    methods: Sequence[str]


# What is known of a photo: for each method its numbers, and why there are none.
_Found = dict[str, tuple[Values, str | None]]


def _measured(asked: _Asked, samples: Sequence[Sample | Review], prepared: Sequence[Any]) -> list[_Found]:
    """Measure photos together; if the model fails on them, one by one, so that none spoils another."""
    if not samples:
        return []
    measurement = _Measurement(asked)
    try:
        measurement.measure(asked.material.open(samples, prepared))
    except VitreousError as error:
        if len(samples) == 1:
            return [{method: ({}, str(error)) for method in asked.methods}]
        return [
            found
            for sample, ready in zip(samples, prepared, strict=True)
            for found in _measured(asked, [sample], [ready])
        ]
    return [measurement.found(image) for image in range(len(samples))]


@dataclass
class _Measurement:
    """A few photos or texts on their way from samples to rows."""

    asked: _Asked
    values: dict[Case, Values] = field(default_factory=dict)
    errors: dict[Case, str] = field(default_factory=dict)

    def found(self, image: int) -> _Found:
        """Give what was measured of a photo."""
        cases = {method: Case(image, method) for method in self.asked.methods}
        return {method: (self.values.get(case, {}), self.errors.get(case)) for method, case in cases.items()}

    def measure(self, opened: Batch[Any, Any]) -> None:
        """Fill ``values`` and ``errors``."""
        wanted = [self._targets(image, picture) for image, picture in enumerate(opened.pictures)]
        classes = [sorted(set().union(*targets.values())) for targets in wanted]
        maps: Maps = {}
        for images in _alike([len(each) for each in classes]):
            maps |= self._maps(opened, images, [classes[image] for image in images], self.asked.methods)
        batch = replace(opened, maps=maps)
        for task in self.asked.protocol.tasks:
            cases = [case for case in maps if task in wanted[case.image] and case not in self.errors]
            self._ask(task, batch, sorted(cases, key=lambda case: (case.image, self.asked.methods.index(case.method))))

    def _targets(self, image: int, picture: Seen) -> dict[Task[Any, Any], frozenset[int]]:
        """The classes that each task wants to see explained; tasks that lack an annotation are left out."""
        wanted: dict[Task[Any, Any], frozenset[int]] = {}
        reasons: list[str] = []
        for task in self.asked.protocol.tasks:
            try:
                wanted[task] = frozenset(task.targets(picture))
            except MissingAnnotationError as error:
                reasons.append(str(error))
        if not wanted:
            reason = "; ".join(dict.fromkeys(reasons))
            self.errors |= {Case(image, method): reason for method in self.asked.methods}
        return wanted

    def _maps(
        self, batch: Batch[Any, Any], images: Sequence[int], targets: list[list[int]], methods: Sequence[str]
    ) -> Maps:
        """Maps for a few photos, each for equally many classes; where that fails, method by method, photo by photo."""
        parts: list[tuple[Sequence[int], list[list[int]], Sequence[str]]]
        try:
            return self._explained(batch, images, targets, methods)
        except _OF_THE_MOMENT:
            raise
        except Exception as error:  # noqa: BLE001  a plugin's, or a solver's: one map's failure is no run's
            if len(methods) > 1:
                parts = [(images, targets, [method]) for method in methods]
            elif len(images) > 1:
                parts = [([image], [classes], methods) for image, classes in zip(images, targets, strict=True)]
            else:
                self.errors[Case(images[0], methods[0])] = _sentence(error)
                parts = []
        maps: Maps = {}
        for part in parts:
            maps |= self._maps(batch, *part)
        return maps

    def _explained(
        self, batch: Batch[Any, Any], images: Sequence[int], targets: list[list[int]], methods: Sequence[str]
    ) -> Maps:
        maps = self.asked.material.maps(batch, images, targets, methods)
        for case, by_class in maps.items():
            if not all(bool(map_.isfinite().all()) for map_ in by_class.values()):
                self.errors[case] = f"{case.method} gave a map with NaN or infinite scores"
        return maps

    def _ask(self, task: Task[Any, Any], batch: Batch[Any, Any], cases: Sequence[Case]) -> None:
        """Measure cases together; if that fails, one by one, so that none spoils another."""
        try:
            found = task.measure(batch, cases) if cases else []
        except _OF_THE_MOMENT:
            raise
        except Exception as error:  # noqa: BLE001  tasks ask methods too
            if len(cases) == 1:
                self.errors[cases[0]] = _sentence(error)
            else:  # find out whose fault it is; what the model said already is remembered
                for case in cases:
                    self._ask(task, batch, [case])
            return
        for case, values in zip(cases, found, strict=True):
            self.values.setdefault(case, {}).update(values)


def _sentence(error: Exception) -> str:
    """What is kept of a failure; one that nobody foresaw has its type, for its words may not say much."""
    return str(error) if isinstance(error, VitreousError) else f"{type(error).__name__}: {reason_of(error)}"


def _alike(counts: Sequence[int]) -> Iterator[list[int]]:
    """Positions with equal counts, a few at a time; those with none are left out."""
    for count in sorted(set(counts) - {0}):
        alike = [position for position, each in enumerate(counts) if each == count]
        yield from (alike[first : first + EXPLAINED_TOGETHER] for first in range(0, len(alike), EXPLAINED_TOGETHER))
