"""``vitreous recommend``: measure methods on a sample of images and recommend one per purpose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitreous._utils.defaults import split_spellings
from vitreous.cli.console import (
    EvaluationProgress,
    plain_warnings,
    print_json,
    print_line,
    stderr_console,
    stdout_console,
)
from vitreous.cli.options import (
    METHODS_HELP,
    DebugOption,
    DeviceOption,
    ImageSizeOption,
    JsonOption,
    parse_image_size,
)

if TYPE_CHECKING:
    from rich.table import Table

    from vitreous.evaluation.recommend import Figures, Recommendation


def recommend(
    *,
    model: Annotated[str, typer.Argument(help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID or hf/FOLDER.")],
    data: Annotated[str, typer.Argument(help="A folder of images, or KIND:PATH, see `vitreous datasets`.")],
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
    from vitreous.evaluation.store.run import ModelChoice  # noqa: PLC0415

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
