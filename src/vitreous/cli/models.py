"""``vitreous models``: which models can be asked for by name, and what is seen of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitreous.cli.console import messages, plain_warnings, print_json, results, say
from vitreous.cli.guard import DebugOption
from vitreous.cli.options import DeviceOption, ImageSizeOption, MeanOption, StdOption
from vitreous.cli.plugins import PluginOption
from vitreous.cli.progress import steps
from vitreous.cli.spellings import split_spellings
from vitreous.cli.values import channel_values, height_and_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

models_app = typer.Typer(
    help="List the kinds of model names that --model takes, or check what is seen of one model.", add_completion=False
)


@models_app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _debug: DebugOption = False,
) -> None:
    """List the kinds of model names that --model takes; `vitreous models check MODEL` looks into one."""
    if context.invoked_subcommand is not None:
        return
    from vitreous.models import list_models  # noqa: PLC0415  # imports torch: --help must not wait for it

    listed: Any = list_models()
    if as_json:
        print_json(listed)
        return
    console = results()
    console.print(_table(listed["names"]))
    say(console, f"timm knows {listed['timm_vision_transformers']} Vision Transformers by name.", "dim")


@models_app.command()
def check(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model by name: demo, timm/NAME, timm/NAME@FILE, hf/ID, py/FILE.py:FUNCTION."
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "--methods", help="Methods to try, separated by commas.", show_default="all"),
    ] = None,
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: ImageSizeOption = None,
    device: DeviceOption = "cpu",
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _debug: DebugOption = False,
) -> None:
    """Show what a run of a model shows: stream, blocks, attention, patches, and which methods work on it."""
    methods = split_spellings(method) if method else None
    channel_mean, channel_std = channel_values(mean, "--mean"), channel_values(std, "--std")
    size = height_and_width(image_size, "--image-size")

    # These import torch: --help must not wait for it.
    import vitreous  # noqa: PLC0415
    from vitreous.models import demo, load_model  # noqa: PLC0415
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    console = messages()
    with plain_warnings(console), steps(console, f"loading {model}") as step:
        loaded = load_model(model, mean=channel_mean, std=channel_std, image_size=size, device=device)
        step("running it")
        inspection = vitreous.inspect(loaded, demo.PHOTO, methods)
    if as_json:
        print_json({"model": model, **inspection.as_dict()})
        return
    for line in str(inspection).splitlines():
        say(results(), line)


def _table(names: Iterable[Mapping[str, str]]) -> Table:
    table = Table(box=None)
    table.add_column("--model", no_wrap=True, style="bold")
    table.add_column("what it is")
    for kind in names:
        table.add_row(Text(kind["name"]), Text(kind["help"]))
    return table
