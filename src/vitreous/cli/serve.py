"""``vitreous serve``: a page in the browser that explains photos and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import messages, results, say
from vitreous.cli.guard import DebugOption
from vitreous.cli.plugins import PluginOption


def serve(
    *,
    model: Annotated[
        str, typer.Option(help="The model to start with, see `vitreous models`; visitors can choose others.")
    ] = "demo",
    text_model: Annotated[
        str | None,
        typer.Option(help="A text classifier with its tokenizer, hf/ID or hf/FOLDER, for the tab that explains texts."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets everybody in who can reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 7860,
    allow_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A folder whose checkpoints and photos visitors may use; repeat it for several."
        ),
    ] = None,
    max_upload_mb: Annotated[int, typer.Option(min=1, max=200, help="The largest photo that is taken.")] = 20,
    cache_mb: Annotated[int, typer.Option(min=16, help="How much is remembered of what was explained.")] = 256,
    max_seconds: Annotated[float, typer.Option(min=1, help="The time that one request may take.")] = 120,
    max_memory_mb: Annotated[
        int, typer.Option(min=64, help="The memory that one request may take, beside that of the models.")
    ] = 2048,
    plugin: PluginOption = None,
    _debug: DebugOption = False,
) -> None:
    """Serve a page that explains photos and texts: drop one in and see why the model says what it says.

    Nothing leaves this machine, and no other machine is asked for anything but models that are chosen by name.
    """
    from vitreous.plugin import load_plugins  # noqa: PLC0415  # imports torch: --help must not wait for it
    from vitreous.web.jobs import Limits  # noqa: PLC0415
    from vitreous.web.server import Settings, start  # noqa: PLC0415

    load_plugins(plugin or [])
    settings = Settings(
        model=model,
        text_model=text_model,
        host=host,
        port=port,
        folders=tuple(allow_folder or ()),
        upload_bytes=max_upload_mb * 2**20,
        cache_bytes=cache_mb * 2**20,
        limits=Limits(max_seconds, max_memory_mb * 2**20),
    )
    say(messages(), "loading the model and the page ...")
    server = start(settings)
    try:
        say(results(), f"the page is at {server.address} - press Ctrl+C to end")
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
