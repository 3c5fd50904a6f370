"""Texts in colours as HTML: self-contained, every word of the user's escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from vitreous.pictures.word_colours import background, spans_of

if TYPE_CHECKING:
    from vitreous.text_explanation import By, TextExplanation

_STYLE = "font-family: sans-serif; color: #1a1a1a; background: #ffffff; padding: 0.6em; line-height: 1.7"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Vitreous: words that made the model say this</title></head>
<body>
{body}
</body>
</html>
"""


def page(explanation: TextExplanation, *, by: By) -> str:
    """Give a whole page."""
    return _PAGE.format(body=body(explanation, by=by))


def body(explanation: TextExplanation, *, by: By) -> str:
    """Give what can stand in any page: for every text what the model says, then a paragraph per method and class."""
    parts = [_legend(explanation)]
    for index in range(len(explanation)):
        likely = ", ".join(
            f"{escape(label)} {probability:.1%}" for _, label, probability in explanation.top(3, index=index)
        )
        parts.append(f'<p style="margin: 0.8em 0 0.2em"><b>{likely}</b></p>')
        for method in explanation.methods:
            for number in range(explanation.classes_per_image):
                parts.append(_caption(explanation, method, index, number))
                parts.append(_text(explanation, method, index, number, by))
    return f'<div style="{_STYLE}">\n' + "\n".join(parts) + "\n</div>"


def _legend(explanation: TextExplanation) -> str:
    samples = [("for the class", background(1.0, signed=True)), ("against it", background(-1.0, signed=True))]
    if not all(explanation.signed.values()):
        samples.append(("important (methods without a sign)", background(1.0, signed=False)))
    shown = (f'<span style="background: {colour}; padding: 0 0.4em">{text}</span>' for text, colour in samples)
    return f'<p style="font-size: 80%; margin: 0">{" ".join(shown)}</p>'


def _caption(explanation: TextExplanation, method: str, index: int, number: int) -> str:
    label = explanation.label(index, number)
    return (
        f'<p style="font-size: 80%; color: #555555; margin: 0.4em 0 0">{escape(method)}, explained: {escape(label)}</p>'
    )


def _text(explanation: TextExplanation, method: str, index: int, number: int, by: By) -> str:
    raw = explanation.word_scores(method, index, number, by=by).tolist()
    shown = explanation.display_scores(method, index, number, by=by).tolist()
    written = []
    for stretch, word in spans_of(explanation, index):
        text = escape(stretch)
        if word is not None:
            colour = background(shown[word], signed=explanation.signed[method])
            text = f'<span style="background: {colour}; border-radius: 0.2em" title="{raw[word]:.4g}">{text}</span>'
        written.append(text)
    return f'<p style="margin: 0; white-space: pre-wrap">{"".join(written)}</p>'
