"""``vitreous evaluate``: how good are explanations, measured under a published protocol?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import messages, print_json, results
from vitreous.cli.guard import PHOTOS_FAILED, DebugOption
from vitreous.cli.options import (
    METHODS_HELP,
    DeviceOption,
    ImageSizeOption,
    MeanOption,
    OutputsOption,
    PublishedOption,
    StageOption,
    StdOption,
)
from vitreous.cli.plugins import PluginOption
from vitreous.cli.spellings import split_spellings
from vitreous.cli.values import channel_values, height_and_width
from vitreous.defaults import SHARD_SIZE


class EngineName(StrEnum):
    """Who computes."""

    LOCAL = "local"
    RAY = "ray"


def evaluate(
    *,
    protocol: Annotated[str, typer.Option(help="How it is measured; see `vitreous protocols`.")],
    data: Annotated[str, typer.Option(metavar="KIND:PATH", help="The data set; see `vitreous datasets`.")],
    model: Annotated[
        str,
        typer.Option(help="A model by name: demo, timm/NAME, timm/NAME@FILE; hf/ID or hf/FOLDER, also for texts."),
    ] = "demo",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            "--method",
            help=f"{METHODS_HELP} Protocols with rows of their own ignore it.",
            show_default="white-box",
        ),
    ] = None,
    outputs: OutputsOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", show_default="all")] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Take the data set in a random order, which --seed decides.")
    ] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where the runs are kept, one folder per run.")] = Path(
        "vitreous-runs"
    ),
    # The backslash keeps [ray] from being read as markup, which would not be shown.
    engine: Annotated[EngineName, typer.Option(help="Who computes; ray needs the extra vitreous\\[ray].")] = (
        EngineName.LOCAL
    ),
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on this machine, or tasks at once on Ray.", show_default="1, or what fits"),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each worker; a run keeps them.", show_default="processors / workers"),
    ] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Images that are computed and stored as one.")] = SHARD_SIZE,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Compute shards again in which an image could not be measured.")
    ] = False,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    stage: StageOption = None,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of everything that is drawn at random.")] = 0,
    plugin: PluginOption = None,
    published: PublishedOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one row per method and metric as JSON, and nothing else.")
    ] = False,
    _debug: DebugOption = False,
) -> None:
    """Measure explanations on a data set under a protocol; stopped anywhere, the same command goes on.

    Exit code: 0 done, also where some images are broken, which are counted; 1 no image could be measured;
    2 nothing could be done.
    """
    spellings = split_spellings(methods or ["white-box"])
    channel_mean, channel_std = channel_values(mean, "--mean"), channel_values(std, "--std")
    size = height_and_width(image_size, "--image-size")

    from vitreous.cli import evaluating, evaluating_report  # noqa: PLC0415
    from vitreous.evaluation.runner.prepare_run import Options  # noqa: PLC0415
    from vitreous.evaluation.store.run import ModelChoice  # noqa: PLC0415  # imports torch: --help must not wait for it

    options = Options(
        limit=limit,
        shuffle=shuffle,
        engine=engine.value,
        workers=workers,
        threads=threads,
        shard_size=shard_size,
        seed=seed,
        plugins=tuple(plugin or ()),
        retry_failed=retry_failed,
        outputs=None if outputs is None else outputs.value,
    )
    choice = ModelChoice(model, channel_mean, channel_std, size, device, stage=stage)
    found = evaluating.run(choice, data, protocol, spellings, out, options, messages())
    if as_json:
        print_json(evaluating_report.as_json(found))
    else:
        evaluating_report.show(found, results(), published=published)
    if not found.measured_methods:
        raise typer.Exit(PHOTOS_FAILED)
