"""How a part of the page answers: work is followed, what goes wrong becomes a sentence, downloads are written."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous.errors import VitreousError
from vitreous.web import cards
from vitreous.web.jobs import CancelledError, Job
from vitreous.web.visitors import Visitors

_KEPT_DOWNLOADS = 64
_TIDY_AFTER = 2.0  # seconds
_UNEXPECTED = "Something unexpected went wrong; the server's log says what."
Updates = dict[Any, Any]
log = logging.getLogger("vitreous.web")


class Desk:
    """What the events of one tab share.

    Args:
        visitors: Who waits for what, on all tabs.
        status: Where the tab tells how far it is.
        stop: The button that stops work.
        folder: Where files for downloads are written.
    """

    def __init__(self, visitors: Visitors, status: Any, stop: Any, folder: Path) -> None:
        self.visitors, self._status, self._stop, self._folder = visitors, status, stop, folder
        self._newest: dict[str, Job] = {}
        self._downloads: deque[Path] = deque()

    async def work(self, work: Callable[[Job], Any], request: gr.Request) -> AsyncIterator[tuple[Job | None, Updates]]:
        """Have work done; give what to show meanwhile, and at last the job itself, unless another took its place."""
        visitor = visitor_of(request)
        job = self.visitors.begin(visitor, work)
        self._newest[visitor] = job
        try:
            async for before in self.visitors.follow(job):
                if self._replaced(visitor, job):
                    return
                yield (
                    None,
                    {
                        self._status: cards.progress(job, before),
                        self._stop: gr.update(interactive=True),
                    },
                )
            if self._replaced(visitor, job):
                return
            job.future.result()  # raises what went wrong
            yield job, {}
        finally:
            self.visitors.finish(visitor, job)
            if self._newest.get(visitor) is job:
                del self._newest[visitor]

    async def guarded(self, steps: AsyncIterator[Updates], request: gr.Request) -> AsyncIterator[Updates]:
        """Turn what goes wrong into a sentence; nothing else of it reaches the page.

        Where nobody reads the answers, work ends and nothing is put down for anybody to read.
        """
        visitor = visitor_of(request)
        try:
            async for updates in steps:
                if not await self.visitors.listeners.awaited(visitor):
                    self.visitors.stop(visitor)
                    return
                yield updates
        except CancelledError as stopped:
            yield {self._status: cards.status(str(stopped))} | self.idle()
        except VitreousError as error:
            yield {self._status: cards.status(str(error), error=True)} | self.idle()
        except Exception:  # whatever it was, the visitor gets a sentence and the log the rest
            log.exception("a request failed")
            yield {self._status: cards.status(_UNEXPECTED, error=True)} | self.idle()
        finally:
            # By then nobody holds what this request has used.
            loop = asyncio.get_running_loop()
            loop.call_later(_TIDY_AFTER, loop.run_in_executor, None, self.visitors.tidy)

    def idle(self) -> Updates:
        """Say that there is nothing to stop."""
        return {self._stop: gr.update(interactive=False)}

    def done(self, seconds: float | None) -> Updates:
        """Say that work is done, and how long it took; ``None`` where nothing had to be worked out."""
        told = "Done, from memory." if seconds is None else f"Done in {seconds:.1f} s."
        return {self._status: cards.status(told)} | self.idle()

    def new_folder(self) -> Path:
        """Make a folder for one download; the oldest ones go, so that they cannot fill the disk."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        self._downloads.append(folder)
        while len(self._downloads) > _KEPT_DOWNLOADS:
            shutil.rmtree(self._downloads.popleft(), ignore_errors=True)
        return folder

    def stop(self, request: gr.Request) -> None:
        """Stop what a visitor waits for, who has asked for that or closed the page."""
        self.visitors.stop(visitor_of(request))

    def _replaced(self, visitor: str, job: Job) -> bool:
        """Whether other work on this tab has taken the place of a job, and tells about itself.

        Raises:
            CancelledError: work on another tab has, so that this one has to say that it stopped.
        """
        if not self.visitors.superseded(visitor, job):
            return False
        if self._newest.get(visitor) is job:
            raise CancelledError("Stopped.")
        return True


def visitor_of(request: gr.Request) -> str:
    """Tell visitors apart."""
    return str(request.session_hash)


def press(download: str) -> str:
    """Give the script that presses a hidden download button by its id."""
    return (
        f"() => setTimeout(() => {{ const link = document.querySelector('#{download} a') || "
        f"document.querySelector('#{download}'); if (link) link.click(); }}, 50)"
    )
