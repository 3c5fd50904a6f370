"""``vitreous figure``: one picture that shows what an explanation is made of."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import messages, plain_warnings, results, say
from vitreous.cli.figure_kinds import KINDS, find_kind
from vitreous.cli.guard import DebugOption
from vitreous.cli.options import (
    METHOD_HELP,
    DeviceOption,
    ImageSizeOption,
    MeanOption,
    OutputsOption,
    StdOption,
    TargetOption,
    refuse_both,
)
from vitreous.cli.plugins import PluginOption
from vitreous.cli.progress import steps as progress_of
from vitreous.cli.spellings import split_spellings
from vitreous.cli.values import channel_values, height_and_width
from vitreous.defaults import DEFAULT_OPACITY
from vitreous.paths import expanded


class Parts(StrEnum):
    """What curves delete and insert."""

    PATCHES = "patches"
    PIXELS = "pixels"


def figure(
    *,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=f"{', '.join(KINDS)}.", show_default=False)] = None,
    photos: Annotated[
        list[str] | None,
        typer.Argument(metavar="PHOTO", help="Photos, or 'demo' for the photo that is shipped.", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID or hf/FOLDER.")
    ] = "demo",
    method: Annotated[
        list[str] | None, typer.Option("--method", "--methods", help=METHOD_HELP, show_default="as --list tells")
    ] = None,
    target: TargetOption = None,
    topk: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Explain the K most likely classes.", show_default="3: classes"),
    ] = None,
    outputs: OutputsOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .png, .svg or .pdf file.", show_default="NAME.png")
    ] = None,
    patches: Annotated[bool, typer.Option("--patches", help="Draw patches as rectangles, not smoothed.")] = False,
    opacity: Annotated[float, typer.Option(min=0, max=1, help="Opacity of the maps.")] = DEFAULT_OPACITY,
    block: Annotated[int, typer.Option(help="transformation: the block to look into; -1 is the last.")] = -1,
    by: Annotated[Parts, typer.Option(help="curves: drop whole patches, or paint pixels black.")] = Parts.PATCHES,
    steps: Annotated[int, typer.Option(min=1, help="curves: how many steps.")] = 10,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Draw a figure of photos and save it as PNG, SVG or PDF."""
    if list_:
        results().print(_table())
        return
    if name is None or not photos:
        raise typer.BadParameter("give a NAME and a PHOTO; --list tells the names", param_hint="NAME PHOTO")
    refuse_both(target, topk)
    kind = find_kind(name)
    methods = split_spellings(method) if method else list(kind.methods)
    channel_mean, channel_std = channel_values(mean, "--mean"), channel_values(std, "--std")
    size = height_and_width(image_size, "--image-size")

    from vitreous.cli import drawing  # noqa: PLC0415  # imports torch: --help must not wait for it
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    request = drawing.Request(
        name=name,
        model=model,
        methods=methods,
        targets=target or [],
        topk=topk,
        outputs=None if outputs is None else outputs.value,
        out=expanded(out or f"{name}.png"),
        smooth=not patches,
        opacity=opacity,
        block=block,
        by=by.value,
        steps=steps,
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        device=device,
    )
    console = messages()
    with plain_warnings(console), progress_of(console, f"drawing {name}"):
        drawn = drawing.run(photos, request)
    say(results(), str(drawn))


def _table() -> Table:
    table = Table(box=None)
    table.add_column("figure", no_wrap=True, style="bold")
    table.add_column("what it shows")
    table.add_column("methods by default", style="dim")
    for name, kind in KINDS.items():
        table.add_row(Text(name), Text(kind.summary), Text(", ".join(kind.methods) or "tokentm"))
    return table
