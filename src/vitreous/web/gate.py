"""What reaches the server at all: the few addresses that the page needs, and answers that let it fetch nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote

from vitreous.web.listeners import Listeners
from vitreous.web.uploads import Uploads

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Gradio has many more, for other kinds of pages: proxies, recordings, an editor, histories.
_OPEN = re.compile(
    r"/(|config/?|theme\.css|favicon\.ico|manifest\.json|robots\.txt|pwa_icon.*|assets/.*|static/.*|svelte/.*"
    r"|gradio_api/(info/?|app_id/?|startup-events|upload|upload_progress|heartbeat/.*|queue/(join|data)|cancel|reset/?"
    r"|run/[a-z_]+/?|file=.*))"
)
_UPLOAD, _ANSWERS = "/gradio_api/upload", "/gradio_api/queue/data"
_MOST_SENT = 2**20  # bytes of a request without a file: the longest text, with every letter escaped, takes a tenth
_AROUND_A_FILE = 2**14  # bytes of an upload's own headers
# The page runs its own scripts only and talks to nobody but this server.
_POLICY = (
    b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    b"style-src 'self' 'unsafe-inline'; frame-ancestors 'self'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Gate:
    """Turns away what the page does not need, and whoever was sent here by another page.

    Args:
        app: What answers the page.
        host: The address that is listened on. Where that is this machine's own, a request has to name it so: a browser
            that was led here under another name would let that name's pages read along.
        listeners: Who reads the answers; the gate sees who opens a stream of them.
        uploads: Where files go.
    """

    def __init__(self, app: App, host: str, listeners: Listeners, uploads: Uploads) -> None:
        self._app, self._listeners, self._uploads = app, listeners, uploads
        own = _bracketed(host)
        self._names = _THIS_MACHINE | {own} if own in _THIS_MACHINE else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer that there is nothing."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if self._is_foreign(scope):
            await send_with_headers({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"This page answers nobody but its own visitors."})
            return
        if is_open(scope["path"]):
            refusal = self._size_refusal(scope)
            if refusal is not None:
                await send_with_headers({"type": "http.response.start", "status": refusal[0], "headers": []})
                await send({"type": "http.response.body", "body": refusal[1]})
                return
            async with self._admitted(scope):
                await self._app(scope, receive, send_with_headers)
            return
        await send_with_headers({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"There is nothing here."})

    def _size_refusal(self, scope: Scope) -> tuple[int, bytes] | None:
        """Give the status and the sentence for a request that sends more than the page ever does."""
        if scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            return None
        length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
        if not length.isdigit():
            return 411, b"Say how much is sent."
        most = self._uploads.largest + _AROUND_A_FILE if scope["path"] == _UPLOAD else _MOST_SENT
        return (
            None if int(length) <= most else (413, b"This is more than is taken here: maximum allowed size exceeded.")
        )

    @asynccontextmanager
    async def _admitted(self, scope: Scope) -> AsyncIterator[None]:
        """Note who listens, and make room for a file."""
        if scope["path"] == _UPLOAD:
            async with self._uploads.room():
                yield
        elif scope["path"] == _ANSWERS:
            visitor = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_hash", [""])[0]
            with self._listeners.listening(visitor):
                yield
        else:
            yield

    def _is_foreign(self, scope: Scope) -> bool:
        given = {name.lower(): value.decode("latin-1").lower() for name, value in scope["headers"]}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if self._names is not None and re.sub(r":\d+$", "", host) not in self._names:
            return True
        return origin is not None and origin.partition("://")[2] != host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def is_open(path: str) -> bool:
    """Whether the page needs an address."""
    plain = unquote(path)
    if not _OPEN.fullmatch(plain):
        return False
    _, is_file, place = plain.partition("/file=")
    # Gradio sends whoever asks for a file by an address elsewhere there, and it resolves what leads upwards.
    return not is_file or not (re.match(r"[a-z]+:", place, re.IGNORECASE) or ".." in place.split("/"))


async def fetch_nothing(*_: object, **__: object) -> NoReturn:
    """Stand in for Gradio's download of a file that a visitor names by its address: this server fetches nothing."""
    raise ValueError("this server does not fetch files from other places")
