"""Pieces of the text tab as HTML: words in colours with their legend, and the strongest of them."""

from __future__ import annotations

from vitreous.html import page
from vitreous.html import words as words_html
from vitreous.html.report import meaning
from vitreous.pictures.colours import strongest_word_colour
from vitreous.text_explanation import By, TextExplanation
from vitreous.web.text_record import TextRecord
from vitreous.web.wanted import Wanted, classes_of

NO_MODEL = (
    "<p>This server has no text model yet: start it with "
    "<code>vitreous serve --text-model hf/FOLDER</code>, the folder of a text classifier with its tokenizer, "
    "and texts are explained here.</p>"
)
HINT = "<p>Write or paste a text on the left, and press <b>Explain</b>.</p>"
_STRONGEST = 6


def words(record: TextRecord, wanted: Wanted, by: By) -> str:
    """Give the text in the colours of every method, the classes side by side."""
    classes = classes_of(wanted, record)
    shown = [method for method in wanted.methods if method not in record.failed]
    explanation = record.explanation(shown, classes) if shown else None
    parts = [f'<p class="vitreous-faint">{_cut(record)}</p>' if record.taken < record.pieces else ""]
    for method in wanted.methods:
        parts.append(f'<h3><code title="{page.escape(meaning(method))}">{page.escape(method)}</code></h3>\n')
        if explanation is None or method in record.failed:
            parts.append(f"<p>{page.escape(record.failed[method])}</p>\n")
            continue
        cards = [_card(record, explanation, method, number, by) for number in range(len(classes))]
        parts.append(f'<div class="vitreous-grid vitreous-texts">{"".join(cards)}</div>\n')
    legend = words_html.legend(explanation, paint) if explanation else ""
    return f'<div class="vitreous-words">{legend}{"".join(parts)}</div>'


def paint(strength: float, /, *, signed: bool) -> str:
    """Give a colour that lets the paper through, whether that is light or dark."""
    red, green, blue = strongest_word_colour(strength, signed=signed)
    return f"rgb({red} {green} {blue} / calc({min(1.0, abs(strength)):.3f} * var(--vitreous-strength)))"


def _card(record: TextRecord, explanation: TextExplanation, method: str, number: int, by: By) -> str:
    caption = f"Why {page.escape(record.caption(explanation.class_index(0, number)))}?"
    text = words_html.coloured(explanation, method, 0, number, by, paint)
    strongest = _strongest(explanation, method, number, by) if explanation.shows(method, 0, number, by=by) else ""
    return f"<figure><figcaption>{caption}</figcaption>{text}{strongest}</figure>\n"


def _strongest(explanation: TextExplanation, method: str, number: int, by: By) -> str:
    """List the words with the largest scores, for whoever does not see colours or has nothing to point with."""
    shown = explanation.display_scores(method, 0, number, by=by).tolist()
    signed = explanation.signed[method]
    items = "".join(
        f'<li><span dir="auto" style="background: {paint(shown[word], signed=signed)}">'
        f"{page.escape(explanation.words[0][word].text[:40])}</span> "
        f'<span class="number">{score:{"+" if signed else ""}.3g}</span></li>'
        for word, score in explanation.strongest(method, 0, number, by=by, count=_STRONGEST)
    )
    return f'<ol class="vitreous-strongest" aria-label="strongest words">{items}</ol>'


def _cut(record: TextRecord) -> str:
    return (
        f"The text has {record.pieces:,} word pieces, and the model takes the first {record.taken:,}: "
        "the rest has no colour. Windows explain all of it."
    )
