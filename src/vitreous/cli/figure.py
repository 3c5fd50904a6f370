"""``vitreous figure``: draw a figure of an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from vitreous._utils.defaults import DEFAULT_METHODS, DEFAULT_OPACITY, split_spellings
from vitreous._utils.messages import close_match
from vitreous._utils.storage import expanded
from vitreous.cli.console import plain_warnings, print_line, stderr_console, stdout_console
from vitreous.cli.console import steps as show_steps
from vitreous.cli.options import (
    METHOD_HELP,
    DebugOption,
    DeviceOption,
    ImageSizeOption,
    MeanOption,
    OutputsOption,
    PluginOption,
    StdOption,
    TargetOption,
    check_target_or_topk,
    parse_channels,
    parse_image_size,
)
from vitreous.errors import InputError


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        summary: what it shows.
        methods: its default methods.
        several_images: whether it shows more than one image.
        several_classes: whether it shows more than one class of an image.
    """

    summary: str
    methods: tuple[str, ...] = DEFAULT_METHODS
    several_images: bool = False
    several_classes: bool = False


FIGURE_KINDS = {
    "overlay": FigureKind("maps over the full-resolution image, with colour bars", ("tokentm",), several_classes=True),
    "comparison": FigureKind("methods side by side, one row per image", several_images=True, several_classes=True),
    "classes": FigureKind("maps for several classes of one image, side by side", several_classes=True),
    "depth": FigureKind("a map as more and more blocks are aggregated", ("tokentm", "gradtoken")),
    "heads": FigureKind("the signed map of every head", ("gradtoken:propagation=none", "gradtoken")),
    "layers": FigureKind("a map summed over all blocks from each start layer on", ("decompx.skipplus",)),
    "curves": FigureKind("the probability of the class while relevant parts are deleted or inserted"),
    "transformation": FigureKind("attention, length, direction and their product in one block (TokenTM)", ()),
}


def find_figure_kind(name: str) -> FigureKind:
    """Return a kind of figure by name."""
    if name not in FIGURE_KINDS:
        hint = close_match(name, FIGURE_KINDS) or f"; figures are {', '.join(FIGURE_KINDS)}"
        raise InputError(f"there is no figure {name!r}{hint}")
    return FIGURE_KINDS[name]


def figure(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help=f"{', '.join(FIGURE_KINDS)}.", show_default=False)
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Image files, or 'demo' for the shipped image.", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID or hf/FOLDER.")
    ] = "demo",
    method: Annotated[
        list[str] | None, typer.Option("--method", "--methods", help=METHOD_HELP, show_default="see --list")
    ] = None,
    target: TargetOption = None,
    topk: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Explain the K most likely classes.", show_default="classes: 3"),
    ] = None,
    outputs: OutputsOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .png, .svg or .pdf file.", show_default="NAME.png")
    ] = None,
    patches: Annotated[
        bool, typer.Option("--patches", help="Draw patches as rectangles, without interpolation.")
    ] = False,
    opacity: Annotated[float, typer.Option(min=0, max=1, help="Opacity of the maps.")] = DEFAULT_OPACITY,
    block: Annotated[int, typer.Option(help="transformation: the block; -1 is the last.")] = -1,
    by: Annotated[
        Literal["patches", "pixels"], typer.Option(help="curves: drop whole patches, or set pixels to black.")
    ] = "patches",
    steps: Annotated[int, typer.Option(min=1, help="curves: number of steps.")] = 10,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Draw a figure of images and save it as PNG, SVG or PDF."""
    if list_:
        stdout_console().print(_table())
        return
    if name is None or not images:
        raise typer.BadParameter("give a NAME and an IMAGE; --list shows the names", param_hint="NAME IMAGE")
    check_target_or_topk(target, topk)
    kind = find_figure_kind(name)
    methods = split_spellings(method) if method else list(kind.methods)
    channel_mean, channel_std = parse_channels(mean, "--mean"), parse_channels(std, "--std")
    size = parse_image_size(image_size)

    from vitreous.cli import figure_drawing  # noqa: PLC0415  # imports torch and matplotlib
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    request = figure_drawing.FigureRequest(
        name=name,
        model=model,
        methods=methods,
        targets=target or [],
        topk=topk,
        outputs=outputs,
        out=expanded(out or f"{name}.png"),
        smooth=not patches,
        opacity=opacity,
        block=block,
        by=by,
        steps=steps,
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        device=device,
    )
    console = stderr_console()
    with plain_warnings(console), show_steps(console, f"drawing {name}"):
        file = figure_drawing.run(images, request)
    print_line(stdout_console(), str(file))


def _table() -> Table:
    table = Table(box=None)
    table.add_column("figure", no_wrap=True, style="bold")
    table.add_column("what it shows")
    table.add_column("default methods", style="dim")
    for name, kind in FIGURE_KINDS.items():
        table.add_row(Text(name), Text(kind.summary), Text(", ".join(kind.methods) or "tokentm"))
    return table
