"""``vitreous explain``: why did a model say this class of these photos?"""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import messages, print_json, results
from vitreous.cli.guard import PHOTOS_FAILED, WRONG_USE, DebugOption
from vitreous.cli.options import (
    DeviceOption,
    ImageSizeOption,
    MeanOption,
    MethodOption,
    OutputsOption,
    StageOption,
    StdOption,
    TargetOption,
    find_page,
    refuse_both,
)
from vitreous.cli.plugins import PluginOption
from vitreous.cli.spellings import split_spellings
from vitreous.cli.values import channel_values, height_and_width
from vitreous.paths import expanded


class PrecisionName(StrEnum):
    """In which precision the model runs."""

    MODEL = "model"
    BF16 = "bf16"


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
    method: MethodOption = None,
    target: TargetOption = None,
    topk: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K most likely classes of each photo.")
    ] = None,
    outputs: OutputsOption = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where the results go, one folder per photo.")] = Path(
        "vitreous-output"
    ),
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write one HTML page with everything; measuring its curves takes longer."
        ),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Also take the photos in the subfolders of a folder.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Photos explained at once.")] = 8,
    device: DeviceOption = "cpu",
    precision: Annotated[
        PrecisionName,
        typer.Option(help="bf16 runs the model in bfloat16, for methods whose maps survive that; model: as it is."),
    ] = PrecisionName.MODEL,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the model for methods that ask it many times (perturbation).")
    ] = False,
    stage: StageOption = None,
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Explain photos: write heatmaps, overlays, a comparison of the methods and the raw scores.

    Exit code: 0 all photos are done, 1 some photos failed and the rest is done, 2 nothing could be done.
    """
    refuse_both(target, topk)
    page = find_page(report, "--report")
    methods = split_spellings(method) if method else None
    channel_mean, channel_std = channel_values(mean, "--mean"), channel_values(std, "--std")
    size = height_and_width(image_size, "--image-size")

    from vitreous.cli import explaining, explaining_report  # noqa: PLC0415  # imports torch: --help must not wait for it
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    request = explaining.Request(
        model=model,
        methods=methods,
        targets=target or [],
        topk=topk,
        outputs=None if outputs is None else outputs.value,
        out=expanded(out),
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        batch_size=batch_size,
        device=device,
        precision=precision.value,
        compile=compile_model,
        stage=stage,
        report=page,
        command=shlex.join(("vitreous", *sys.argv[1:])),
        recursive=recursive,
    )
    outcome = explaining.run(photos, request, messages())
    if as_json:
        print_json(explaining_report.as_json(outcome, request))
    else:
        explaining_report.show(outcome, request, results())
    if outcome.failures:
        raise typer.Exit(PHOTOS_FAILED if outcome.explained else WRONG_USE)
