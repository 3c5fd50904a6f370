"""Data sets by name: finds every kind in the modules of this package and opens ``KIND:PATH``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from vitreous._utils.text import close_match
from vitreous.datasets.dataset import DataSet
from vitreous.errors import DataError

_PACKAGE = __name__.rpartition(".")[0]


def open_dataset(spec: str) -> DataSet:
    """Open a data set in its original layout, without reading an image.

    Args:
        spec: ``KIND:PATH``, with one of the kinds that ``list_datasets`` describes.

    Raises:
        DataError: The kind is unknown, or the set is missing or damaged; it says what is missing and where it comes
            from.
        MissingDependencyError: The kind needs an extra that is not installed.
    """
    kinds = _kinds()
    kind, colon, path = spec.partition(":")
    if not colon or not path:
        raise DataError(f"a data set is spelled KIND:PATH, not {spec!r}; kinds are {', '.join(kinds)}")
    if kind not in kinds:
        hint = close_match(kind, kinds) or f"; kinds are {', '.join(kinds)}"
        raise DataError(f"there is no kind of data set {kind!r}{hint}")
    return kinds[kind](path)


def list_datasets() -> dict[str, str]:
    """Return the kinds of data sets with a line each on what is expected at the path."""
    return {kind: found.summary for kind, found in _kinds().items()}


@cache
def _kinds() -> dict[str, type[DataSet]]:
    """Return every class of this package that has a kind, by that."""
    package = import_module(_PACKAGE)
    for module in iter_modules(package.__path__, f"{_PACKAGE}."):
        import_module(module.name)
    # Data sets of a user's own are opened by their class.
    own = [each for each in _subclasses(DataSet) if each.__module__.startswith(f"{_PACKAGE}.")]
    named = {each.__dict__["kind"]: each for each in own if isinstance(each.__dict__.get("kind"), str)}
    return {kind: named[kind] for kind in sorted(named)}


def _subclasses(kind: type[Any]) -> Iterator[type[DataSet]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
