"""Lists of methods as users type them, on the command line and in the page; no heavy imports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vitreous.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Iterable


def split_spellings(values: Iterable[str]) -> list[str]:
    """Split comma-separated method spellings; duplicates are dropped and the order is kept.

    Commas also separate the options of one method. A part of the form ``key=value`` belongs to the spelling before it:
    ``gradtoken:propagation=none,heads=average,tokentm`` is two methods.

    Raises:
        MethodError: A value names no method, or starts with an option.
    """
    return list(dict.fromkeys(spelling for value in values for spelling in _split(value)))


def _split(value: str) -> list[str]:
    spellings: list[str] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        if not re.fullmatch(r"\w+\s*=[^:]*", part):
            spellings.append(part)
        elif spellings:
            spellings[-1] += f",{part}"
        else:
            raise MethodError(f"{part!r} is a method option without a method before it; write METHOD:{part}")
    if not spellings:
        raise MethodError("the method name is empty; `vitreous methods` lists all methods")
    return spellings
