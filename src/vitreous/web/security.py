"""Which requests reach Gradio: only the routes, names, sizes and files that the page needs."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Gradio has many more routes, for other kinds of apps: proxies, recordings, an editor, histories.
_ALLOWED_PATHS = re.compile(
    r"/(|config/?|theme\.css|favicon\.ico|manifest\.json|robots\.txt|pwa_icon.*|assets/.*|static/.*|svelte/.*"
    r"|gradio_api/(info/?|app_id/?|startup-events|upload|upload_progress|heartbeat/.*|queue/(join|data)|cancel|reset/?"
    r"|run/[a-z_]+/?|file=.*)|api/(explain|methods|model|openapi\.json)|audit/[0-9]{1,4})"
)
_UPLOAD, _STREAM, _API = "/gradio_api/upload", "/gradio_api/queue/data", "/api/explain"
_MAX_BODY = 2**20  # bytes of a request that is not an upload: the longest text, fully escaped, needs a tenth
_UPLOAD_OVERHEAD = 2**14  # bytes of the multipart headers of an upload
# The page runs its own scripts only and connects to this server only.
_POLICY = (
    b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    b"style-src 'self' 'unsafe-inline'; frame-ancestors 'self'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
GRACE = 10.0  # seconds: a page first sends a request and then opens the stream of its answers
_POLL_INTERVAL = 0.05
_CONCURRENT_UPLOADS = 8
_CONCURRENT_CALLS = 8  # of the JSON interface, running and waiting


class OpenStreams:
    """The open event streams of every session; used in the event loop only.

    Gradio notices a stream that closes, but not one that was never opened.
    """

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def opened(self, session: str) -> Iterator[None]:
        """Count a stream while it is open."""
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            if self._open[session] <= 0:
                del self._open[session]

    async def is_open(self, session: str, grace: float = GRACE) -> bool:
        """Whether a session reads its answers; waits for it to begin."""
        left = grace
        while session not in self._open and left > 0:
            await asyncio.sleep(_POLL_INTERVAL)
            left -= _POLL_INTERVAL
        return session in self._open


class UploadFolder:
    """The folder of uploaded files, bounded in total: Gradio deletes files by age only.

    Args:
        folder: The folder.
        max_file: Bytes of the largest file that is accepted.
        limit: Bytes of all files; files being received come on top.
    """

    def __init__(self, folder: Path, max_file: int, limit: int) -> None:
        self.folder, self.max_file, self.limit = folder, max_file, limit
        self._kept = frozenset(folder.glob("*"))  # the example thumbnails
        self._receiving = asyncio.Semaphore(_CONCURRENT_UPLOADS)

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Wait for a free slot and make room for one more file."""
        async with self._receiving:
            await asyncio.to_thread(trim_folder, self.folder, self.limit - self.max_file, self._kept)
            yield


def trim_folder(folder: Path, limit: int, kept: frozenset[Path] = frozenset()) -> None:
    """Delete the oldest files below a folder, except ``kept``, until they take at most ``limit`` bytes.

    Subfolders that become empty are deleted as well.
    """
    found = []
    for file in folder.rglob("*"):
        try:
            if file.is_file() and file not in kept:
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        except OSError:  # deleted meanwhile
            continue
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= limit:
            return
        file.unlink(missing_ok=True)
        total -= size
        if file.parent != folder:
            try:
                file.parent.rmdir()
            except OSError:  # not empty
                continue


class SecurityMiddleware:
    """Refuses requests that the page does not make, and adds security headers to all answers.

    Args:
        app: The ASGI app.
        host: The address the server listens on. On a loopback address, the Host header has to be a loopback name:
            otherwise another site's name could be pointed at this machine (DNS rebinding).
        streams: Where open event streams are counted.
        uploads: The folder of uploaded files.
    """

    def __init__(self, app: App, host: str, streams: OpenStreams, uploads: UploadFolder) -> None:
        self._app, self._streams, self._uploads = app, streams, uploads
        self._calls = 0
        own = f"[{host}]" if ":" in host else host.lower()
        self._names = _LOOPBACK | {own} if own in _LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None and scope["method"] == "POST" and scope["path"] not in {_UPLOAD, _API}:
            body = await _read_body(receive)
            receive = _replayed(body, receive)
            refusal = _body_refusal(body)
        if refusal is not None:
            await send_with_headers({"type": "http.response.start", "status": refusal[0], "headers": []})
            await send({"type": "http.response.body", "body": refusal[1]})
            return
        async with self._tracked(scope):
            await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, bytes] | None:
        """Return status and message for a request that is refused because of its head."""
        if self._is_cross_origin(scope):
            return 403, b"Requests from other sites are refused."
        if not is_allowed(scope["path"]):
            return 404, b"Not found."
        if scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            return None
        length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
        if not length.isdigit():
            return 411, b"A Content-Length header is required."
        limit = self._uploads.max_file + _UPLOAD_OVERHEAD if scope["path"] in {_UPLOAD, _API} else _MAX_BODY
        if int(length) > limit:
            return 413, b"The request is too large: maximum allowed size exceeded."
        is_busy = scope["path"] == _API and self._calls >= _CONCURRENT_CALLS
        return (503, b"Too many requests are waiting; try again later.") if is_busy else None

    @asynccontextmanager
    async def _tracked(self, scope: Scope) -> AsyncIterator[None]:
        if scope["path"] == _UPLOAD:
            async with self._uploads.receiving():
                yield
        elif scope["path"] == _STREAM:
            session = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_hash", [""])[0]
            with self._streams.opened(session):
                yield
        elif scope["path"] == _API:
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1
        else:
            yield

    def _is_cross_origin(self, scope: Scope) -> bool:
        given = {name.lower(): value.decode("latin-1").lower() for name, value in scope["headers"]}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if self._names is not None and re.sub(r":\d+$", "", host) not in self._names:
            return True
        return origin is not None and origin.partition("://")[2] != host


def is_allowed(path: str) -> bool:
    """Whether the page needs a path."""
    plain = unquote(path)
    if not _ALLOWED_PATHS.fullmatch(plain):
        return False
    _, is_file, file = plain.partition("/file=")
    # Gradio redirects to a file that is given by its URL, and resolves "..".
    return not is_file or not (re.match(r"[a-z]+:", file, re.IGNORECASE) or ".." in file.split("/"))


def names_remote_file(value: Any) -> bool:
    """Whether file data somewhere in a request names a URL, which Gradio would download.

    Files come from uploads, so a path is always one that this server has given.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            path = one.get("path")
            if isinstance(path, str) and re.match(r"\s*[a-z][a-z0-9+.-]*://", path, re.IGNORECASE):
                return True
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def _body_refusal(body: bytes) -> tuple[int, bytes] | None:
    try:
        content = json.loads(body or b"null")
    except (ValueError, RecursionError):
        return 400, b"The request is not valid JSON."
    return (403, b"This server does not download files.") if names_remote_file(content) else None


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while len(body) <= _MAX_BODY:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that replays a body and then continues with the original one."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
