"""Classes by name: from what a caller gives, numbers and names in any nesting, to the numbers of a model's outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from vitreous.errors import TargetError

_SUGGESTED = 3  # so many names are suggested at most


def class_indices(target: Any, class_names: Callable[[], Sequence[str] | None]) -> Any:
    """Replace every class name in ``target`` by its number; anything else stays as it is.

    Args:
        target: ``None``, a class, or classes nested as deep as the caller likes; tensors hold numbers only.
        class_names: gives the name of every class in index order, or ``None`` where they are not known. Called only
            where ``target`` holds a name.

    Raises:
        TargetError: a name is not known, or is that of several classes.
    """
    if isinstance(target, np.ndarray) and target.dtype.kind in "UO":
        target = target.tolist()
    if isinstance(target, str):
        return find_class(target, class_names())
    if isinstance(target, list | tuple) and _holds_names(target):
        names = class_names()
        return [class_indices(each, lambda: names) for each in target]
    return target


def _holds_names(target: Iterable[Any]) -> bool:
    return any(isinstance(each, str) or (isinstance(each, list | tuple) and _holds_names(each)) for each in target)


def find_class(text: str, class_names: Sequence[str] | None) -> int:
    """Give the number of a class that is written as a number or as a name.

    Upper and lower case are the same, and so are underscores, hyphens and spaces; of a name such as ``tabby, tabby
    cat`` every part is a name as well.

    Raises:
        TargetError: there is no such class, or several have that name.
    """
    if re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
        return int(text)
    if not class_names:
        raise TargetError(
            f"{text!r} is not a class number, and the names of this model's classes are not known: give the number"
        )
    wanted = _normal(text)
    whole = [number for number, name in enumerate(class_names) if _normal(name) == wanted]
    found = whole or [number for number, name in enumerate(class_names) if wanted in map(_normal, _synonyms(name))]
    if not found:
        raise TargetError(f"there is no class {text!r}; {_suggest(wanted, class_names)}")
    if len(found) > 1:
        numbers = " and ".join(map(str, found))
        raise TargetError(f"several classes are called {text!r}: {numbers}; give the number")
    return found[0]


def _normal(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", name.casefold().strip(" _-")))


def _synonyms(name: str) -> list[str]:
    return [part.strip() for part in name.split(",")]


def _suggest(wanted: str, class_names: Sequence[str]) -> str:
    """Name the classes that contain the words that were typed; where none does, those that are spelled most alike."""
    names = {_normal(synonym): synonym for name in reversed(class_names) for synonym in reversed(_synonyms(name))}
    names = dict(reversed(names.items()))  # in the model's order, and of equal ones the first
    words = set(wanted.split())
    found = [name for name in names if words and words <= set(name.split())]
    found = found or [name for name in names if len(wanted) >= 3 and wanted in name]
    found = found or get_close_matches(wanted, names)
    if not found:
        return f"the model has {len(class_names)} classes, such as {class_names[0]!r}"
    suggested = " or ".join(repr(names[name]) for name in found[:_SUGGESTED])
    more = f" ({len(found) - _SUGGESTED} more contain it)" if len(found) > _SUGGESTED else ""
    return f"did you mean {suggested}?{more}"
