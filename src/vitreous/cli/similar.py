"""``vitreous similar``: why two images are similar, or which images of a folder are most similar to another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitreous._utils.defaults import split_spellings
from vitreous._utils.storage import expanded
from vitreous.cli.console import (
    METHOD_HELP,
    DebugOption,
    DeviceOption,
    ImageSizeOption,
    JsonOption,
    MeanOption,
    PluginOption,
    StdOption,
    one_line,
    parse_channels,
    parse_image_size,
    plain_warnings,
    print_json,
    print_line,
    stderr_console,
    stdout_console,
    steps,
)

if TYPE_CHECKING:
    from typing import Any

    from rich.console import Console

_PRINTED_PAIRS = 5


def similar(
    *,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="An image file, or 'demo' for the shipped image.")],
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER", help="Another image, to match patches; or a folder, to find the nearest neighbours in."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(help="A model by name, see `vitreous models`; its embedding is compared, its classes are not."),
    ] = "demo",
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "--methods",
            help=f"{METHOD_HELP} Two images take one method that is linear: decompx, ixg, cat, attcat.",
            show_default="decompx:layer=-1 for two images, decompx.skipplus for a folder",
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Neighbours in a folder.")] = 5,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of patches shown of two images.")] = 10,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results.")] = Path("vitreous-similar"),
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Explain why images are similar: which patches of two match, or the nearest neighbours in a folder.

    Writes an image, the numbers as JSON, and the raw scores.
    """
    methods = split_spellings(method) if method else None
    channel_mean, channel_std = parse_channels(mean, "--mean"), parse_channels(std, "--std")
    size = parse_image_size(image_size)

    from vitreous.cli import similar_images  # noqa: PLC0415  # imports torch
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    request = similar_images.SimilarRequest(
        image=image,
        other=other,
        model=model,
        methods=methods,
        k=k,
        pairs=pairs,
        out=expanded(out),
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        device=device,
    )
    console = stderr_console()
    with plain_warnings(console), steps(console, f"comparing {image} with {other}"):
        found = similar_images.run(request)
    if as_json:
        print_json(found)
    else:
        _print(found, stdout_console())


def _print(found: dict[str, Any], console: Console) -> None:
    if "neighbours" in found:
        table = Table(box=None)
        table.add_column("neighbour", overflow="fold")
        table.add_column("cosine", justify="right")
        for neighbour in found["neighbours"]:
            table.add_row(Text(one_line(neighbour["image"])), f"{neighbour['similarity']:.3f}")
        console.print(table)
    else:
        print_line(console, f"cosine:  {found['similarity']:.3f}")
        for pair in found["pairs"][:_PRINTED_PAIRS]:
            first, second = (f"row {row}, column {column}" for row, column in (pair["first"], pair["second"]))
            print_line(console, f"match:   {first} with {second} ({pair['score']:+.3g})")
    print_line(console, f"image:   {found['picture']}")
