"""The server: the page on a port of this machine, closed to everything that the page does not need."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitreous.errors import InputError, MissingDependencyError
from vitreous.web.jobs import Limits
from vitreous.web.listeners import Listeners
from vitreous.web.shelf import Shelf, TextShelf, checkpoints
from vitreous.web.studio import Studio
from vitreous.web.surroundings import leave, occupy
from vitreous.web.text_studio import TextStudio
from vitreous.web.uploads import Uploads
from vitreous.web.visitors import Visitors

_HOUR = 3600
_NO_DOCUMENTATION = ("docs_url", "redoc_url", "openapi_url")  # of the addresses, by which one could call them
_PART_FOR_TEXTS = 16  # of what is remembered: a text takes kilobytes where a photo takes megabytes
_UPLOADS_KEPT = 10  # of the largest size; the oldest go first
_MOST_AT_ONCE = 32  # requests that may wait for work; they take no thread meanwhile


@dataclass(frozen=True)
class Settings:
    """How the server was started.

    Attributes:
        model: The model that is there from the start.
        host: The address to listen on.
        port: The port.
        folders: Where checkpoints and example photos may be read.
        upload_bytes: The largest photo that is taken.
        cache_bytes: How much is remembered.
        text_model: The text classifier that is there from the start, if any.
        limits: The time and memory that one request may take.
    """

    model: str = "demo"
    host: str = "127.0.0.1"
    port: int = 7860
    folders: tuple[Path, ...] = ()
    upload_bytes: int = 20 * 2**20
    cache_bytes: int = 256 * 2**20
    text_model: str | None = None
    limits: Limits = field(default_factory=Limits)


class Server:
    """A running page; ``close`` ends it."""

    def __init__(self, settings: Settings, page: Any, studio: Studio, folder: Path) -> None:
        self.settings, self.studio = settings, studio
        self._page, self._folder = page, folder
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.address = f"http://{host}:{settings.port}/"

    def wait(self) -> None:
        """Wait until somebody interrupts the program."""
        self._page.block_thread()

    def close(self) -> None:
        """Stop listening and working, delete what visitors left, and leave Gradio as it was."""
        self._page.close(verbose=False)
        _clear(self.studio, self._folder)


def start(settings: Settings) -> Server:
    """Load the model, build the page and begin to listen.

    Raises:
        MissingDependencyError: Gradio is not installed.
        InputError: the port is taken, or a folder does not exist.
        ModelError: the model cannot be loaded.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    gradio = _gradio()
    _check(settings)
    for_texts = settings.cache_bytes // _PART_FOR_TEXTS
    studio = Studio(
        Shelf(settings.model, settings.folders),
        cache_bytes=settings.cache_bytes - for_texts,
        upload_bytes=settings.upload_bytes,
        limits=settings.limits,
    )
    studio.shelf.take(settings.model)
    texts = _text_studio(settings, studio, for_texts)
    folder = Path(tempfile.mkdtemp(prefix="vitreous-web-"))
    occupy(folder)
    try:
        listeners = Listeners()
        page = build(gradio, studio, texts, settings.folders, folder, listeners)
        _launch(gradio, page, settings, folder, listeners)
    except BaseException:
        _clear(studio, folder)
        raise
    return Server(settings, page, studio, folder)


def _clear(studio: Studio, folder: Path) -> None:
    studio.close()
    leave(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _text_studio(settings: Settings, studio: Studio, cache_bytes: int) -> TextStudio | None:
    """Give what explains texts, if there is a model for them: the one that was named, or one in the folders."""
    found = checkpoints(settings.folders, text=True)
    first = settings.text_model or next(iter(found), None)
    if first is None:
        return None
    shelf = TextShelf(first, settings.folders)
    if settings.text_model is not None:
        shelf.take(settings.text_model)
    return TextStudio(shelf, studio.worker, cache_bytes=cache_bytes)


def build(
    gradio: Any,
    studio: Studio,
    texts: TextStudio | None,
    folders: Sequence[Path],
    folder: Path,
    listeners: Listeners,
) -> Any:
    """Build the page."""
    from vitreous.web import text_cards  # noqa: PLC0415  # these need Gradio
    from vitreous.web.events import Events  # noqa: PLC0415
    from vitreous.web.examples import example_photos, thumbnails  # noqa: PLC0415
    from vitreous.web.layout import TITLE, lay_out  # noqa: PLC0415
    from vitreous.web.text_events import TextEvents  # noqa: PLC0415
    from vitreous.web.text_layout import lay_out_texts  # noqa: PLC0415

    small = thumbnails(example_photos(folders), folder)
    with gradio.Blocks(analytics_enabled=False, title="Vitreous", delete_cache=(_HOUR // 4, 2 * _HOUR)) as page:
        gradio.HTML(TITLE, elem_id="vitreous-title")
        visitors = Visitors(studio.worker, listeners)
        with gradio.Tabs(elem_id="vitreous-tabs"):
            with gradio.Tab("Photos"):
                events = Events(
                    studio, lay_out(studio.shelf.names(), list(small.values())), list(small), visitors, folder
                )
                events.connect()
            with gradio.Tab("Texts"):
                if texts is None:
                    gradio.HTML(text_cards.NO_MODEL, elem_id="vitreous-text-none")
                else:
                    TextEvents(texts, lay_out_texts(texts.shelf.names()), visitors, folder).connect()
        page.unload(events.desk.stop)
    # Past the queue there is no stream of answers, by which one could tell whether anybody reads them.
    page.queue(default_concurrency_limit=_MOST_AT_ONCE, max_size=4 * _MOST_AT_ONCE, api_open=False)
    return page


def _launch(gradio: Any, page: Any, settings: Settings, folder: Path, listeners: Listeners) -> None:
    from starlette.middleware import Middleware  # noqa: PLC0415  # comes with Gradio

    from vitreous.web.gate import Gate  # noqa: PLC0415
    from vitreous.web.sessions import MOST_SESSIONS, keep_little  # noqa: PLC0415
    from vitreous.web.style import CSS  # noqa: PLC0415

    uploads = Uploads(folder, settings.upload_bytes, _UPLOADS_KEPT * settings.upload_bytes)
    gate = Middleware(Gate, host=settings.host, listeners=listeners, uploads=uploads)

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # nothing is fetched
    page.launch(
        server_name=settings.host,
        server_port=settings.port,
        prevent_thread_lock=True,
        inbrowser=False,
        share=False,
        quiet=True,
        show_error=False,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        max_file_size=settings.upload_bytes,
        state_session_capacity=MOST_SESSIONS,
        app_kwargs={"middleware": [gate], **dict.fromkeys(_NO_DOCUMENTATION)},
        theme=gradio.themes.Default(primary_hue="blue", **fonts),
        css=CSS,
    )
    keep_little(page)


def _check(settings: Settings) -> None:
    for folder in settings.folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise InputError(f"port {settings.port} of {settings.host} cannot be used: {error.strerror}") from error


def _gradio() -> Any:
    try:
        import gradio  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise MissingDependencyError('the web page needs Gradio: pip install "vitreous[web]"') from error
    return gradio
