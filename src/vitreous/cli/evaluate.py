"""Commands on data sets: ``vitreous evaluate``, ``report``, ``recommend`` and ``audit``."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack, get_origin

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vitreous._utils.defaults import split_spellings
from vitreous._utils.storage import expanded
from vitreous.cli.console import (
    METHODS_HELP,
    DebugOption,
    DeviceOption,
    ExitCode,
    ImageSizeOption,
    InputSizeOption,
    JsonOption,
    MeanOption,
    StageOption,
    StdOption,
    parse_channels,
    parse_image_size,
    parse_input_size,
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
from vitreous.evaluation.options import EvaluateOptions, Option, list_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vitreous.evaluation.recommend import Figures, Recommendation
    from vitreous.evaluation.report.results import Results
    from vitreous.evaluation.store import Store


PublishedOption = Annotated[
    bool, typer.Option("--published", help="Also show the numbers published for the protocol, in a separate table.")
]

_SHOWN_FAILURES = 5
_SECONDS_BETWEEN_COUNTS = 30.0  # without a terminal


class EvaluationProgress:
    """Progress of an evaluation: images or texts done, rate and remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store: Store | None = None
        self._before = self._done = 0
        self._started = self._printed = time.monotonic()
        columns = (TextColumn("Evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("images", total=None, rate="")
        self._preparing = ExitStack()  # the step shown before the run begins, without a terminal

    def __enter__(self) -> Self:
        if self._bar.disable:
            self._preparing.enter_context(steps(self._console, "loading the model and reading the data set"))
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._preparing.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._store is not None:
            run = self._store.run
            done = f"{self._done} of {run.image_count} {run.noun}"
            print_line(self._console, f"stopped after {done}; run the same command to resume")

    def begin(self, store: Store, done: int) -> None:
        """Show the folder of the run and what it already holds; a second call only resets the count."""
        self._preparing.close()
        if self._store is None:
            run = store.run
            print_line(self._console, f"run: {store.folder} ({len(run.methods)} methods, {run.image_count} {run.noun})")
            if done:
                # All shards but the last one are full, so the number of images gives the number of shards.
                stored = math.ceil(done / run.shard_size)
                print_line(
                    self._console, f"resumed: {stored} of {len(run.shards())} shards are there, {done} {run.noun}"
                )
            self._started = self._printed = time.monotonic()
            self._before = done
        self._store, self._done = store, done
        self._bar.update(self._task, total=store.run.image_count, completed=done)

    def advance(self, images: int) -> None:
        """Add images to the count."""
        if not images or self._store is None:
            return
        run = self._store.run
        self._done += images
        self._bar.update(self._task, completed=self._done, rate=self._rate())
        if self._bar.disable and time.monotonic() - self._printed >= _SECONDS_BETWEEN_COUNTS:
            self._printed = time.monotonic()
            print_line(self._console, f"{self._done} of {run.image_count} {run.noun}, {self._rate()}")

    def notice(self, text: str) -> None:
        """Print a warning."""
        print_warning(text, self._console)

    def _rate(self) -> str:
        assert self._store is not None
        run = self._store.run
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = (self._done - self._before) / seconds
        left = timedelta(seconds=round((run.image_count - self._done) / rate)) if rate else "unknown"
        return f"{rate:.2f} {run.noun}/s, {left} left"


def with_evaluate_options(
    before: str, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of ``vitreous.evaluate`` to a command, which receives them as keyword arguments.

    Args:
        before: the command's own option that they stand before; the last ones are about the output.
        without: options that do not apply.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        output = [parameter.name for parameter in own].index(before)
        shared = [_parameter(option) for option in list_options() if option.name not in without]
        parameters = [*own[:output], *shared, *own[output:]]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        return command

    return with_options


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = list[Path] | None if get_origin(option.type) is Sequence else option.type
    declared = typer.Option(
        option.command_line_flag,
        help=option.help,
        min=option.minimum,
        max=option.maximum,
        show_default=option.default_text or True,
        metavar="FILE" if get_origin(option.type) is Sequence else None,
    )
    default = option.default or None if get_origin(option.type) is Sequence else option.default
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


@with_evaluate_options(before="published")
def evaluate(
    *,
    protocol: Annotated[str, typer.Option(help="The protocol, see `vitreous protocols`.")],
    data: Annotated[str, typer.Option(metavar="KIND:PATH", help="The data set, see `vitreous datasets`.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="A model by name: demo, timm/NAME, timm/NAME@FILE; hf/ID or hf/FOLDER, also for texts and prompts; "
            "demo-clip, open_clip/NAME@WEIGHTS for prompts.",
            show_default="demo; demo-clip for protocols of prompts",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            "--method",
            help=f"{METHODS_HELP} Ignored by protocols that fix their methods.",
            show_default="white-box",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of all runs, one subfolder per run.")] = Path(
        "vitreous-runs"
    ),
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: InputSizeOption = None,
    stage: StageOption = None,
    device: DeviceOption = "cpu",
    published: PublishedOption = False,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
    **options: Unpack[EvaluateOptions],
) -> None:
    """Measure methods on a data set under a protocol. An interrupted run is resumed by the same command.

    Exit code: 0 if done, even if some images failed; 1 if no image could be measured; 2 if nothing could be done.
    """
    spellings = split_spellings(methods or ["white-box"])
    channel_mean, channel_std = parse_channels(mean, "--mean"), parse_channels(std, "--std")
    size = parse_input_size(image_size)

    import vitreous  # noqa: PLC0415  # these import torch
    from vitreous.evaluation.protocols import find_protocol  # noqa: PLC0415
    from vitreous.evaluation.run import ModelChoice  # noqa: PLC0415

    options["plugins"] = tuple(options["plugins"] or ())
    name = model or ("demo" if find_protocol(protocol).prompt is None else "demo-clip")
    choice = ModelChoice(name, channel_mean, channel_std, size, device, stage=stage)
    console = stderr_console()
    # Ray prints messages of its own on standard output.
    output = stdout_to_stderr() if options["engine"] == "ray" else nullcontext()
    with output, plain_warnings(console), EvaluationProgress(console) as progress:
        results = vitreous.evaluate(choice, data, protocol, spellings, out=out, progress=progress, **options)
    _print_failures(results, console)
    if as_json:
        print_json(results.rows())
    elif results.measured_methods:
        _print_table(results, stdout_console(), published=published)
    if not results.measured_methods:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _print_table(results: Results, console: Console, *, published: bool) -> None:
    from vitreous.evaluation.report.results import summarise  # noqa: PLC0415  # these import torch
    from vitreous.evaluation.report.tables import as_terminal  # noqa: PLC0415

    with steps(stderr_console(), "testing methods against each other"):
        table = as_terminal(summarise(results, published=published), console.width)
    console.print(table)
    folder = results.stores[0].folder
    print_line(
        console, f"[low, high]: 95% confidence interval; ≈: not distinguishable from the best (*); per image: {folder}"
    )
    print_line(console, f"report with curves and images: vitreous report {folder}", "dim")


def _print_failures(results: Results, console: Console) -> None:
    """Print methods that failed on every image, then the first images that failed for other methods."""
    failed_methods = set(results.methods) - set(results.measured_methods) if results.measured_methods else set()
    uncounted, noun = results.uncounted, results.run.noun
    if not failed_methods and not uncounted:
        return
    failures = results.failures()
    for method in [method for method in results.methods if method in failed_methods]:
        reason = next(failure.error for failure in failures if failure.method == method)
        print_warning(f"{method} could not be measured on any of the {noun}: {reason}", console)
    if not uncounted:
        return
    others = [failure for failure in failures if failure.method not in failed_methods]
    for failure in others[:_SHOWN_FAILURES]:
        by = "" if failure.method is None else f" ({failure.method})"
        print_warning(f"{failure.image}{by}: {failure.error}", console)
    if len(others) > _SHOWN_FAILURES:
        print_warning(f"and {len(others) - _SHOWN_FAILURES} more", console)
    if not results.measured_methods:
        print_error(f"none of the {len(results.images)} {noun} could be measured", console)
    else:
        part = f"{uncounted} of {len(results.images)} {noun}"
        print_line(console, f"{part} could not be measured and do not count{_main_cause(results)}", "yellow")


def _main_cause(results: Results) -> str:
    """Name the method that alone excludes most of the images that do not count, if there is one."""
    failed = {method: results.failed[method] for method in results.measured_methods}
    together = sum(flags.astype(int) for flags in failed.values())
    alone = {method: int((flags & (together == 1)).sum()) for method, flags in failed.items()}
    worst = max(alone, key=alone.__getitem__)
    if len(failed) == 1 or 2 * alone[worst] <= results.uncounted:
        return ""
    return f"; {alone[worst]} of them fail only for {worst} and would count without it"


def report(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run, or the --out folder of `vitreous evaluate`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The file to write.", show_default="DIR/report.html; tables are printed"),
    ] = None,
    form: Annotated[
        Literal["html", "markdown", "latex", "csv", "json"],
        typer.Option("--format", help="A self-contained HTML report, or tables for other documents."),
    ] = "html",
    pictures: Annotated[
        int, typer.Option(min=0, help="Number of best and of worst images that the HTML report shows per method.")
    ] = 3,
    published: PublishedOption = False,
    p_values: Annotated[
        bool, typer.Option("--p-values", help="Add the paired test of every method against the best one to tables.")
    ] = False,
    _debug: DebugOption = False,
) -> None:
    """Write the results of evaluations: tables, curves, a radar chart, the best and the worst images.

    Runs of the same protocol, model and data set share a table. Unfinished runs have a table of their own.
    """
    from vitreous._utils.storage import write_text  # noqa: PLC0415
    from vitreous.evaluation.report.page import write_document  # noqa: PLC0415  # these import torch
    from vitreous.evaluation.report.results import discover_runs  # noqa: PLC0415

    folder = expanded(folder)
    with steps(stderr_console(), f"reading the runs in {folder}") as step:
        runs = discover_runs(folder, print_warning)
        step("writing tables and tests")
        text = write_document(runs, form, pictures=pictures, published=published, p_values=p_values)
    if out is None and form != "html":
        sys.stdout.write(text)
        return
    file = folder / "report.html" if out is None else expanded(out)
    write_text(file, text)
    print_line(stdout_console(), f"report: {file}")


def recommend(
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID or hf/FOLDER."),
    ],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder of images, or KIND:PATH, see `vitreous datasets`.")
    ],
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", "--method", help=METHODS_HELP, show_default="the candidates of --methods auto"),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=2, help="Number of images: a stratified sample, or a random one without labels.")
    ] = 16,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of all runs, one subfolder per run.")] = Path(
        "vitreous-runs"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample.")] = 0,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Measure methods on a sample of your images and recommend one for each purpose.

    A method is recommended only if it beats the controls. The same command resumes an interrupted run.
    """
    import vitreous  # noqa: PLC0415  # these import torch
    from vitreous.evaluation.run import ModelChoice  # noqa: PLC0415

    console = stderr_console()
    with plain_warnings(console), EvaluationProgress(console) as progress:
        found = vitreous.recommend(
            ModelChoice(model, image_size=parse_image_size(image_size), device=device),
            data,
            split_spellings(methods) if methods else None,
            limit=limit,
            out=out,
            seed=seed,
            progress=progress,
        )
    if as_json:
        print_json(found.as_dict())
        return
    output = stdout_console()
    output.print(_table(found))
    for line in str(found).splitlines():
        print_line(output, line)
    print_line(output, f"report with curves and images: vitreous report {found.folder}", "dim")


def _table(found: Recommendation) -> Table:
    from rich.table import Table  # noqa: PLC0415

    names = list(found.rows[0].metrics)
    table = Table(title=f"{found.model}, {found.photos} images", title_justify="left")
    table.add_column("method", no_wrap=True)
    for name in (*names, "x forward"):
        table.add_column(name)
    for row in found.rows:
        label = f"{row.method} (control)" if row.control else row.method
        cost = "" if row.cost is None else f"{row.cost:.1f}"
        table.add_row(label, *(_cell(row, name) for name in names), cost)
    return table


def _cell(row: Figures, metric: str) -> str:
    one = row.metrics[metric]
    digits = 2 if abs(one.mean) <= 1 else 1  # correlations
    return f"{one.mean:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


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
            help="Minimum share of predictions that an intervention changes, beyond its comparison, for a finding."
        ),
    ] = 0.15,
    photos: Annotated[
        int, typer.Option(min=2, help="Maximum number of photos per suspicion that interventions are tried on.")
    ] = 32,
    suspicions: Annotated[int, typer.Option(min=1, help="Maximum number of suspicions that are tested.")] = 40,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    stage: StageOption = None,
    device: DeviceOption = "cpu",
    examples: Annotated[int, typer.Option(min=0, help="Number of photos that the HTML report shows per finding.")] = 6,
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
    from vitreous.evaluation.run import ModelChoice  # noqa: PLC0415

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
