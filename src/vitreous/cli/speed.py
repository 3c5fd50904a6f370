"""``vitreous speed``: what does a method cost, beside plain passes of the model, its limit, and other projects?"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import messages, plain_warnings, print_json, results, say
from vitreous.cli.guard import DebugOption
from vitreous.cli.options import METHODS_HELP, DeviceOption
from vitreous.cli.plugins import PluginOption
from vitreous.cli.progress import steps
from vitreous.cli.spellings import split_spellings
from vitreous.cli.values import height_and_width
from vitreous.paths import expanded

_RANDOM = "@random"


def speed(
    *,
    model: Annotated[str, typer.Option(help="A model by name, see `vitreous models`.")] = "demo",
    random: Annotated[
        bool, typer.Option("--random", help="Random weights for timm/NAME: time does not depend on them.")
    ] = False,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", "--method", help=METHODS_HELP, show_default="eleven, or what the peers have"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", min=1, help="Images at once.")] = 4,
    size: Annotated[
        str | None,
        typer.Option(
            "--image-size",
            "--size",
            metavar="SIZE",
            help="Size of the images, 224 or HEIGHTxWIDTH.",
            show_default="own",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is timed, in turn.")] = 5,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also measure the same by captum, grad-cam, lxt, pnpxai and quantus.")
    ] = False,
    peer: Annotated[list[str] | None, typer.Option(help="Only by this one; repeat it for several.")] = None,
    together: Annotated[bool, typer.Option("--together", help="Also measure all methods asked at once.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also keep the rows in this file, with date and versions.")
    ] = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, and nothing else.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Measure what methods cost: time over plain passes of the same model, over the least they need, and memory.

    Everything runs in one process on the same images of noise, timed in turn; medians count. A peer whose map differs
    is reported and not timed.
    """
    if random and (not model.startswith("timm/") or "@" in model):
        raise typer.BadParameter("random weights are for timm/NAME", param_hint="--random")
    asked = split_spellings(methods) if methods else []
    image_size = height_and_width(size, "--image-size")
    file = None if out is None else expanded(out)

    from vitreous.cli import speed_report  # noqa: PLC0415  # imports torch: --help must not wait for it
    from vitreous.plugin import load_plugins  # noqa: PLC0415
    from vitreous.speed.request import Request, run  # noqa: PLC0415

    load_plugins(plugin or [])
    request = Request(
        model=f"{model}{_RANDOM}" if random else model,
        methods=asked,
        batch=batch,
        size=image_size,
        repeats=repeats,
        peers=peer or (["all"] if peers else []),
        together=together,
        device=device,
        command=shlex.join(("vitreous", *sys.argv[1:])),
    )
    console = messages()
    with plain_warnings(console), steps(console, f"loading {request.model}") as step:
        measured = run(request, lambda text: step(f"measuring {text}"))
    if file is not None:
        measured.save(file)
    if as_json:
        print_json([row.as_json() for row in measured.rows])
        return
    speed_report.show(measured, results())
    if file is not None:
        say(results(), f"rows: {file}")
