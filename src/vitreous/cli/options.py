"""Options that several commands share: names, help texts and checks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vitreous._utils.defaults import (
    OUTPUTS_DEFAULT,
    OUTPUTS_HELP,
    PAPERS,
    PLUGIN_HELP,
    RUNNER_UP_HELP,
    OutputActivation,
)
from vitreous._utils.storage import expanded

DEBUG = "vitreous.debug"  # key in the metadata that a command and its group share

METHOD_HELP = "A method, see `vitreous methods`. Repeat the option or separate methods by commas."
METHODS_HELP = (
    "Methods separated by commas, a family of methods, or a group: white-box (all but the perturbation family, which "
    "runs the model on masked images), one-run (white-box methods without a second forward pass), all."
)


def _set_debug(ctx: typer.Context, value: bool) -> bool:  # noqa: FBT001  # typer's signature
    if value:
        ctx.meta[DEBUG] = True  # so that --debug works before and after the name of a command
    return value


DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help=PLUGIN_HELP),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", "--methods", help=METHOD_HELP, show_default=RUNNER_UP_HELP),
]
TextMethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", "--methods", help=METHOD_HELP, show_default=", ".join(PAPERS)),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option(
        help="The class to explain, by index or name; or a contrast, 'tabby vs tiger cat', 'tabby vs next', 'predicted "
        "vs next'. Repeat the option for several.",
        show_default="predicted class",
    ),
]
PromptOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A text to compare the images with, for models of images and texts (demo-clip, CLIP, SigLIP). Repeat the "
        "option for several.",
        metavar="TEXT",
        show_default=False,
    ),
]
OutputsOption = Annotated[
    OutputActivation | None,
    typer.Option(help=OUTPUTS_HELP, show_default=OUTPUTS_DEFAULT),
]
MeanOption = Annotated[
    str | None, typer.Option(help="Mean of the channels, one number or three: 0.5 or 0.48,0.46,0.41.")
]
StdOption = Annotated[str | None, typer.Option(help="Standard deviation of the channels, one number or three.")]
ImageSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Size of the model's input, 224 or HEIGHTxWIDTH.")
]
StageOption = Annotated[
    int | None,
    typer.Option(
        help="Stage of a hierarchical model (Swin, PVT, ...) to read: 0 is the first, -1 the last.",
        show_default="last",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, mps.")]


def parse_channels(text: str | None, option: str) -> tuple[float, ...] | None:
    """Parse one number or three, separated by commas."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in {1, 3} or not all(map(math.isfinite, values)):
        raise typer.BadParameter(f"{text!r} is not one number or three separated by commas", param_hint=option)
    return values


def parse_image_size(text: str | None, option: str = "--image-size") -> tuple[int, int] | None:
    """Parse one number, or height and width as in ``224x192``."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,8})(?:[x,]([1-9]\d{0,8}))?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 224 or 224x192", param_hint=option)
    return int(match[1]), int(match[2] or match[1])


def parse_html_path(path: Path | None, option: str) -> Path | None:
    """Expand ``~`` and require the suffix .html, so that an image given by mistake is not overwritten."""
    if path is None:
        return None
    if path.suffix.lower() not in {".html", ".htm"}:
        raise typer.BadParameter(f"the report must be an .html file, not {path.name}", param_hint=option)
    return expanded(path)


def check_prompts(prompts: Sequence[str] | None, target: Sequence[str] | None, topk: int | None) -> None:
    """Refuse ``--prompt`` together with other targets or ``--topk``, and empty prompts."""
    if prompts and (target or topk):
        raise typer.BadParameter(
            f"it cannot be combined with --{'target' if target else 'topk'}", param_hint="--prompt"
        )
    if not all(prompt.strip() for prompt in prompts or ()):
        raise typer.BadParameter("the prompt is empty: say in a few words what to look for", param_hint="--prompt")


def check_target_or_topk(target: Sequence[str] | None, topk: int | None) -> None:
    """Refuse ``--target`` together with ``--topk``."""
    if target and topk:
        raise typer.BadParameter("it cannot be combined with --topk", param_hint="--target")
