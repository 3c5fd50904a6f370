"""Lists of method spellings as they are typed on a command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vitreous.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Iterable


def split_spellings(values: Iterable[str]) -> list[str]:
    """Split comma-separated spellings, each once, in the order they were given.

    Options inside a spelling are separated by commas as well: a piece that is ``key=value`` belongs to the spelling
    before it, so ``gradtoken:propagation=none,heads=average,tokentm`` is two methods.
    """
    spellings: dict[str, None] = {}
    for value in values:
        for spelling in _split(value):
            spellings[spelling] = None
    return list(spellings)


def _split(value: str) -> list[str]:
    spellings: list[str] = []
    for piece in filter(None, (piece.strip() for piece in value.split(","))):
        if not re.fullmatch(r"\w+\s*=[^:]*", piece):
            spellings.append(piece)
        elif spellings:
            spellings[-1] += f",{piece}"
        else:
            raise MethodError(f"{piece!r} is an option of a method, but no method stands before it")
    if not spellings:
        raise MethodError("a method was given without a name; `vitreous methods` lists them")
    return spellings
