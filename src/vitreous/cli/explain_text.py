"""``vitreous explain-text``: which words made a text classifier say this class?"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import vitreous
from vitreous.cli.console import messages, plain_warnings, print_json, results, say
from vitreous.cli.guard import DebugOption
from vitreous.cli.options import DeviceOption, MethodOption, OutputsOption, TargetOption, find_page, refuse_both
from vitreous.cli.plugins import PluginOption
from vitreous.cli.progress import steps
from vitreous.cli.spellings import split_spellings
from vitreous.errors import InputError
from vitreous.storage import write_text


class By(StrEnum):
    """How the pieces of a word become one score."""

    max = "max"
    sum = "sum"


def explain_text(
    *,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts; - reads one from the standard input.")],
    model: Annotated[str, typer.Option(help="A text classifier with its tokenizer: hf/ID or hf/FOLDER.")],
    method: MethodOption = None,
    target: TargetOption = None,
    topk: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K most likely classes of each text.")
    ] = None,
    outputs: OutputsOption = None,
    windows: Annotated[
        bool, typer.Option("--windows", help="Explain long texts in overlapping windows instead of cutting them.")
    ] = False,
    by: Annotated[By, typer.Option(help="The score of a word: the largest of its pieces, or their sum.")] = By.max,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write a page with the coloured texts.")
    ] = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Explain texts: show every word in the colour of its score, red for the class and blue against it."""
    refuse_both(target, topk)
    page = find_page(html, "--html")
    methods = split_spellings(method) if method else None
    given = [_text(text) for text in texts]

    # These import torch: --help must not wait for it.
    from vitreous.class_names import find_class  # noqa: PLC0415
    from vitreous.cli import words  # noqa: PLC0415
    from vitreous.models.text_models import load_text_model  # noqa: PLC0415
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    console = messages()
    with plain_warnings(console), steps(console, f"loading {model}") as step:
        loaded = load_text_model(model, device=device)
        classes = [[find_class(name, loaded.class_names) for name in target]] * len(given) if target else None
        step(f"explaining {len(given)} text{'s' if len(given) > 1 else ''}")
        explanation = vitreous.explain_text(
            loaded,
            given,
            methods,
            classes,
            topk=topk,
            outputs=None if outputs is None else outputs.value,
            windows=windows,
        )
    if page is not None:
        write_text(page, explanation.html(by=by.value))
    if as_json:
        print_json(words.as_json(explanation, by=by.value))
    else:
        words.show(explanation, results(), by=by.value)
        if page is not None:
            say(results(), f"page: {page}")


def _text(argument: str) -> str:
    if argument != "-":
        return argument
    if sys.stdin is None:
        raise InputError("the standard input is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError("the standard input is not text in UTF-8") from error
