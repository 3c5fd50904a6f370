"""``vitreous figure``: draw a figure of an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from vitreous._utils.defaults import DEFAULT_OPACITY, PAPERS, split_spellings
from vitreous._utils.messages import close_match
from vitreous._utils.storage import expanded
from vitreous.cli.console import (
    METHOD_HELP,
    DebugOption,
    DeviceOption,
    ImageSizeOption,
    MeanOption,
    OutputsOption,
    PluginOption,
    PromptOption,
    StdOption,
    TargetOption,
    check_prompts,
    check_target_or_topk,
    parse_channels,
    parse_image_size,
    plain_warnings,
    print_line,
    stderr_console,
    stdout_console,
)
from vitreous.cli.console import steps as show_steps
from vitreous.errors import InputError


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        summary: what it shows.
        methods: its default methods.
        images: how many images it shows: one, two, several, or none because it reads results of `vitreous evaluate` or
            a folder of `explanation.save`.
        several_classes: whether it shows more than one class of an image.
    """

    summary: str
    methods: tuple[str, ...] = PAPERS
    images: Literal["one", "two", "several", "none"] = "one"
    several_classes: bool = False


FIGURE_KINDS = {
    "overlay": FigureKind("maps over the full-resolution image, with colour bars", ("tokentm",), several_classes=True),
    "comparison": FigureKind("methods side by side, one row per image", images="several", several_classes=True),
    "classes": FigureKind("maps for several classes of one image, side by side", several_classes=True),
    "contrast": FigureKind("two classes and why the first rather than the second", ("decompx.skipplus", "gae")),
    "prompts": FigureKind(
        "maps for several prompts of a model of images and texts", ("grad_eclip", "decompx.skipplus")
    ),
    "similar": FigureKind("why two images are similar: maps on both", ("decompx.skipplus",), images="two"),
    "depth": FigureKind("a map as more and more blocks are aggregated", ("tokentm", "gradtoken")),
    "heads": FigureKind("the signed map of every head", ("gradtoken:propagation=none", "gradtoken")),
    "layers": FigureKind("a map summed over all blocks from each start layer on", ("decompx.skipplus",)),
    "filmstrip": FigureKind("what the model sees and predicts at each step of deletion or insertion", ("tokentm",)),
    "curves": FigureKind("the probability of the class while relevant parts are deleted or inserted"),
    "dataset-curves": FigureKind("mean deletion and insertion curves of several images, with bands", images="several"),
    "layer-curve": FigureKind("deletion and insertion areas by start layer", ("decompx", "ixg"), images="several"),
    "transformation": FigureKind("attention, length, direction and their product in one block (TokenTM)", ()),
    "slices": FigureKind("slices of a volume, from a folder of `explanation.save`", (), images="none"),
    "frames": FigureKind("frames of a clip, from a folder of `explanation.save`", (), images="none"),
    "dots": FigureKind("results of `vitreous evaluate`: a dot with its interval per method", (), images="none"),
    "radar": FigureKind("results of `vitreous evaluate`: a polygon per method over the metrics", (), images="none"),
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
        typer.Argument(
            metavar="IMAGE",
            help="Image files, or 'demo' for the shipped image; dots, radar: a folder of `vitreous evaluate`; "
            "slices, frames: one of `explanation.save`.",
            show_default=False,
        ),
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
    prompt: PromptOption = None,
    outputs: OutputsOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .png, .svg or .pdf file.", show_default="NAME.png")
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTH",
            help="Width of the figure, such as 3.25in, 6.9in, 8.5cm or 240pt; fonts then have the size of print.",
            show_default="as wide as its content",
        ),
    ] = None,
    dpi: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Pixels per inch of a PNG, and the minimum of images in PDF and SVG.", show_default="300"
        ),
    ] = None,
    font: Annotated[
        str | None, typer.Option(help="Font family or .ttf file, such as 'DejaVu Serif'.", show_default="DejaVu Sans")
    ] = None,
    cmap: Annotated[
        str | None,
        typer.Option(
            help="Colour map of matplotlib: a diverging one for signed maps, any other for unsigned ones, or both: "
            "viridis,RdBu_r.",
            show_default="inferno and blue to red",
        ),
    ] = None,
    columns: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maps or charts side by side.", show_default="all")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES", help="Names in place of the method spellings, separated by commas; 'none' leaves them out."
        ),
    ] = None,
    context: Annotated[
        bool, typer.Option("--context", help="Show the whole image, dimmed where the model did not see it.")
    ] = False,
    shared_scale: Annotated[
        bool | None,
        typer.Option(
            "--shared-scale/--own-scale",
            help="One colour scale for all classes and methods, or one for each map.",
            show_default="own; heads: shared",
        ),
    ] = None,
    stretch: Annotated[
        bool, typer.Option("--stretch", help="Start the scales of unsigned maps at the smallest score, not at zero.")
    ] = False,
    outline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A mask whose outline is drawn on the maps.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="KIND:PATH", help="A data set; IMAGE then is a number in it, and its masks are outlined."),
    ] = None,
    patches: Annotated[
        bool, typer.Option("--patches", help="Draw patches as rectangles, without interpolation.")
    ] = False,
    opacity: Annotated[float, typer.Option(min=0, max=1, help="Opacity of the strongest score.")] = DEFAULT_OPACITY,
    block: Annotated[int, typer.Option(help="transformation: the block; -1 is the last.")] = -1,
    by: Annotated[
        Literal["patches", "pixels"], typer.Option(help="curves: drop whole patches, or set pixels to black.")
    ] = "patches",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps of curves and filmstrips.", show_default="10; filmstrip: 5"),
    ] = None,
    direction: Annotated[
        Literal["deletion", "insertion"], typer.Option(help="filmstrip: delete or insert the most relevant patches.")
    ] = "deletion",
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Draw a figure of images or results and save it as PNG, SVG or PDF."""
    if list_:
        stdout_console().print(_table())
        return
    if name is None or not images:
        raise typer.BadParameter("give a NAME and an IMAGE; --list shows the names", param_hint="NAME IMAGE")
    check_target_or_topk(target, topk)
    check_prompts(prompt, target, topk)
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
        prompts=list(dict.fromkeys(prompt or [])),
        outputs=outputs,
        out=expanded(out or f"{name}.png"),
        look={
            "smooth": not patches,
            "opacity": opacity,
            "cmap": cmap,
            "context": context,
            "shared_scale": shared_scale,
            "from_zero": not stretch,
            "width": width,
            "dpi": dpi,
            "font": font,
            "columns": columns,
            "labels": _split_labels(labels),
        },
        outline=None if outline is None else expanded(outline),
        data=data,
        block=block,
        by=by,
        steps=steps,
        direction=direction,
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        device=device,
    )
    console = stderr_console()
    with plain_warnings(console), show_steps(console, f"drawing {name}"):
        file = figure_drawing.run(images, request)
    print_line(stdout_console(), str(file))


def _split_labels(values: list[str] | None) -> tuple[str, ...] | None:
    """Split names at commas; ``none`` alone is no name at all."""
    if values is None:
        return None
    names = tuple(name.strip() for value in values for name in value.split(","))
    return () if names == ("none",) else names


def _table() -> Table:
    table = Table(box=None)
    table.add_column("figure", no_wrap=True, style="bold")
    table.add_column("what it shows")
    table.add_column("default methods", style="dim")
    for name, kind in FIGURE_KINDS.items():
        table.add_row(
            Text(name),
            Text(kind.summary),
            Text(", ".join(kind.methods) or ("" if kind.images == "none" else "tokentm")),
        )
    return table
