"""What the events of both tabs share.

Every event has two steps. The first shows results that are cached, at once. If there are none, it stores a ``Task`` in
a ``gr.State``, whose change triggers the second step: that one waits in Gradio's queue for the model, reports progress
and is cancelled by the Stop button.
"""

from __future__ import annotations

import asyncio
import html
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous._utils.defaults import split_spellings
from vitreous.errors import VitreousError
from vitreous.web.jobs import CancelledError, Job, SessionJobs
from vitreous.web.rendering import status_html
from vitreous.web.security import OpenStreams

_MODEL_QUEUE = "model"
_MODEL_CONCURRENCY = 2  # one request runs the model while the results of the one before it are drawn
_POLL_INTERVAL = 0.2  # seconds
_TRIM_DELAY = 2.0  # seconds
_MAX_DOWNLOADS = 64
_MAX_TOAST = 300  # characters
_UNEXPECTED = "Something went wrong; see the server's log."
Updates = dict[Any, Any]
SHARED_OPTIONS = {"show_progress": "hidden", "trigger_mode": "multiple", "api_visibility": "undocumented"}
log = logging.getLogger("vitreous.web")


def _nothing(*_: Any) -> Any:
    return None


@dataclass(eq=False)  # a new task differs from the one before it, which makes gr.State trigger its change event
class Task:
    """Work for the model.

    Attributes:
        work: Computes the result, on the worker thread.
        show: Renders the result; the second argument is the duration, ``None`` for a cached result.
        cached: Returns the result if it was computed before.
        on_error: Updates of the page besides the error message.
        superseded: Whether the session has made another request since.
    """

    work: Callable[[Job], Any]
    show: Callable[[Any, float | None], Updates]
    cached: Callable[[], Any] = _nothing
    on_error: Callable[[Exception], Updates | None] = _nothing
    superseded: bool = False


class TabController:
    """What the events of both tabs share.

    Args:
        jobs: The jobs of all sessions.
        streams: The event streams of all sessions.
        folder: Where downloads are written.
        parts: The components of the tab.
    """

    def __init__(self, jobs: SessionJobs, streams: OpenStreams, folder: Path, parts: Any) -> None:
        self._jobs, self._streams, self._folder = jobs, streams, folder
        self._pending, self._status, self._stop = parts.pending, parts.status, parts.stop
        self._downloads: deque[Path] = deque()

    async def begin(
        self,
        panel: str,
        previous: Task | None,
        make: Callable[[], Task | Updates],
        request: gr.Request,
        on_error: Callable[[Exception], Updates | None] = _nothing,
    ) -> Updates:
        """First step of an event: show a cached result, or queue a task for the model.

        Args:
            panel: Where the result is shown.
            previous: The task that was queued for this panel before.
            make: Reads the request; returns a task, or updates if there is nothing to compute.
            request: Whose request it is.
            on_error: Updates besides the error message.
        """
        session = session_of(request)
        if not await self._streams.is_open(session):  # messages for it would fill the memory
            return unchanged()
        if previous is not None:
            previous.superseded = True
        self._jobs.cancel(session, by=self)
        try:
            task = await asyncio.to_thread(make)
            if not isinstance(task, Task):
                return task
            task.on_error = on_error
            result = task.cached()
            if result is not None:
                return await asyncio.to_thread(task.show, result, None)
        except Exception as error:  # noqa: BLE001  # logged, unless it is a message for the user
            return self._failed(error, on_error)
        finally:
            self._trim_later()
        return {
            self._pending[panel]: task,
            self._status: status_html("Working …"),
            self._stop: gr.update(interactive=True),
        }

    async def run(self, request: gr.Request, task: Task | None) -> AsyncIterator[Updates]:
        """Second step of an event: run a task when its turn comes, and report its progress."""
        session = session_of(request)
        if task is None or task.superseded or not await self._streams.is_open(session):
            yield unchanged()
            return
        job = self._jobs.start(session, task.work, owner=self)
        try:
            async for progress in self._progress(job, session):
                yield {self._status: progress}
            yield await asyncio.to_thread(task.show, job.future.result(), job.seconds)  # must not block other requests
        except CancelledError as error:
            # A newer request on this tab shows its own status.
            yield unchanged() if job.cancelled_by is self else self._failed(error, task.on_error)
        except Exception as error:  # noqa: BLE001  # logged, unless it is a message for the user
            yield self._failed(error, task.on_error)
        finally:
            self._jobs.finish(session, job)
            self._trim_later()

    async def begin_download(
        self, button: Any, previous: Task | None, make: Callable[[], Task], request: gr.Request
    ) -> Updates:
        """First step of a download: also forget the file of the one before."""
        updates = await self.begin("download", previous, make, request)
        return updates if updates == unchanged() else {button: None} | updates

    def cancel(self, request: gr.Request) -> None:
        """Cancel the session's job: the user pressed Stop or closed the page."""
        self._jobs.cancel(session_of(request))

    def done(self, seconds: float | None) -> Updates:
        """Report that a result is shown; ``None`` seconds for a cached one."""
        text = "Done, from cache." if seconds is None else f"Done in {seconds:.1f} s."
        return {self._status: status_html(text)} | self.idle()

    def idle(self) -> Updates:
        """Disable the Stop button."""
        return {self._stop: gr.update(interactive=False)}

    def stopped(self) -> Updates:
        """Report that the user stopped the job."""
        return {self._status: status_html("Stopped.")} | self.idle()

    def file_ready(self, download: Any, file: Path) -> Updates:
        """Hand a file to the hidden download button."""
        return {download: str(file), self._status: status_html(f"{file.name} is ready.")} | self.idle()

    def new_folder(self) -> Path:
        """Create a folder for one download and delete the oldest ones."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        self._downloads.append(folder)
        while len(self._downloads) > _MAX_DOWNLOADS:
            shutil.rmtree(self._downloads.popleft(), ignore_errors=True)
        return folder

    def connect_run(self, panel: str, outputs: Sequence[Any], api_name: str) -> Any:
        """Run the tasks of a panel in the queue for the model."""
        return self._pending[panel].change(
            self.run,
            self._pending[panel],
            [self._status, self._stop, *outputs],
            show_progress="hidden",  # the status line shows it
            trigger_mode="always_last",
            concurrency_id=_MODEL_QUEUE,
            concurrency_limit=_MODEL_CONCURRENCY,
            api_name=api_name,
            api_visibility="undocumented",
        )

    async def _progress(self, job: Job, session: str) -> AsyncIterator[str]:
        """Return the progress of a job until it ends, and cancel it if the client has disconnected."""
        future = asyncio.wrap_future(job.future)
        shown = ""
        try:
            while not (await asyncio.wait({future}, timeout=_POLL_INTERVAL))[0]:
                progress = progress_html(job)
                if progress != shown:
                    yield progress
                shown = progress
                if not await self._streams.is_open(session):
                    job.cancel()
        finally:
            future.add_done_callback(_ignore_result)
            if not job.future.done():  # Gradio cancelled this event; the job of the next one waits until this one ends
                job.cancel()

    def _failed(self, error: Exception, on_error: Callable[[Exception], Updates | None]) -> Updates:
        """Show an error in the status line and, wherever the user has scrolled to, in a toast."""
        if isinstance(error, CancelledError):
            return self.stopped() | (on_error(error) or {})
        if not isinstance(error, VitreousError):
            log.error("a request failed", exc_info=error)
        text = str(error) if isinstance(error, VitreousError) else _UNEXPECTED
        gr.Warning(html.escape(text[:_MAX_TOAST]), title="Error")
        return {self._status: status_html(text, error=True)} | self.idle() | (on_error(error) or {})

    def _trim_later(self) -> None:
        """Release memory after the objects of this request are freed."""
        loop = asyncio.get_running_loop()
        loop.call_later(_TRIM_DELAY, loop.run_in_executor, None, self._jobs.worker.trim_memory)


def read_methods(spelled: str | None, groups: Sequence[Any]) -> tuple[str, ...]:
    """Combine the ticked methods with the spelled ones."""
    ticked = [method for group in groups for method in group or ()]
    return tuple(dict.fromkeys([*ticked, *(split_spellings([spelled]) if spelled and spelled.strip() else [])]))


def session_of(request: gr.Request) -> str:
    """Return the id of a user's session."""
    return str(request.session_hash)


def unchanged() -> Updates:
    """Return what leaves all outputs of an event unchanged."""
    updates: Updates = gr.skip()
    return updates


def click_script(element: str) -> str:
    """Return a script that clicks a hidden download button."""
    return (
        f"() => setTimeout(() => {{ const link = document.querySelector('#{element} a') || "
        f"document.querySelector('#{element}'); if (link) link.click(); }}, 50)"
    )


def _ignore_result(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned job, which asyncio would otherwise log."""
    if not future.cancelled():
        future.exception()


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 2 * 3600 else f"{round(seconds / 3600)} h"


def progress_html(job: Job) -> str:
    """Render stage, inputs processed of all, and the time left."""
    text = f"{job.stage[:1].upper()}{job.stage[1:]}"
    if not job.total:
        return status_html(f"{text}: {job.processed:,} {job.unit} …" if job.processed > 1 else f"{text} …")
    done, left = min(job.processed, job.total), job.seconds_left
    text += f": {done:,} of {job.total:,} {job.unit}" + ("" if left is None else f", about {_duration(left)} left")
    return status_html(text, progress=done / job.total)
