"""``vitreous explain-text``: explain the predictions of a text classifier."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.style import Style
from rich.text import Text

import vitreous
from vitreous._utils.defaults import split_spellings
from vitreous._utils.storage import write_text
from vitreous.cli.console import (
    DebugOption,
    DeviceOption,
    JsonOption,
    OutputsOption,
    PluginOption,
    TextMethodOption,
    TextTargetOption,
    check_target_or_topk,
    one_line,
    parse_html_path,
    plain_warnings,
    print_json,
    print_line,
    stderr_console,
    stdout_console,
    steps,
)
from vitreous.cli.explain import class_as_json
from vitreous.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.text.explanation import TextExplanation

WordScore = Literal["max", "sum"]

_TOP = 3  # predictions shown of a text


def explain_text(
    *,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts; - reads one from standard input.")],
    model: Annotated[
        str, typer.Option(help="A text classifier with its tokenizer: demo-text, hf/ID or hf/FOLDER.")
    ] = "demo-text",
    method: TextMethodOption = None,
    target: TextTargetOption = None,
    topk: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K most likely classes of each text.")
    ] = None,
    outputs: OutputsOption = None,
    windows: Annotated[
        bool, typer.Option("--windows", help="Explain long texts in overlapping windows instead of truncating them.")
    ] = False,
    by: Annotated[
        WordScore, typer.Option(help="Score of a word: the maximum or the sum of the scores of its word pieces.")
    ] = "max",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", "--html", metavar="FILE", help="Also write a self-contained HTML report of the coloured texts."
        ),
    ] = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Explain texts: colour every word by its score, red for the class and blue against it."""
    check_target_or_topk(target, topk)
    report_path = parse_html_path(report, "--report")
    methods = split_spellings(method) if method else None
    contents = [_read_text(text) for text in texts]

    from vitreous.html.words import page as words_page  # noqa: PLC0415
    from vitreous.inputs.target_objects import parse_target  # noqa: PLC0415  # these import torch
    from vitreous.models.hf_models import load_text_model  # noqa: PLC0415
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    console = stderr_console()
    with plain_warnings(console), steps(console, f"loading {model}") as step:
        loaded = load_text_model(model, device=device)
        targets = [[parse_target(text, loaded.class_names) for text in target]] * len(contents) if target else None
        step(f"explaining {len(contents)} text{'s' if len(contents) > 1 else ''}")
        explanation = vitreous.explain_text(
            loaded, contents, methods, targets, topk=topk, outputs=outputs, windows=windows
        )
    if report_path is not None:
        write_text(report_path, words_page(explanation, by=by, command=shlex.join(("vitreous", *sys.argv[1:]))))
    if as_json:
        print_json(_as_json(explanation, by))
        return
    _print_texts(explanation, stdout_console(), by)
    if report_path is not None:
        print_line(stdout_console(), f"report: {report_path}")


def _read_text(argument: str) -> str:
    if argument != "-":
        return argument
    if sys.stdin is None:
        raise InputError("standard input is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError("standard input is not UTF-8 text") from error


def _print_texts(explanation: TextExplanation, console: Console, by: WordScore) -> None:
    """Print the predictions for each text, then the text once per method and class."""
    from vitreous.html.words import SAME_SCORES  # noqa: PLC0415
    from vitreous.pictures.canvas import NOT_SHOWN  # noqa: PLC0415  # imports numpy and Pillow

    for index in range(len(explanation)):
        predictions = [
            f"{prediction.label} {explanation.format_output(prediction.class_index, index)}"
            for prediction in explanation.top(_TOP, index=index)
        ]
        print_line(console, ", ".join(predictions), "bold")
        for method in explanation.methods:
            for number in range(explanation.classes_per_image):
                print_line(console, f"{method}, explained: {explanation.label(index, number)}", "dim")
                if not explanation.shows(method, index, number, by=by):
                    print_line(console, NOT_SHOWN)
                    continue
                console.print(_coloured(explanation, method, index, number, by))
                if explanation.is_flat(method, index, number, by=by):
                    print_line(console, SAME_SCORES, "dim")
                    continue
                # For readers who do not see the colours, and for output in a file.
                print_line(console, f"strongest: {_strongest(explanation, method, index, number, by)}", "dim")
        console.print()


def _coloured(explanation: TextExplanation, method: str, index: int, number: int, by: WordScore) -> Text:
    from vitreous.pictures.style import word_colour  # noqa: PLC0415  # imports numpy

    scores = explanation.display_scores(method, index, number, by=by).tolist()
    text = Text()
    for stretch, word in explanation.spans(index):
        # Line breaks stay; characters that would control the terminal are escaped.
        shown = "\n".join(one_line(line) for line in stretch.split("\n"))
        if word is None:
            text.append(shown)
        else:
            colour = word_colour(scores[word], signed=explanation.signed[method])
            text.append(shown, style=Style(color="#1a1a1a", bgcolor=colour))
    return text


def _strongest(explanation: TextExplanation, method: str, index: int, number: int, by: WordScore) -> str:
    found = explanation.strongest(method, index, number, by=by)
    form = "+.3g" if explanation.signed[method] else ".3g"
    return ", ".join(f"{explanation.words[index][word].text} {score:{form}}" for word, score in found)


def _as_json(explanation: TextExplanation, by: WordScore) -> dict[str, Any]:
    """Return all scores as JSON values, with the position of every word and word piece in its text."""
    return {
        "model": explanation.provenance.get("model"),
        "methods": list(explanation.methods),
        "left_out": dict(explanation.left_out),
        "by": by,
        "texts": [_text_as_json(explanation, index, by) for index in range(len(explanation))],
    }


def _text_as_json(explanation: TextExplanation, index: int, by: WordScore) -> dict[str, Any]:
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
