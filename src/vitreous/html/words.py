"""Text explanations as HTML: words coloured by their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Protocol

from vitreous.explanation.views import register_view
from vitreous.html.page import document, macro
from vitreous.html.report import contents_section, meaning, provenance_section
from vitreous.pictures.canvas import NOT_SHOWN
from vitreous.pictures.style import word_colour
from vitreous.text.explanation import By, TextExplanation

SAME_SCORES = "All words have the same score: nothing is coloured."

_TEMPLATE = "words.html"
_TOP = 3
_SHOWN_IN_CONTENTS = 60  # characters of a text


class Paint(Protocol):
    """Gives the CSS colour behind a word whose score is scaled for display."""

    def __call__(self, strength: float, /, *, signed: bool) -> str: ...


@dataclass(frozen=True)
class _Stretch:
    """A piece of a text: a word with score and colour, or what stands between words."""

    text: str
    score: float = 0.0
    colour: str = ""
    marked: bool = False


@dataclass(frozen=True)
class _Map:
    method: str
    label: str
    stretches: list[_Stretch]
    problem: str
    note: str = ""


@dataclass(frozen=True)
class _Text:
    predictions: str
    maps: list[_Map]
    anchor: str = ""


@register_view(TextExplanation, "html")
def page(explanation: TextExplanation, *, by: By, command: str | None = None) -> str:
    """Render a report: summary, contents, the coloured texts, what the methods mean, how it was made."""
    texts = [_text(explanation, index, by, f"text-{index + 1}") for index in range(len(explanation))]
    listed = [
        (text.anchor, shorten(whole, _SHOWN_IN_CONTENTS, placeholder=" …"), text.predictions.partition(", ")[0])
        for text, whole in zip(texts, explanation.texts, strict=True)
    ]
    methods, provenance = explanation.methods, explanation.provenance
    return document(
        "Which words made the model say this?",
        contents_section(listed, methods, provenance, "text")
        + macro(_TEMPLATE, "body", _samples(explanation, word_colour), texts)
        + macro("methods.html", "meanings", [(method, meaning(method)) for method in methods])
        + provenance_section(provenance, "vitreous.explain_text, in Python" if command is None else command),
        style="report.css",
    )


@register_view(TextExplanation, "notebook:html")
def body(explanation: TextExplanation, *, by: By = "max") -> str:
    """Render a part for any page: for every text the predictions, then a paragraph per method and class."""
    texts = [_text(explanation, index, by) for index in range(len(explanation))]
    return macro(_TEMPLATE, "body", _samples(explanation, word_colour), texts)


def legend(explanation: TextExplanation, paint: Paint = word_colour) -> str:
    """Render what the colours mean."""
    return macro(_TEMPLATE, "legend", _samples(explanation, paint))


def coloured(
    explanation: TextExplanation, method: str, index: int, number: int, by: By, paint: Paint = word_colour
) -> str:
    """Render one text as a paragraph with coloured words, whose scores show on hover.

    If a score is NaN or infinite, the paragraph says that the text is not shown.
    """
    shown = _map(explanation, method, index, number, by, paint)
    return macro(_TEMPLATE, "coloured", shown)


def excerpt(explanation: TextExplanation, method: str, marked: Sequence[bool], words: int = 40) -> str:
    """Render the words around the highest one of the first text; ``marked`` ones are underlined."""
    raw = explanation.word_scores(method).tolist()
    shown = explanation.display_scores(method).tolist()
    middle = raw.index(max(raw))
    first = max(0, min(middle - words // 2, len(raw) - words))
    chosen = [
        _Stretch(word.text, raw[number], word_colour(shown[number], signed=explanation.signed[method]), marked[number])
        for number, word in list(enumerate(explanation.words[0]))[first : first + words]
    ]
    return macro(_TEMPLATE, "excerpt", chosen, first > 0, first + words < len(raw))


def _samples(explanation: TextExplanation, paint: Paint) -> list[tuple[str, str]]:
    samples = [("for the class", paint(1.0, signed=True)), ("against it", paint(-1.0, signed=True))]
    if not any(explanation.signed.values()):
        samples.clear()
    if not all(explanation.signed.values()):
        samples.append(("important (methods without a sign)", paint(1.0, signed=False)))
    return samples


def _text(explanation: TextExplanation, index: int, by: By, anchor: str = "") -> _Text:
    likely = explanation.top(_TOP, index=index)
    predictions = ", ".join(f"{label} {explanation.format_output(number, index)}" for number, label, _ in likely)
    maps = [
        _map(explanation, method, index, number, by, word_colour)
        for method in explanation.methods
        for number in range(explanation.classes_per_image)
    ]
    return _Text(predictions, maps, anchor)


def _map(explanation: TextExplanation, method: str, index: int, number: int, by: By, paint: Paint) -> _Map:
    label = explanation.label(index, number)
    if not explanation.shows(method, index, number, by=by):
        return _Map(method, label, [], NOT_SHOWN)
    note = SAME_SCORES if explanation.is_flat(method, index, number, by=by) else ""
    return _Map(method, label, list(_stretches(explanation, method, index, number, by, paint)), "", note)


def _stretches(
    explanation: TextExplanation, method: str, index: int, number: int, by: By, paint: Paint
) -> Iterator[_Stretch]:
    raw = explanation.word_scores(method, index, number, by=by).tolist()
    shown = explanation.display_scores(method, index, number, by=by).tolist()
    for text, word in explanation.spans(index):
        if word is None:
            yield _Stretch(text)
        else:
            yield _Stretch(text, raw[word], paint(shown[word], signed=explanation.signed[method]))
