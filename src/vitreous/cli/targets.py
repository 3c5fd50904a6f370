"""Classes as they are typed on a command line: a number, or a name written in any usual way."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

from vitreous.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_class(text: str, class_names: Sequence[str] | None) -> int:
    """Give the number of a class.

    Upper and lower case are the same, and so are underscores, hyphens and spaces; of a name such as ``tabby, tabby
    cat`` every part is a name as well.
    """
    if re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
        return int(text)
    if not class_names:
        raise TargetError(f"{text!r} is not a class number, and the names of this model's classes are not known")
    wanted = _normal(text)
    whole = [number for number, name in enumerate(class_names) if _normal(name) == wanted]
    found = whole or [number for number, name in enumerate(class_names) if wanted in _synonyms(name)]
    if not found:
        raise TargetError(f"there is no class {text!r}; {_suggest(wanted, class_names)}")
    if len(found) > 1:
        numbers = " and ".join(map(str, found))
        raise TargetError(f"several classes are called {text!r}: {numbers}; give the number")
    return found[0]


def _normal(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", name.casefold().strip(" _-")))


def _synonyms(name: str) -> list[str]:
    return [_normal(part) for part in name.split(",")]


def _suggest(wanted: str, class_names: Sequence[str]) -> str:
    """Name the classes that look most like what was typed, or that contain it."""
    by_synonym = {synonym: name for name in class_names for synonym in _synonyms(name)}
    contain = [synonym for synonym in by_synonym if len(wanted) >= 3 and wanted in synonym]
    close = dict.fromkeys(by_synonym[synonym] for synonym in [*get_close_matches(wanted, by_synonym), *contain])
    if close:
        return f"did you mean {' or '.join(map(repr, list(close)[:3]))}?"
    return f"the model has {len(class_names)} classes, such as {class_names[0]!r}"
