"""``vitreous speed``: measure time and memory of methods against plain passes of the model and other libraries."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vitreous._utils.defaults import split_spellings
from vitreous._utils.storage import expanded
from vitreous.cli.console import (
    METHODS_HELP,
    DebugOption,
    DeviceOption,
    JsonOption,
    PluginOption,
    parse_image_size,
    plain_warnings,
    print_json,
    print_line,
    stderr_console,
    stdout_console,
    steps,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vitreous.speed.request import Measured
    from vitreous.speed.timing import SpeedRow

_RANDOM = "@random"
_ABBREVIATIONS = {" forward": "F", " backward": "B", " (from block ": "@", ")": ""}
_LEGEND = (
    "ms: milliseconds for the batch on one core of this machine; "
    "/limit: time over the minimum of plain passes that the method needs, +- half of the interquartile range; "
    "/F: time over a forward pass; /FB: time over forward and backward; memory: peak memory over that of FB; "
    "1B@6: a backward pass down to block 6"
)
_PEER_LEGEND = "/ours: the time of the other library over that of the method above it"


def speed(
    *,
    model: Annotated[str, typer.Option(help="A model by name, see `vitreous models`.")] = "demo",
    random: Annotated[
        bool, typer.Option("--random", help="Random weights for timm/NAME; the time does not depend on them.")
    ] = False,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", "--method", help=METHODS_HELP, show_default="eleven methods, or those of the peers"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", min=1, help="Images per batch.")] = 4,
    size: Annotated[
        str | None,
        typer.Option(
            "--image-size",
            "--size",
            metavar="SIZE",
            help="Size of the images, 224 or HEIGHTxWIDTH.",
            show_default="the model's own",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the methods are timed in turn.")] = 5,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also measure captum, grad-cam, lxt, pnpxai and quantus."),
    ] = False,
    peer: Annotated[list[str] | None, typer.Option(help="Only this library. Repeat the option for several.")] = None,
    together: Annotated[bool, typer.Option("--together", help="Also measure all methods in one call.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the rows to this file, with date and versions.")
    ] = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Measure time and memory of methods relative to plain passes of the same model.

    Everything runs in one process on the same random images, timed in turn; the medians are compared. Another library
    whose map differs is reported and not timed.
    """
    if random and (not model.startswith("timm/") or "@" in model):
        raise typer.BadParameter("random weights are for timm/NAME", param_hint="--random")
    spellings = split_spellings(methods) if methods else []
    image_size = parse_image_size(size)
    file = None if out is None else expanded(out)

    from vitreous.plugin import load_plugins  # noqa: PLC0415  # imports torch
    from vitreous.speed.request import Request, run  # noqa: PLC0415

    load_plugins(plugin or [])
    request = Request(
        model=f"{model}{_RANDOM}" if random else model,
        methods=spellings,
        batch=batch,
        size=image_size,
        repeats=repeats,
        peers=peer or (["all"] if peers else []),
        together=together,
        device=device,
        command=shlex.join(("vitreous", *sys.argv[1:])),
    )
    console = stderr_console()
    with plain_warnings(console), steps(console, f"loading {request.model}") as step:
        measured = run(request, lambda text: step(f"measuring {text}"))
    if file is not None:
        measured.save(file)
    if as_json:
        print_json([row.as_json() for row in measured.rows])
        return
    _print_measurements(measured, stdout_console())
    if file is not None:
        print_line(stdout_console(), f"rows: {file}")


def _print_measurements(measured: Measured, console: Console) -> None:
    """Print a table of ratios, and why some methods have none."""
    timed, peers = [row for row in measured.rows if row.spread], any(row.peer for row in measured.rows)
    if timed:
        console.print(_table(timed, _title(measured), peers=peers))
    for row in measured.rows:
        if row.reason is not None:
            print_line(console, f"{_name(row)}: {row.reason}")
    print_line(console, f"{_LEGEND}; {_PEER_LEGEND}" if peers else _LEGEND, "dim")


def _table(rows: list[SpeedRow], title: str, *, peers: bool) -> Table:
    table = Table(title=Text(title), box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=20)
    for heading in ("ms", "/limit", "+-", "/F", "/FB", "memory", *(["/ours"] if peers else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("passes", min_width=9)
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row, peers=peers)))
    return table


def _title(measured: Measured) -> str:
    settings = measured.provenance
    height, width = settings["size"]
    return f"{settings['model']}, {settings['batch']} images of {height} x {width}, {settings['device']}"


def _cells(row: SpeedRow, *, peers: bool) -> list[str]:
    low, high = row.spread["ratio_limit"]
    numbers = [
        *(row.ratio_limit, (high - low) / 2, row.ratio_forward, row.ratio_forward_backward, row.ratio_peak_memory),
        *([row.ratio_peer] if peers else []),
    ]
    passes = row.passes or ""
    for long, short in _ABBREVIATIONS.items():
        passes = passes.replace(long, short)
    time = "" if row.milliseconds is None else f"{row.milliseconds:.{0 if row.milliseconds >= 100 else 1}f}"
    return [_name(row), time, *("" if number is None else f"{number:.2f}" for number in numbers), passes]


def _name(row: SpeedRow) -> str:
    return row.method if row.peer is None else f"{row.method} by {row.peer}"
