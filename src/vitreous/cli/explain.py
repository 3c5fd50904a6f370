"""``vitreous explain``: why did a model say this class of these photos?"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import messages, print_json, results
from vitreous.cli.guard import PHOTOS_FAILED, DebugOption
from vitreous.cli.plugins import PluginOption, load_plugins
from vitreous.cli.spellings import split_spellings
from vitreous.cli.values import channel_values, height_and_width

DEFAULT_METHODS = ("tokentm", "gradtoken", "decompx.skipplus")


def explain(
    *,
    photos: Annotated[
        list[str],
        typer.Argument(metavar="PHOTO", help="Photos, folders of photos, or 'demo' for the photo that is shipped."),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="A model by name, see `vitreous models`: demo, timm/NAME, timm/NAME@FILE, hf/ID, py/FILE.py:FUNCTION."
        ),
    ] = "demo",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method, see `vitreous methods`; repeat it, or separate several with commas.",
            show_default=", ".join(DEFAULT_METHODS),
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A class to explain, by number or name; repeat it for several.", show_default="the predicted class"
        ),
    ] = None,
    topk: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K most likely classes of each photo.")
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where the results go, one folder per photo.")] = Path(
        "vitreous-output"
    ),
    mean: Annotated[
        str | None, typer.Option(help="Mean of the channels, one number or three: 0.5 or 0.48,0.46,0.41.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation of the channels, one number or three.")] = None,
    image_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the model's input, 224 or HEIGHTxWIDTH.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write one HTML page with everything; measuring its curves takes longer."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Photos explained at once.")] = 8,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = "cpu",
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Explain photos: write heatmaps, overlays, a comparison of the methods and the raw scores.

    Exit code: 0 all photos are done, 1 some photos failed and the rest is done, 2 nothing could be done.
    """
    if target and topk:
        raise typer.BadParameter("it cannot be combined with --topk", param_hint="--target")
    methods = split_spellings(method or DEFAULT_METHODS)
    channel_mean, channel_std = channel_values(mean, "--mean"), channel_values(std, "--std")
    size = height_and_width(image_size, "--image-size")

    from vitreous.cli import explaining, explaining_report  # noqa: PLC0415  # imports torch: --help must not wait for it

    load_plugins(plugin or [])
    request = explaining.Request(
        model=model,
        methods=methods,
        targets=target or [],
        topk=topk,
        out=out,
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        batch_size=batch_size,
        device=device,
        report=report,
        command=shlex.join(("vitreous", *sys.argv[1:])),
    )
    outcome = explaining.run(photos, request, messages())
    if as_json:
        print_json(explaining_report.as_json(outcome, request))
    else:
        explaining_report.show(outcome, request, results())
    if outcome.failures:
        raise typer.Exit(PHOTOS_FAILED)
