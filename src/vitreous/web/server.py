"""The server of the page: on one port, closed to everything that the page does not need.

Gradio's settings in this process are changed while a page runs, and its session state does not grow.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous.errors import InputError, MissingDependencyError
from vitreous.models.hf_models import DEMO_TEXT
from vitreous.web.image_service import ImageService
from vitreous.web.jobs import Limits, SessionJobs
from vitreous.web.models import ModelCache, TextModelCache, find_checkpoints
from vitreous.web.results import Example, readable_examples
from vitreous.web.security import OpenStreams, SecurityMiddleware, UploadFolder

if TYPE_CHECKING:
    from vitreous.web.audit_tab import AuditReport
    from vitreous.web.text_tab import TextService


_SETTINGS = ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED")
MAX_SESSIONS = 1000
_lock = threading.Lock()
_folders: list[Path] = []  # of the running pages
_original: dict[str, str | None] = {}


def acquire_environment(folder: Path) -> None:
    """Point Gradio's uploads to a private folder and turn its analytics off."""
    with _lock:
        if not _folders:
            _original.update({name: os.environ.get(name) for name in _SETTINGS})
        _folders.append(folder)
        _set(folder)


def release_environment(folder: Path) -> None:
    """Restore the environment when the last page ends; until then the settings of another page apply."""
    with _lock:
        if folder not in _folders:  # released already
            return
        _folders.remove(folder)
        if _folders:
            _set(_folders[-1])
            return
        for name, value in _original.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _set(folder: Path) -> None:
    os.environ |= dict(zip(_SETTINGS, (str(folder), "False"), strict=True))


def limit_session_state(page: Any) -> None:
    """Keep what a launched page stores per session small.

    Gradio stores the last value of every component in every session, megabytes of pictures, for links to a state of
    the page. No option turns that off, so the class of its session state is replaced.
    """
    from gradio.blocks import Block  # noqa: PLC0415  # an optional dependency, and slow to import
    from gradio.state_holder import SessionState, StateHolder  # noqa: PLC0415

    class SmallSessionState(SessionState):
        def __init__(self, blocks: Any) -> None:
            super().__init__(blocks)
            self.config_values = {}

        def __setitem__(self, key: int, value: Any) -> None:
            if isinstance(value, Block):
                value._id = key  # noqa: SLF001  # an updated component has a new id, under which it would be kept too
            super().__setitem__(key, value)
            self.config_values.clear()

        def _update_config(self, key: int) -> None:
            """Store nothing."""

        def _update_value_in_config(self, key: int, value: Any) -> None:
            """Store nothing."""

    class SmallStateHolder(StateHolder):
        def __getitem__(self, session_id: str) -> SessionState:
            if session_id not in self.session_data:
                self.session_data[session_id] = SmallSessionState(self.blocks)
            return super().__getitem__(session_id)

    holder = SmallStateHolder()  # type: ignore[no-untyped-call]
    holder.set_blocks(page)
    page.app.state_holder = holder


_HOUR = 3600
STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("maps.js", "picker.js", "page.js")  # in the order they are run
_NO_API_DOCS = ("docs_url", "redoc_url", "openapi_url")
_TEXT_CACHE_FRACTION = 16  # texts get a sixteenth of the cache: kilobytes each, where images need megabytes
_MAX_UPLOADS = 10  # of the largest size; the oldest are deleted first
_CONCURRENCY = 32  # of events that do not run the model
_MAX_QUEUE = 128  # waiting events; Gradio refuses more and says so


@dataclass(frozen=True)
class Settings:
    """Settings of the server.

    Attributes:
        model: The model that is loaded at the start.
        host: The address to listen on.
        port: The port.
        folders: Folders from which checkpoints and example images may be read.
        upload_bytes: The largest image that is accepted.
        cache_bytes: Size of the result cache.
        text_model: The text classifier that is loaded at the start; the shipped one, with the first text, by default.
        limits: Time and memory limits of one request.
        audit: A folder of audits to browse, if any.
    """

    model: str = "demo"
    host: str = "127.0.0.1"
    port: int = 7860
    folders: tuple[Path, ...] = ()
    upload_bytes: int = 20 * 2**20
    cache_bytes: int = 256 * 2**20
    text_model: str | None = None
    limits: Limits = field(default_factory=Limits)
    audit: Path | None = None


class Server:
    """A running page; ``close`` ends it."""

    def __init__(self, settings: Settings, page: Any, images: ImageService, folder: Path) -> None:
        self.settings, self.images = settings, images
        self._page, self._folder = page, folder
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.address = f"http://{host}:{settings.port}/"

    def wait(self) -> None:
        """Wait until the program is interrupted."""
        self._page.block_thread()

    def close(self) -> None:
        """Stop listening, cancel all jobs, delete uploads and restore Gradio's settings."""
        self._page.close(verbose=False)
        _clean_up(self.images, self._folder)


def start(settings: Settings) -> Server:
    """Load the model, build the page and start listening.

    Raises:
        MissingDependencyError: Gradio is not installed.
        InputError: the port is taken, a folder does not exist, or it holds no audit.
        ModelError: the model cannot be loaded.
    """
    _check(settings)
    folder = Path(tempfile.mkdtemp(prefix="vitreous-web-"))
    acquire_environment(folder)  # Gradio reads some of it when it is imported
    images = None
    try:
        gradio = _import_gradio()
        from starlette.routing import Mount  # noqa: PLC0415  # comes with Gradio

        from vitreous.web.api import build_api  # noqa: PLC0415  # it needs what comes with Gradio
        from vitreous.web.audit_tab import find_audits, report_routes  # noqa: PLC0415

        audits = find_audits(settings.audit) if settings.audit is not None else []
        text_cache = settings.cache_bytes // _TEXT_CACHE_FRACTION
        images = ImageService(
            ModelCache(settings.model, settings.folders),
            cache_bytes=settings.cache_bytes - text_cache,
            upload_bytes=settings.upload_bytes,
            limits=settings.limits,
        )
        images.models.get(settings.model)
        texts = _text_service(settings, images, text_cache)
        streams = OpenStreams()
        examples = readable_examples(settings.folders)
        page = build(gradio, images, texts, examples, folder, streams, audits)
        routes = [Mount("/api", build_api(images, folder)), *report_routes(audits)]
        _launch(gradio, page, settings, folder, streams, head=head_html(examples), routes=routes)
        _prepare_opening(images, settings.model, examples)
    except BaseException:
        _clean_up(images, folder)
        raise
    return Server(settings, page, images, folder)


def _prepare_opening(images: ImageService, model: str, examples: Sequence[Example]) -> None:
    """Explain what the page opens with, before somebody does."""
    from vitreous.web.image_tab import OPENING  # noqa: PLC0415  # it imports Gradio

    if not examples:
        return
    photo = images.read(examples[0].path, examples[0].path.name, model)
    images.worker.submit(partial(images.explain, photo, OPENING))


def _clean_up(images: ImageService | None, folder: Path) -> None:
    if images is not None:
        images.close()
    release_environment(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _text_service(settings: Settings, images: ImageService, cache_bytes: int) -> TextService | None:
    """Return a service with the given text model, one of the allowed folders, or the shipped one.

    It is ``None`` without the library that text models need.
    """
    if settings.text_model is None and importlib.util.find_spec("transformers") is None:
        return None
    default = settings.text_model or next(iter(find_checkpoints(settings.folders, text=True)), DEMO_TEXT)
    from vitreous.web.text_tab import TextService  # noqa: PLC0415  # it imports Gradio

    models = TextModelCache(default, settings.folders)
    if settings.text_model is not None:
        models.get(settings.text_model)
    return TextService(models, images.worker, cache_bytes=cache_bytes)


def build(
    gradio: Any,
    images: ImageService,
    texts: TextService | None,
    examples: Sequence[Example],
    folder: Path,
    streams: OpenStreams,
    audits: Sequence[AuditReport] = (),
) -> Any:
    """Build the page."""
    from vitreous.web.audit_tab import build_audit_tab  # noqa: PLC0415
    from vitreous.web.image_tab import ImageTab  # noqa: PLC0415
    from vitreous.web.layout import TITLE, build_image_tab, build_text_tab  # noqa: PLC0415  # these import Gradio
    from vitreous.web.rendering import NO_TEXT_MODEL  # noqa: PLC0415
    from vitreous.web.text_tab import TextTab  # noqa: PLC0415

    lifetime = (_HOUR // 4, 2 * _HOUR)
    with gradio.Blocks(analytics_enabled=False, title="Vitreous", delete_cache=lifetime, fill_width=True) as page:
        gradio.HTML(TITLE, elem_id="vitreous-title")
        jobs = SessionJobs(images.worker)
        with gradio.Tabs(elem_id="vitreous-tabs"):
            with gradio.Tab("Photos"):
                photos = ImageTab(images, build_image_tab(images.models.names()), examples, jobs, streams, folder)
                photos.connect(page)
            with gradio.Tab("Texts"):
                if texts is None:
                    gradio.HTML(NO_TEXT_MODEL, elem_id="vitreous-text-none")
                else:
                    TextTab(texts, build_text_tab(texts.models.names()), jobs, streams, folder).connect()
            with gradio.Tab("Audit"):
                build_audit_tab(audits)
        page.unload(photos.cancel)
    # api_open: requests that bypass the queue have no stream of answers, so a disconnected client would go unnoticed.
    page.queue(default_concurrency_limit=_CONCURRENCY, max_size=_MAX_QUEUE, api_open=False)
    return page


def head_html(examples: Sequence[Example]) -> str:
    """Return the scripts of the page and their settings, for its head."""
    from vitreous.web.views import page_config  # noqa: PLC0415

    config = json.dumps(page_config(examples)).replace("<", "\\u003c")
    scripts = [f"window.vitreousConfig = {config};", *((STATIC / name).read_text("utf-8") for name in _SCRIPTS)]
    return "".join(f"<script>{script}</script>" for script in scripts)


def _launch(
    gradio: Any, page: Any, settings: Settings, folder: Path, streams: OpenStreams, *, head: str, routes: Sequence[Any]
) -> None:
    from starlette.middleware import Middleware  # noqa: PLC0415  # comes with Gradio

    uploads = UploadFolder(folder, settings.upload_bytes, _MAX_UPLOADS * settings.upload_bytes)
    security = Middleware(SecurityMiddleware, host=settings.host, streams=streams, uploads=uploads)
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # no web fonts
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
        state_session_capacity=MAX_SESSIONS,
        app_kwargs={"middleware": [security], "routes": list(routes), **dict.fromkeys(_NO_API_DOCS)},
        theme=gradio.themes.Default(primary_hue="blue", **fonts),
        css=(STATIC / "page.css").read_text("utf-8"),
        head=head,
    )
    limit_session_state(page)


def _check(settings: Settings) -> None:
    for folder in (*settings.folders, *([settings.audit] if settings.audit is not None else [])):
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise InputError(f"port {settings.port} of {settings.host} cannot be used: {error.strerror}") from error


def _import_gradio() -> Any:
    try:
        import gradio  # noqa: PLC0415  # an optional dependency, and slow to import
    except ImportError as error:
        raise MissingDependencyError('the web page needs Gradio: pip install "vitreous[web]"') from error
    return gradio
