"""Options that several commands have, so that they are spelled, described and checked in one way."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitreous.defaults import DEFAULT_METHODS
from vitreous.paths import expanded

METHOD_HELP = "A method, see `vitreous methods`; repeat it, or separate several with commas."
METHODS_HELP = (
    "Methods, separated by commas; a family of methods; white-box: all but those that ask the model about masked "
    "pictures (the family perturbation); or one-run: those of them that need no run beyond forward and backward."
)

MethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", "--methods", help=METHOD_HELP, show_default=", ".join(DEFAULT_METHODS)),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A class to explain, by number or name; repeat it for several.", show_default="the predicted class"
    ),
]


class OutputsName(StrEnum):
    """What a model's outputs are; a test compares them with those of the library."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    SIGMOID = "sigmoid"
    VALUE = "value"


OutputsOption = Annotated[
    OutputsName | None,
    typer.Option(
        help="What the model's outputs are: logits (softmax), probabilities already, sigmoid (multi-label) or a value.",
        show_default="as the model says",
    ),
]
MeanOption = Annotated[
    str | None, typer.Option(help="Mean of the channels, one number or three: 0.5 or 0.48,0.46,0.41.")
]
StdOption = Annotated[str | None, typer.Option(help="Standard deviation of the channels, one number or three.")]
ImageSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Size of the model's input, 224 or HEIGHTxWIDTH.")
]
PublishedOption = Annotated[
    bool, typer.Option("--published", help="Also show what papers print for the protocol, in a table of its own.")
]
StageOption = Annotated[
    int | None,
    typer.Option(
        help="Of a hierarchical model (Swin, PVT, ...), the stage that is read: from 0, or -1 for the last.",
        show_default="the last",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")]


def find_page(path: Path | None, option: str) -> Path | None:
    """Follow ``~``, and refuse a name that says something else: a page would be written over a photo that was meant."""
    if path is None:
        return None
    if path.suffix.lower() not in {".html", ".htm"}:
        raise typer.BadParameter(f"a page is called .html, and {path.name} is not", param_hint=option)
    return expanded(path)


def refuse_both(target: Sequence[str] | None, topk: int | None) -> None:
    """Refuse classes by name together with the most likely ones."""
    if target and topk:
        raise typer.BadParameter("it cannot be combined with --topk", param_hint="--target")
