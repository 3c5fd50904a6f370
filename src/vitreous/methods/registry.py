"""The registry: every method by its name, with what is known about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vitreous.close_match import close_match
from vitreous.errors import MethodError
from vitreous.methods.options import OptionInfo, options_of
from vitreous.methods.readout import MatrixReadout, Procedure, Readout
from vitreous.source_code import source_hash

ReadoutMaker = Callable[..., Readout]


@dataclass(frozen=True)
class MethodInfo:
    """What is known about a method.

    Attributes:
        name: how it is spelled.
        family: the kind of method it is; ``FAMILIES`` has them all.
        summary: one sentence on what it shows.
        paper: where it was published.
        year: when.
        class_specific: whether its map depends on the class that is explained.
        signed: whether the sign of its scores means something.
        aggregations: what may follow its name.
        options: what may follow the colon, for the method itself.
        default_aggregation: how layers are combined when the spelling does not say.
        default_layer: which layer is read where layers are not combined.
    """

    name: str
    family: str
    summary: str
    paper: str
    year: int
    class_specific: bool
    signed: bool
    aggregations: tuple[str, ...]
    options: Mapping[str, OptionInfo]
    default_aggregation: str | None
    default_layer: int
    make: ReadoutMaker

    @property
    def written(self) -> Callable[..., object]:
        """The function or class that somebody wrote: of a plugin the function that was decorated."""
        return _written(self.make)

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own method, not one of this package."""
        return _package(self.written) != _PACKAGE

    @property
    def has_layers(self) -> bool:
        """Whether it can be read at one layer or combined over several."""
        return self.layers_stand_alone or "rollout" in self.aggregations

    @property
    def layers_stand_alone(self) -> bool:
        """Whether a single layer of it is a map, and so is a sum of layers."""
        return "plus" in self.aggregations


FAMILIES = ("attention", "gradient", "cam", "relevance", "decomposition", "perturbation", "plugin")

_PACKAGE = "vitreous"
_methods: dict[str, MethodInfo] = {}


def register(
    name: str,
    *,
    family: str,
    paper: str,
    year: int,
    class_specific: bool,
    signed: bool,
    aggregation: str | None = None,
    layer: int = 0,
    propagates: bool = False,
) -> Callable[[ReadoutMaker], ReadoutMaker]:
    """Register a function that turns options into a read-out. Its docstring's first line is the summary.

    Args:
        name: how the method is spelled.
        family: the kind of method it is, one of ``FAMILIES``.
        paper: where it was published.
        year: when.
        class_specific: whether its map depends on the class that is explained.
        signed: whether the sign of its scores means something.
        aggregation: how layers are combined when the spelling does not say; ``None`` reads ``layer`` alone.
        layer: the layer that is read where layers are not combined.
        propagates: whether it spreads its map by attention already, so that ``.propagate`` would do it twice.
    """
    if family not in FAMILIES:
        raise MethodError(f"family {family!r} is not one of {', '.join(FAMILIES)}")

    def enter(make: ReadoutMaker) -> ReadoutMaker:
        if name in _methods and not _same_place(_methods[name].make, make):
            raise MethodError(f"there is a method {name!r} already")
        readout = make()
        aggregations = ["rollout"] if isinstance(readout, MatrixReadout) else []
        whole = isinstance(readout, Procedure) or (isinstance(readout, MatrixReadout) and readout.only_as_product)
        aggregations += [] if whole else ["plus", "skipplus"]
        if aggregation is not None and aggregation not in aggregations:
            raise MethodError(
                f"the method {name!r}: aggregation {aggregation!r} is not one of {', '.join(aggregations) or 'none'}"
                f"{close_match(aggregation, aggregations)}"
            )
        aggregations += [] if propagates else ["propagate"]
        _methods[name] = MethodInfo(
            name=name,
            family=family,
            summary=(make.__doc__ or "").strip().splitlines()[0],
            paper=paper,
            year=year,
            class_specific=class_specific,
            signed=signed,
            aggregations=tuple(aggregations),
            options=options_of(make),
            default_aggregation=aggregation,
            default_layer=layer,
            make=make,
        )
        return make

    return enter


def own_code(spelled: Iterable[str]) -> dict[str, str]:
    """The methods among some that are not of this package, each with the hash of its code."""
    infos = {name: method_info(name) for name in spelled}
    return {name: source_hash(info.written) for name, info in infos.items() if info.is_own}


def _same_place(before: ReadoutMaker, now: ReadoutMaker) -> bool:
    """Whether a method was written where it was before: a plugin that is run again, a cell of a notebook."""
    one, other = _written(before), _written(now)
    if one.__module__ != other.__module__ or _package(other) == _PACKAGE:
        return False
    # Each cell of a notebook is a file of its own.
    return other.__module__ == "__main__" or inspect.getfile(one) == inspect.getfile(other)


def _written(make: ReadoutMaker) -> Callable[..., object]:
    """The function that somebody wrote: of a plugin the one inside."""
    written: Callable[..., object] = getattr(make, "written", make)
    return written


def _package(written: Callable[..., object]) -> str:
    """The package that something is written in; what was made by ``exec`` may have none."""
    return (getattr(written, "__module__", None) or "").partition(".")[0]


def method_info(name: str) -> MethodInfo:
    """The registry entry of a method."""
    if name not in _methods:
        raise MethodError(f"there is no method {name!r}{close_match(name, _methods)}")
    return _methods[name]


def list_methods() -> list[MethodInfo]:
    """All methods, in the order of families."""
    return sorted(_methods.values(), key=lambda info: FAMILIES.index(info.family))
