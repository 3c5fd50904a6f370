"""Which colour a word gets, and a text as the stretches that are coloured or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vitreous.text_explanation import TextExplanation

Colour = tuple[int, int, int]

# On white paper: red speaks for the class, blue against it; without a sign one colour that is neither.
_FOR: Colour = (226, 74, 51)
_AGAINST: Colour = (52, 120, 214)
_UNSIGNED: Colour = (242, 158, 22)


def blend(strength: float, *, signed: bool) -> Colour:
    """Give the colour of a score that is scaled for display, mixed with white."""
    part = min(1.0, abs(strength))
    red, green, blue = (round(255 + (channel - 255) * part) for channel in full(strength, signed=signed))
    return red, green, blue


def full(strength: float, *, signed: bool) -> Colour:
    """Give the colour of the strongest score of the same sign."""
    return _UNSIGNED if not signed else _FOR if strength > 0 else _AGAINST


def background(strength: float, *, signed: bool) -> str:
    """Give the same as CSS has it."""
    return "#{:02x}{:02x}{:02x}".format(*blend(strength, signed=signed))


def spans_of(explanation: TextExplanation, index: int) -> Iterator[tuple[str, int | None]]:
    """Give a text stretch by stretch with the number of the word that each is; ``None`` for what is between them."""
    text, place = explanation.texts[index], 0
    for number, word in enumerate(explanation.words[index]):
        if word.start > place:
            yield text[place : word.start], None
        yield text[word.start : word.end], number
        place = word.end
    if place < len(text):
        yield text[place:], None
