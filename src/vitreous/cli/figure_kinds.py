"""Which figures there are, and what each takes; known without importing anything heavy."""

from __future__ import annotations

from dataclasses import dataclass

from vitreous.close_match import close_match
from vitreous.defaults import DEFAULT_METHODS
from vitreous.errors import InputError


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
        summary: What it shows.
        methods: The methods that it shows unless others are asked for.
        several_photos: Whether it shows more than one photo.
        several_classes: Whether it shows more than one class of a photo.
    """

    summary: str
    methods: tuple[str, ...] = DEFAULT_METHODS
    several_photos: bool = False
    several_classes: bool = False


KINDS = {
    "overlay": Kind("maps over the photo with all its pixels, with colour bars", ("tokentm",), several_classes=True),
    "comparison": Kind("methods side by side, a row for each photo", several_photos=True, several_classes=True),
    "classes": Kind("maps for several classes of one photo, side by side", several_classes=True),
    "depth": Kind("a map as more and more blocks are aggregated", ("tokentm", "gradtoken")),
    "heads": Kind("the signed map of every head", ("gradtoken:propagation=none", "gradtoken")),
    "layers": Kind("a map summed over the blocks from every start layer up", ("decompx.skipplus",)),
    "curves": Kind("the class's probability while relevant parts are deleted or inserted"),
    "transformation": Kind("attention, length, direction and all together in one block (TokenTM)", ()),
}


def find_kind(name: str) -> Kind:
    """Give a kind of figure by its name."""
    if name not in KINDS:
        hint = close_match(name, KINDS) or f"; they are {', '.join(KINDS)}"
        raise InputError(f"there is no figure {name!r}{hint}")
    return KINDS[name]
