"""``vitreous serve``: a web page that explains images and texts."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.console import print_line, stderr_console, stdout_console
from vitreous.cli.options import DebugOption, PluginOption


def serve(
    *,
    model: Annotated[
        str, typer.Option(help="The initial model, see `vitreous models`; users can choose others.")
    ] = "demo",
    text_model: Annotated[
        str | None,
        typer.Option(
            help="A text classifier with its tokenizer for the texts tab: hf/ID or hf/FOLDER.",
            show_default="demo-text",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens the page to everyone who can reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    allow_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A folder whose checkpoints and images users may load. Repeat the option for several."
        ),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder that `vitreous audit` has written, to browse in the audit tab."),
    ] = None,
    max_upload_mb: Annotated[int, typer.Option(min=1, max=200, help="Maximum size of an uploaded image.")] = 20,
    cache_mb: Annotated[int, typer.Option(min=16, help="Size of the cache of results.")] = 256,
    max_seconds: Annotated[float, typer.Option(min=1, help="Time limit of one request.")] = 120,
    max_memory_mb: Annotated[int, typer.Option(min=64, help="Memory limit of one request, without the models.")] = 2048,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugin: PluginOption = None,
    _debug: DebugOption = False,
) -> None:
    """Serve a web page that explains the predictions for images and texts.

    Nothing is uploaded to other machines. Only models that are chosen by name are downloaded.
    """
    from vitreous.plugin import load_plugins  # noqa: PLC0415  # imports torch
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
        audit=audit,
    )
    print_line(stderr_console(), "loading the model and the page ...")
    server = start(settings)
    try:
        print_line(stdout_console(), f"the page is at {server.address} - press Ctrl+C to stop")
        if open_browser and not webbrowser.open(server.address):
            print_line(stderr_console(), "no browser was found on this machine: open the address yourself")
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
