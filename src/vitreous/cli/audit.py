"""``vitreous audit``: examine what a model relies on over a data set, and write the findings."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Unpack

import typer

from vitreous.cli.console import (
    EvaluationProgress,
    ExitCode,
    plain_warnings,
    print_error,
    print_json,
    print_line,
    print_warning,
    stderr_console,
    stdout_console,
    stdout_to_stderr,
    steps,
)
from vitreous.cli.evaluate import with_evaluate_options
from vitreous.cli.options import (
    DebugOption,
    DeviceOption,
    ImageSizeOption,
    JsonOption,
    MeanOption,
    StageOption,
    StdOption,
    parse_channels,
    parse_image_size,
)
from vitreous.evaluation.options import EvaluateOptions


@with_evaluate_options(before="examples", without=("controls",))
def audit(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID, hf/FOLDER.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data set as KIND:PATH, see `vitreous datasets`.")],
    method: Annotated[str, typer.Option(help="The method whose maps are examined.")] = "twoscale",
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of all audits, one subfolder per audit.")] = Path(
        "vitreous-audits"
    ),
    alpha: Annotated[float, typer.Option(help="False discovery rate over all tests.")] = 0.05,
    effect: Annotated[
        float,
        typer.Option(
            help="Smallest part of predictions that must change for a finding, beyond that of the comparison."
        ),
    ] = 0.15,
    photos: Annotated[int, typer.Option(min=2, help="Photos per suspicion that are intervened on at most.")] = 32,
    suspicions: Annotated[int, typer.Option(min=1, help="Suspicions that are tested at most.")] = 40,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    stage: StageOption = None,
    device: DeviceOption = "cpu",
    examples: Annotated[int, typer.Option(min=0, help="Photos shown per finding in the HTML report.")] = 6,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="NAME=NUMBER",
            help="Exit with code 1 if a figure is above a limit: findings, observations (numbers of them), removed, "
            "pasted (part of predictions that the strongest finding changes), decided (part of all predictions).",
        ),
    ] = None,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
    **options: Unpack[EvaluateOptions],
) -> None:
    """Audit a model on a data set: what it relies on besides the object, each suspicion tested by intervention.

    An interrupted audit is resumed by the same command. Exit code: 0 if done, 1 if a limit of --fail-on is exceeded, 2
    if nothing could be done.
    """
    channel_mean, channel_std = parse_channels(mean, "--mean"), parse_channels(std, "--std")
    size = parse_image_size(image_size)

    import vitreous  # noqa: PLC0415  # these import torch
    from vitreous.auditing.audit import parse_limits  # noqa: PLC0415
    from vitreous.auditing.report import write_reports  # noqa: PLC0415
    from vitreous.evaluation.store.run import ModelChoice  # noqa: PLC0415

    limits = parse_limits(fail_on or ())
    options["plugins"] = tuple(options["plugins"] or ())
    choice = ModelChoice(model, channel_mean, channel_std, size, device, stage=stage)
    console = stderr_console()
    output = stdout_to_stderr() if options["engine"] == "ray" else nullcontext()  # Ray prints on standard output
    with output, plain_warnings(console), EvaluationProgress(console) as progress:
        found = vitreous.audit(
            choice,
            data,
            method=method,
            out=out,
            alpha=alpha,
            effect=effect,
            photos=photos,
            suspicions=suspicions,
            progress=progress,
            **options,
        )
    for name, reason in found.collected.failures[:5]:
        print_warning(f"{name}: {reason}", console)
    with steps(console, "writing the report"):
        files = write_reports(found, examples=examples)
    if as_json:
        print_json(found.as_json())
    else:
        for each in found.findings:
            print_line(stdout_console(), found.sentence(each))
        tested = f"{len(found.tested)} suspicions tested on {len(found.collected)} photos"
        print_line(stdout_console(), f"{len(found.findings)} findings; {tested}")
        print_line(stdout_console(), f"report: {files['html']}")
    exceeded = found.exceeded(limits)
    if exceeded:
        print_error(f"--fail-on: {', '.join(exceeded)}", console)
        raise typer.Exit(ExitCode.SOME_FAILED)
