"""What a run is: everything its numbers depend on, as plain data, and the key derived from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vitreous._utils.defaults import SHARD_SIZE
from vitreous._utils.messages import error_message, short_repr
from vitreous.errors import RunError as RunError  # noqa: PLC0414  # re-exported
from vitreous.inputs.outputs import OutputActivation, check_outputs

MOST_THREADS = 1024  # more may crash the process
_MOST_SHARDS = 10_000_000

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("protocol", "weights", "data", "data_fingerprint"), str),
    **dict.fromkeys(("settings", "model", "preprocessing", "plugins", "own_methods", "versions"), dict),
    **dict.fromkeys(("methods", "columns"), list),
    **dict.fromkeys(("images", "shard_size", "seed", "threads"), int),
    **dict.fromkeys(("shuffled", "stratified"), bool),
    "limit": int | None,
}


@dataclass(frozen=True)
class ModelChoice:
    """A model by name, and what was changed about it.

    Attributes:
        name: as ``load_model`` takes it.
        mean: replaces the mean of its own preprocessing.
        std: replaces the standard deviation.
        image_size: height and width of its input.
        device: where it runs.
        outputs: kind of its outputs, if neither its configuration nor their number determines it.
        stage: which stage of a hierarchical model is read; None for the last.
    """

    name: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    image_size: tuple[int, int] | None = None
    device: str = "cpu"
    outputs: OutputActivation | None = None
    stage: int | None = None


@dataclass(frozen=True, order=True)
class Shard:
    """A range of images that is computed and stored as one.

    Attributes:
        first: index of its first image in the data set.
        last: index of its last image, included.
    """

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    @property
    def name(self) -> str:
        """The name of its file without the ending; names sort as the images do."""
        return f"shard-{self.first:08d}-{self.last:08d}"


@dataclass(frozen=True)
class Run:
    """One evaluation: a protocol, a model, a data set and methods, with every choice that its numbers depend on.

    Attributes:
        protocol: name of the protocol.
        settings: every choice of the protocol, its version included.
        model: which model.
        weights: fingerprint of its weights.
        preprocessing: how images or texts become its input.
        data: which data set, ``KIND:PATH``.
        data_fingerprint: changes when the data set does.
        images: how many images the data set has.
        methods: the spellings that are evaluated, in this order.
        plugins: files with methods of the user's own, each with its SHA-256.
        own_methods: those of the methods that are not of this package, each with the hash of its code.
        columns: names of the numbers that are kept of every image.
        shard_size: images in one shard.
        seed: of everything that is drawn at random.
        versions: of the programs that compute the numbers.
        shuffled: whether the data set is taken in a random order, which depends on ``seed``.
        stratified: the same with the classes in turn.
        limit: how many images are evaluated; None for all. Not part of the key: a run can be made longer.
        threads: how many threads the model uses. Not part of the key, but fixed when the run is started.
    """

    protocol: str
    settings: Mapping[str, Any]
    model: ModelChoice
    weights: str
    preprocessing: Mapping[str, Any]
    data: str
    data_fingerprint: str
    images: int
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    plugins: Mapping[str, str] = field(default_factory=dict)
    own_methods: Mapping[str, str] = field(default_factory=dict)
    shard_size: int = SHARD_SIZE
    seed: int = 0
    shuffled: bool = False
    stratified: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.shard_size < 1 or self.threads < 1 or (self.limit is not None and self.limit < 1):
            raise RunError("the shard size, the number of threads and the limit must be at least 1")
        if self.threads > MOST_THREADS:
            raise RunError(f"{self.threads} threads are more than the maximum of {MOST_THREADS}")
        if self.image_count > self.shard_size * _MOST_SHARDS:
            raise RunError(f"a run of {self.image_count} images in shards of {self.shard_size} has too many shards")

    @property
    def key(self) -> str:
        """A hash of everything that the numbers depend on: the content of files, not their paths."""
        values = asdict(self)
        # A limit cuts the list of shards and leaves them as they are; threads are kept by the run's manifest.
        for name in ("limit", "threads", "data", "images", "plugins"):
            del values[name]
        if not self.stratified:  # as in runs from before there was a choice
            del values["stratified"]
        if self.model.outputs is None:
            del values["model"]["outputs"]
        if self.model.stage is None:
            del values["model"]["stage"]
        values["kind"] = self.data.partition(":")[0]
        values["plugins"] = sorted(self.plugins.values())
        return hash_of(values)

    @property
    def context(self) -> str:
        """A hash of what two runs must have in common for their methods to stand in one table."""
        parts = (self.settings, self.weights, self.preprocessing, self.data_fingerprint, self.protocol, self.versions)
        outputs = [] if self.model.outputs is None else [self.model.outputs]
        stage = [] if self.model.stage is None else [self.model.stage]
        return hash_of([*parts, self.data.partition(":")[0], self.model.device, self.seed, *outputs, *stage])

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""
        return f"{self.protocol}-{self.key[:12]}"

    @property
    def image_count(self) -> int:
        """How many images are evaluated."""
        return self.images if self.limit is None else min(self.limit, self.images)

    @property
    def noun(self) -> str:
        """What is evaluated, in a word."""
        return "texts" if self.settings.get("reads") == "texts" else "images"

    def shards(self) -> list[Shard]:
        """The plan: which ranges of images are computed; the last one may be cut short."""
        return [
            Shard(first, min(first + self.shard_size, self.image_count) - 1)
            for first in range(0, self.image_count, self.shard_size)
        ]

    def as_json(self) -> dict[str, Any]:
        """Give the run as JSON values, the same before it is written and after it is read."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples become lists, as they would in a file
        return values

    @classmethod
    def from_json(cls, values: object) -> Run:
        """Read a run from JSON values.

        Raises:
            RunError: they do not describe a run.
        """
        try:
            return _run_of(values)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"this does not describe a run of this version of vitreous: {error_message(error)}"
            ) from error


def _run_of(values: object) -> Run:
    if not isinstance(values, Mapping):
        raise TypeError("it is not a run")
    model = dict(values["model"])
    for name in ("mean", "std", "image_size"):
        model[name] = None if model[name] is None else tuple(model[name])
    choice = ModelChoice(**model)
    _check_type("model.name", choice.name, str)
    _check_type("model.device", choice.device, str)
    check_outputs(choice.outputs)
    for name, numbers, kind in (("mean", choice.mean, float), ("std", choice.std, float)):
        _check_all(f"model.{name}", numbers or (), kind)
    _check_all("model.image_size", choice.image_size or (), int)
    given = {each.name: values[each.name] for each in fields(Run) if each.name in values}
    for name, value in given.items():
        _check_type(name, value, _TYPES[name])
    for name in ("methods", "columns"):
        _check_all(name, given[name], str)
        given[name] = tuple(given[name])
        if len(set(given[name])) != len(given[name]):
            raise ValueError(f"{name} holds a name twice")
    for name in ("plugins", "own_methods", "versions"):
        _check_all(name, [*given.get(name, {}).values()], str)
    return Run(**{**given, "model": choice})


def _check_type(name: str, value: object, kind: Any) -> None:
    accepted = int | float if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {short_repr(value)}")


def _check_all(name: str, values: Iterable[object], kind: Any) -> None:
    for value in values:
        _check_type(name, value, kind)


def hash_of(value: Any) -> str:
    """The SHA-256 of JSON values, the same for the same values."""
    # Tuples and lists are the same to JSON, so a run read from its manifest has the key it was written with.
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
