"""Texts in colours as HTML: self-contained, every word of the user's escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Protocol

from vitreous.html.page import document
from vitreous.pictures.left_out import WHY
from vitreous.pictures.word_colours import background, spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitreous.text_explanation import By, TextExplanation


class Paint(Protocol):
    """Gives the colour, as CSS has it, behind a word whose score is scaled for display."""

    def __call__(self, strength: float, /, *, signed: bool) -> str: ...


_STYLE = "font-family: sans-serif; color: #1a1a1a; background: #ffffff; padding: 0.6em; line-height: 1.7"


def page(explanation: TextExplanation, *, by: By) -> str:
    """Give a whole page."""
    return document("Vitreous: words that made the model say this", body(explanation, by=by))


def body(explanation: TextExplanation, *, by: By) -> str:
    """Give what can stand in any page: for every text what the model says, then a paragraph per method and class."""
    parts = [legend(explanation)]
    for index in range(len(explanation)):
        likely = ", ".join(
            f"{escape(label)} {escape(explanation.saying(number, index))}"
            for number, label, _ in explanation.top(3, index=index)
        )
        parts.append(f'<p style="margin: 0.8em 0 0.2em"><b>{likely}</b></p>')
        for method in explanation.methods:
            for number in range(explanation.classes_per_image):
                parts.append(_caption(explanation, method, index, number))
                parts.append(coloured(explanation, method, index, number, by))
    return f'<div style="{_STYLE}">\n' + "\n".join(parts) + "\n</div>"


def legend(explanation: TextExplanation, paint: Paint = background) -> str:
    """Say what the colours mean."""
    samples = [("for the class", paint(1.0, signed=True)), ("against it", paint(-1.0, signed=True))]
    if not any(explanation.signed.values()):
        samples.clear()
    if not all(explanation.signed.values()):
        samples.append(("important (methods without a sign)", paint(1.0, signed=False)))
    shown = (f'<span style="background: {colour}; padding: 0 0.4em">{text}</span>' for text, colour in samples)
    return f'<p style="font-size: 80%; margin: 0">{" ".join(shown)}</p>'


def _caption(explanation: TextExplanation, method: str, index: int, number: int) -> str:
    label = explanation.label(index, number)
    return (
        f'<p style="font-size: 80%; color: #555555; margin: 0.4em 0 0">{escape(method)}, explained: {escape(label)}</p>'
    )


def coloured(
    explanation: TextExplanation, method: str, index: int, number: int, by: By, paint: Paint = background
) -> str:
    """Give one text as a paragraph whose words have the colours of their scores, and tell them when pointed at.

    Where a score is NaN or infinite, the paragraph says instead that the text is left out.
    """
    if not explanation.shows(method, index, number, by=by):
        return f'<p style="margin: 0">{WHY}</p>'
    raw = explanation.word_scores(method, index, number, by=by).tolist()
    shown = explanation.display_scores(method, index, number, by=by).tolist()
    written = []
    for stretch, word in spans_of(explanation, index):
        text = escape(stretch)
        if word is not None:
            text = _word(text, raw[word], paint(shown[word], signed=explanation.signed[method]))
        written.append(text)
    return f'<p dir="auto" style="margin: 0; white-space: pre-wrap">{"".join(written)}</p>'


def excerpt(explanation: TextExplanation, method: str, marked: Sequence[bool], words: int = 40) -> str:
    """Give the words around the highest one of the first text; those that are ``marked`` are underlined."""
    raw = explanation.word_scores(method).tolist()
    shown = explanation.display_scores(method).tolist()
    middle = raw.index(max(raw))
    first = max(0, min(middle - words // 2, len(raw) - words))
    written = []
    for number, word in list(enumerate(explanation.words[0]))[first : first + words]:
        colour = background(shown[number], signed=explanation.signed[method])
        text = _word(escape(word.text), raw[number], colour)
        written.append(f"<u>{text}</u>" if marked[number] else text)
    before, behind = "… " if first else "", " …" if first + words < len(raw) else ""
    return (
        f'<p dir="auto" style="margin: 0; color: #1a1a1a; background: #ffffff">{before}{" ".join(written)}{behind}</p>'
    )


def _word(text: str, raw: float, colour: str) -> str:
    return f'<span style="background: {colour}; border-radius: 0.2em" title="{raw:.4g}">{text}</span>'
