"""What ``vitreous explain-text`` tells: the words in colours, or everything as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

from vitreous.cli.classes import class_as_json
from vitreous.cli.console import one_line, say
from vitreous.pictures.captions import NOT_SHOWN
from vitreous.pictures.colours import word_colour

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.text_explanation import By, TextExplanation

_TOP = 3


def show(explanation: TextExplanation, console: Console, *, by: By) -> None:
    """Print what the model says of each text, then the text once for every method and class."""
    for index in range(len(explanation)):
        likely = explanation.top(_TOP, index=index)
        said = [
            f"{prediction.label} {explanation.format_output(prediction.class_index, index)}" for prediction in likely
        ]
        say(console, ", ".join(said), "bold")
        for method in explanation.methods:
            for number in range(explanation.classes_per_image):
                say(console, f"{method}, explained: {explanation.label(index, number)}", "dim")
                if not explanation.shows(method, index, number, by=by):
                    say(console, NOT_SHOWN)
                    continue
                console.print(_coloured(explanation, method, index, number, by))
                # Colours are not seen by everybody, nor in a file.
                say(console, f"strongest: {_strongest(explanation, method, index, number, by)}", "dim")
        console.print()


def as_json(explanation: TextExplanation, *, by: By) -> dict[str, Any]:
    """Give all scores as JSON values, with the place of every word and piece in its text."""
    return {
        "model": explanation.provenance.get("model"),
        "methods": list(explanation.methods),
        "left_out": dict(explanation.left_out),
        "by": by,
        "texts": [_text_as_json(explanation, index, by) for index in range(len(explanation))],
    }


def _coloured(explanation: TextExplanation, method: str, index: int, number: int, by: By) -> Text:
    shown = explanation.display_scores(method, index, number, by=by).tolist()
    text = Text()
    for stretch, word in explanation.spans(index):
        style = ""
        if word is not None:
            paper = word_colour(shown[word], signed=explanation.signed[method])
            style = Style(color="#1a1a1a", bgcolor=paper)  # type: ignore[assignment]  # rich takes either
        text.append(_printable(stretch), style=style)
    return text


def _printable(stretch: str) -> str:
    """The text with its line breaks, without characters that would steer the terminal."""
    return "\n".join(one_line(line) for line in stretch.split("\n"))


def _strongest(explanation: TextExplanation, method: str, index: int, number: int, by: By) -> str:
    found = explanation.strongest(method, index, number, by=by)
    return ", ".join(f"{explanation.words[index][word].text} {score:+.3g}" for word, score in found)


def _text_as_json(explanation: TextExplanation, index: int, by: By) -> dict[str, Any]:
    targets = [explanation.class_index(index, number) for number in range(explanation.classes_per_image)]
    return {
        "text": explanation.texts[index],
        "predictions": [
            class_as_json(explanation, found.class_index, index) for found in explanation.top(_TOP, index=index)
        ],
        "targets": [class_as_json(explanation, target, index) for target in targets],
        "words": [word._asdict() for word in explanation.words[index]],
        "pieces": [piece._asdict() for piece in explanation.pieces[index]],
        "scores": {
            method: [
                {
                    "words": explanation.word_scores(method, index, number, by=by).tolist(),
                    "pieces": explanation.piece_scores(method, index, number).tolist(),
                }
                for number in range(len(targets))
            ]
            for method in explanation.methods
        },
    }
