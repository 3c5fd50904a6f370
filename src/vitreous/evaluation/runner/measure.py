"""From samples to rows: ``measure`` for any samples, ``compute_shard`` for a range of a run's data set.

The context of a run is its model, data set and protocol, opened once per process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from vitreous._utils.messages import error_message, printable, source_hash
from vitreous.datasets import DataSet, Mosaics, Shuffled, Stratified, open_dataset
from vitreous.datasets.dataset import AnySample
from vitreous.errors import MethodError, VitreousError
from vitreous.evaluation.protocols import Protocol, find_protocol
from vitreous.evaluation.run import ModelChoice, Run, RunError, Shard, hash_of, schema_of
from vitreous.evaluation.runner.adapters import Maps, SampleAdapter, adapter_for, label_outputs, prompted_model
from vitreous.evaluation.tasks.task import (
    EXPLAINED_TOGETHER,
    Batch,
    Case,
    MapTarget,
    MissingAnnotationError,
    Seen,
    Task,
    Values,
)
from vitreous.methods import own_code
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel, load_model
from vitreous.models.dual_encoder import DualEncoder, load_dual_encoder
from vitreous.models.hf_models import LoadedTextModel, load_text_model
from vitreous.models.loaded import fingerprint_of, with_outputs, with_resolved_outputs
from vitreous.plugin import load_plugins
from vitreous.tape.rules import RULES, own_rules

AnyModel = LoadedModel | LoadedTextModel | DualEncoder


@dataclass(frozen=True)
class EvaluationContext:
    """A model, a data set and a protocol, opened; all three for images, or all for texts.

    Attributes:
        model: The model; a dual encoder for a protocol of prompts.
        data: The data set.
        protocol: The protocol.
        stage: The stage that is read of a dual encoder's image tower; that of other models is in ``model``.
    """

    model: AnyModel
    data: DataSet
    protocol: Protocol
    stage: int | None = None

    @cached_property
    def classifier(self) -> LoadedModel | LoadedTextModel:
        """What is explained: the model, or a dual encoder with the prompts of the data set's classes."""
        if not isinstance(self.model, DualEncoder):
            return self.model
        assert self.protocol.prompt is not None
        with _threads(1):  # the same numbers in every process of a run
            return prompted_model(self.model, self.data, self.protocol.prompt, self.stage)

    @cached_property
    def adapter(self) -> SampleAdapter:
        """One adapter for all shards: it caches what it finds out about the model."""
        return adapter_for(self.classifier, self.protocol)


_opened: dict[str, EvaluationContext] = {}


def open_context(run: Run) -> EvaluationContext:
    """Open the model, the data set and the protocol of a run, once per process.

    Raises:
        RunError: this machine has another model, data set, plugin or protocol than the run was started with.
    """
    if run.key not in _opened:
        _opened.clear()  # keep one model in memory
        _opened[run.key] = _open(run)
    return _opened[run.key]


def _open(run: Run) -> EvaluationContext:
    load_plugins(run.plugins)
    protocol = find_protocol(run.protocol)
    data = arranged(open_dataset(run.data), protocol, run.seed, shuffled=run.shuffled, stratified=run.stratified)
    model = load(run.model, protocol)
    model = model if isinstance(model, DualEncoder) else with_resolved_outputs(model)
    context = EvaluationContext(model, data, protocol, run.model.stage)
    found = {
        "weights of the model": (weights_of(context.model), run.weights),
        "preprocessing": (hash_of(preprocessing_of(model, data.class_names)), hash_of(run.preprocessing)),
        "data set": (context.data.fingerprint, run.data_fingerprint),
        "plugins": (hash_files(run.plugins), run.plugins),
        "code of its own methods": (own_code_of(run.methods), run.own_methods),
        "protocol": (context.protocol.settings(), run.settings),
    }
    for what, (here, expected) in found.items():
        if here != expected:
            raise RunError(f"the {what} found here is not what the run was started with")
    return context


def load(choice: ModelChoice, protocol: Protocol) -> AnyModel:
    """Load a model for images or texts, with the outputs of the choice; a dual encoder for prompts."""
    if protocol.reads == "texts":
        if choice != ModelChoice(choice.name, device=choice.device, outputs=choice.outputs):
            raise RunError("mean, standard deviation, size and stage apply to images, but this protocol reads texts")
        return with_outputs(load_text_model(choice.name, device=choice.device), choice.outputs)
    if protocol.prompt is not None:
        return load_dual_encoder(
            choice.name, mean=choice.mean, std=choice.std, image_size=choice.image_size, device=choice.device
        )
    model = load_model(
        choice.name, mean=choice.mean, std=choice.std, image_size=choice.image_size, device=choice.device
    )
    return replace(with_outputs(model, choice.outputs), stage=choice.stage)


def weights_of(model: AnyModel) -> str:
    """The fingerprint of a model: its weights, its modules, and the user's code that built it."""
    found = fingerprint_of(model.model)
    code = model.code if isinstance(model, LoadedModel) else ""
    return hash_of([found, code]) if code else found


def preprocessing_of(model: AnyModel, class_names: Sequence[str] | None = None) -> dict[str, Any]:
    """How samples become a model's input and which outputs belong to which labels, as JSON values.

    The class names are those of the data set: they are part of prompts, and no fingerprint covers them.
    """
    if isinstance(model, DualEncoder):
        images = {} if model.preprocessing is None else asdict(model.preprocessing)
        return {**images, "tokenizer": getattr(model.reader, "settings", {}), "classes": class_names}
    if not isinstance(model, LoadedTextModel):
        return asdict(model.preprocessing)
    outputs = label_outputs(model)
    # Names may be the caller's, which no fingerprint covers. The data set's own order is the default.
    named = {} if outputs == tuple(range(len(outputs))) else {"outputs": list(outputs)}
    return {**model.reader.settings, **named}


def arranged(listed: DataSet, protocol: Protocol, seed: int, *, shuffled: bool, stratified: bool) -> DataSet:
    """The data set in the requested order, as mosaics if the protocol uses them."""
    if stratified:
        listed = Stratified(listed, seed)
    elif shuffled:
        listed = Shuffled(listed, seed)
    return listed if protocol.mosaic is None else Mosaics(listed, protocol.mosaic, protocol.mosaic_classes)


def own_code_of(spellings: Iterable[str]) -> dict[str, str]:
    """The methods and rules that are not of this package, by name, each with the hash of its code."""
    recipes = [parse(spelling) for spelling in spellings]
    rules = {recipe.readout.backward.rule for recipe in recipes}.intersection(
        (*own_rules(), *own_rules(relevance=True))
    )
    methods = own_code(dict.fromkeys(recipe.info.name for recipe in recipes))
    return methods | {f"rule {name}": source_hash(type(RULES[name])) for name in sorted(rules)}


def hash_files(files: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file."""
    try:
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
    except OSError as error:
        raise MethodError(f"{error.filename}: the plugin cannot be read: {error.strerror}") from error


Row = dict[str, str | int | float | None]

_MEASURED_TOGETHER = 16  # images or texts
_OF_THE_MOMENT = (MemoryError, torch.OutOfMemoryError)  # not the image's fault, so they are not stored as its error

# The result of one image: for each method its values, or the error.
_Found = dict[str, tuple[Values, str | None]]
_SEEDS = 2**63  # torch takes seeds below this


def columns_of(protocol: Protocol) -> tuple[str, ...]:
    """The names of all numbers in a row."""
    return tuple(dict.fromkeys(column for task in protocol.tasks for column in task.columns))


def measure(
    model: LoadedModel | LoadedTextModel | SampleAdapter,
    samples: Iterable[AnySample],
    protocol: Protocol,
    methods: Sequence[str],
) -> list[Row]:
    """Measure the maps of all methods on some images or texts.

    All methods share tapes. A row does not depend on the other images, beyond rounding.

    Args:
        model: The model, or its adapter, which keeps caches between calls.
        samples: The images, or the texts; a few at a time are in memory.
        protocol: How it is measured.
        methods: Spellings, as ``protocol.spellings`` gives them.

    Raises:
        MethodError: a spelling is wrong.

    Returns:
        One row per image and method, images in order: ``image``, ``method``, ``error`` (a sentence where it could not
        be measured) and the protocol's columns. Where a protocol has several tasks and a image lacks what one of them
        has to know (a label, a mask), the columns of that task are None.
    """
    adapter = model if isinstance(model, SampleAdapter) else adapter_for(model, protocol)
    methods = list(dict.fromkeys(adapter.spelling(method) for method in methods))
    rows: list[Row] = []
    left = iter(samples)
    while some := list(islice(left, _MEASURED_TOGETHER)):
        rows += _rows(adapter, some, protocol, methods)
    return rows


def _rows(
    adapter: SampleAdapter,
    samples: Sequence[AnySample],
    protocol: Protocol,
    methods: Sequence[str],
) -> list[Row]:
    """Rows of one batch; a sample that cannot be prepared gets an error and is left out of the batch."""
    prepared: dict[int, Any] = {}
    problems: dict[int, str] = {}
    for number, sample in enumerate(samples):
        try:
            prepared[number] = adapter.prepare(sample)
        except VitreousError as error:
            problems[number] = str(error)
    request = _Request(adapter, protocol, methods)
    usable = [samples[number] for number in prepared]
    found = dict(zip(prepared, _measured(request, usable, list(prepared.values())), strict=True))
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
class _Request:
    """What is measured on every image or text."""

    adapter: SampleAdapter
    protocol: Protocol
    methods: Sequence[str]


def _measured(request: _Request, samples: Sequence[AnySample], prepared: Sequence[Any]) -> list[_Found]:
    """Measure images together; if the model fails on them, one by one, so that one error affects one image."""
    if not samples:
        return []
    measurement = _Measurement(request)
    try:
        measurement.measure(request.adapter.open(samples, prepared))
    except VitreousError as error:
        if len(samples) == 1:
            return [{method: ({}, str(error)) for method in request.methods}]
        return [
            found
            for sample, ready in zip(samples, prepared, strict=True)
            for found in _measured(request, [sample], [ready])
        ]
    return [measurement.found(image) for image in range(len(samples))]


@dataclass
class _Measurement:
    """The measurement of one batch."""

    request: _Request
    values: dict[Case, Values] = field(default_factory=dict)
    errors: dict[Case, str] = field(default_factory=dict)

    def found(self, image: int) -> _Found:
        """Return the result of one image."""
        cases = {method: Case(image, method) for method in self.request.methods}
        return {method: (self.values.get(case, {}), self.errors.get(case)) for method, case in cases.items()}

    def measure(self, opened: Batch[Any, Any]) -> None:
        """Fill ``values`` and ``errors``."""
        wanted = [self._targets(image, picture) for image, picture in enumerate(opened.pictures)]
        targets = [sorted(frozenset[MapTarget]().union(*each.values()), key=_target_order) for each in wanted]
        maps: Maps = {}
        for images in _alike([len(each) for each in targets]):
            maps |= self._maps(opened, images, [targets[image] for image in images], self.request.methods)
        batch = replace(opened, maps=maps)
        for task in self.request.protocol.tasks:
            cases = [case for case in maps if task in wanted[case.image] and case not in self.errors]
            self._run_task(
                task, batch, sorted(cases, key=lambda case: (case.image, self.request.methods.index(case.method)))
            )

    def _targets(self, image: int, picture: Seen) -> dict[Task[Any, Any], frozenset[MapTarget]]:
        """What to explain for each task; tasks whose annotation is missing are left out."""
        wanted: dict[Task[Any, Any], frozenset[MapTarget]] = {}
        reasons: list[str] = []
        for task in self.request.protocol.tasks:
            try:
                wanted[task] = frozenset(task.targets(picture))
            except MissingAnnotationError as error:
                reasons.append(str(error))
        if not wanted:
            reason = "; ".join(dict.fromkeys(reasons))
            self.errors |= {Case(image, method): reason for method in self.request.methods}
        return wanted

    def _maps(
        self, batch: Batch[Any, Any], images: Sequence[int], targets: list[list[MapTarget]], methods: Sequence[str]
    ) -> Maps:
        """Maps of images with equally many classes; after a failure method by method, then image by image."""
        parts: list[tuple[Sequence[int], list[list[MapTarget]], Sequence[str]]]
        try:
            return self._explained(batch, images, targets, methods)
        except _OF_THE_MOMENT:
            raise
        except Exception as error:  # noqa: BLE001  plugins and solvers may raise anything; the run goes on
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
        self, batch: Batch[Any, Any], images: Sequence[int], targets: list[list[MapTarget]], methods: Sequence[str]
    ) -> Maps:
        maps = self.request.adapter.maps(batch, images, targets, methods)
        for case, by_class in maps.items():
            if not all(bool(map_.isfinite().all()) for map_ in by_class.values()):
                self.errors[case] = f"{case.method} gave a map with NaN or infinite scores"
        return maps

    def _run_task(self, task: Task[Any, Any], batch: Batch[Any, Any], cases: Sequence[Case]) -> None:
        """Measure cases together; after a failure one by one, so that one error affects one case."""
        try:
            found = task.measure(batch, cases) if cases else []
        except _OF_THE_MOMENT:
            raise
        except Exception as error:  # noqa: BLE001  tasks run methods too
            if len(cases) == 1:
                self.errors[cases[0]] = _sentence(error)
            else:  # find the failing case; outputs so far are cached
                for case in cases:
                    self._run_task(task, batch, [case])
            return
        for case, values in zip(cases, found, strict=True):
            self.values.setdefault(case, {}).update(values)


def _sentence(error: Exception) -> str:
    """The stored text of an error; an unexpected one includes its type."""
    return str(error) if isinstance(error, VitreousError) else f"{type(error).__name__}: {error_message(error)}"


def _target_order(target: MapTarget) -> tuple[bool, int, str]:
    """Classes by number, then other targets by spelling."""
    return (False, target, "") if isinstance(target, int) else (True, 0, str(target))


def _alike(counts: Sequence[int]) -> Iterator[list[int]]:
    """Positions with equal counts, a few at a time; those with none are left out."""
    for count in sorted(set(counts) - {0}):
        alike = [position for position, each in enumerate(counts) if each == count]
        yield from (alike[first : first + EXPLAINED_TOGETHER] for first in range(0, len(alike), EXPLAINED_TOGETHER))


def compute_shard(run: Run, context: EvaluationContext, shard: Shard) -> pa.Table:
    """Measure the images of a shard; one that cannot be read gets rows with its error."""
    rows: dict[tuple[str, str], Row] = {}
    names = {index: context.data.name(index) for index in shard}

    def readable() -> Iterator[AnySample]:
        for index in shard:
            try:
                yield context.data.load(index)
            except (VitreousError, OSError) as error:
                rows.update({(names[index], method): {"error": _one_line(error)} for method in run.methods})

    with _threads(run.threads), _seeded(run.seed + shard.first):
        measured = measure(context.adapter, readable(), context.protocol, run.methods)
    rows |= {(str(row["image"]), str(row["method"])): row for row in measured}
    return _table(run, [(index, names[index], method) for index in shard for method in run.methods], rows)


def _table(run: Run, order: Sequence[tuple[int, str, str]], rows: dict[tuple[str, str], Row]) -> pa.Table:
    """Make the table of a shard, ordered by image and method."""
    if len(order) != len(rows) or {(name, method) for _, name, method in order} != rows.keys():
        raise RunError("an image of the data set was not measured, or its name is not unique")
    found = [rows[name, method] for _, name, method in order]
    columns = {
        "index": [index for index, _, _ in order],
        "image": [name for _, name, _ in order],
        "method": [method for _, _, method in order],
        "error": [row.get("error") for row in found],
    }
    columns |= {column: [row.get(column) for row in found] for column in run.columns}
    return pa.table(columns, schema=schema_of(run.columns))


def _one_line(error: Exception) -> str:
    return " ".join(printable(str(error) or type(error).__name__).split())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Fix the number of threads: another number may sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Make random draws depend on the shard alone."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed % _SEEDS)
        yield
