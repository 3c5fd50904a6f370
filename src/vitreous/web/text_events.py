"""What happens when the text tab is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous.errors import InputError
from vitreous.text_explanation import By
from vitreous.web import cards, downloads, text_cards
from vitreous.web.desk import Desk, Updates, press
from vitreous.web.events import read_methods
from vitreous.web.text_layout import EXAMPLES, TextParts
from vitreous.web.text_record import TextRecord
from vitreous.web.text_studio import TextStudio, TextVisit
from vitreous.web.visitors import Visitors
from vitreous.web.wanted import Wanted

_CLASSES = 3  # the place of the chosen classes among the values of ``TextParts.wanted``


@dataclass(frozen=True)
class TextControls:
    """What a visitor has set on the text tab, read once."""

    visit: TextVisit
    wanted: Wanted
    by: By


def read_controls(values: Sequence[Any]) -> TextControls:
    """Read the values of ``TextParts.wanted``."""
    text, model, long, classes, spelled, by, *groups = values
    if by not in ("max", "sum") or long not in ("cut", "windows"):
        raise InputError("Long texts are cut or explained in windows, and a word has the max or the sum of its pieces.")
    visit = TextVisit(str(text or ""), str(model or "").strip(), windows=long == "windows")
    return TextControls(visit, Wanted(read_methods(spelled, groups), tuple(int(one) for one in classes or ())), by)


class TextEvents:
    """The text tab's answers to its visitors.

    Args:
        studio: What does the work.
        parts: What is on the tab.
        visitors: Who waits for what.
        folder: Where files for downloads are written.
    """

    def __init__(self, studio: TextStudio, parts: TextParts, visitors: Visitors, folder: Path) -> None:
        self.studio, self.parts = studio, parts
        self.desk = Desk(visitors, parts.status, parts.stop, folder)

    def connect(self) -> None:
        """Say which use of the tab calls what."""
        parts, wanted = self.parts, self.parts.wanted()
        options = {"show_progress": "hidden", "trigger_mode": "multiple", "api_visibility": "undocumented"}
        shown = [parts.status, parts.stop, parts.predictions, parts.words]
        opened = [*shown, parts.classes]
        parts.explain.click(self.open, wanted, opened, api_name="explain_text", **options)
        parts.text.submit(self.open, wanted, opened, **options)
        parts.example.click(self.open_example, [parts.example, *wanted], [*opened, parts.text], **options)
        parts.model.change(self.change_model, wanted, opened, **options)
        for part in (*parts.methods, parts.classes, parts.long):
            part.input(self.show, wanted, shown, **options)
        parts.spelled.submit(self.show, wanted, shown, **options)
        parts.by.input(self.show, wanted, shown, **{**options, "trigger_mode": "always_last"})
        written = [parts.status, parts.stop, parts.download]
        saved = parts.save.click(self.take_page, wanted, written, api_name="save_text", **options)
        saved.then(None, js=press("vitreous-text-download"))
        # It shows nothing itself: its answer could come after that of the work that it has stopped.
        parts.stop.click(self.desk.stop, None, None, queue=False, **options)

    async def open(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Explain the text, and offer the classes of the model."""
        async for updates in self.desk.guarded(self._show(values, request, offer=True), request):
            yield updates

    async def open_example(self, request: gr.Request, number: int | None, *values: Any) -> AsyncIterator[Updates]:
        """Explain one of the examples."""
        if number is not None and 0 <= int(number) < len(EXAMPLES):
            text = EXAMPLES[int(number)]
            yield {self.parts.text: text}
            async for updates in self.open(request, text, *values[1:]):
                yield updates

    async def change_model(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Explain the text with another model, whose classes are others."""
        if not str(values[0] or "").strip():
            yield {
                self.parts.status: cards.status(f"{values[1]} will be loaded with the first text."),
                self.parts.classes: gr.update(choices=[], value=[]),
            }
            return
        async for updates in self.open(request, *values[:_CLASSES], [], *values[_CLASSES + 1 :]):
            yield updates

    async def show(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Show what is wanted, at once where it has been found out before."""
        async for updates in self.desk.guarded(self._show(values, request, offer=False), request):
            yield updates

    async def take_page(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Hand over the coloured texts as a page."""
        async for updates in self.desk.guarded(self._take_page(values, request), request):
            yield updates

    async def _show(self, values: Sequence[Any], request: gr.Request, *, offer: bool) -> AsyncIterator[Updates]:
        controls = read_controls(values)
        self.studio.shelf.check(controls.visit.model)
        record = self.studio.known(controls.visit, controls.wanted)
        if record is not None:
            self.desk.stop(request)
            yield self._shown(record, controls, None, offer=offer)
            return
        work = partial(self.studio.explain, controls.visit, controls.wanted)
        async for job, updates in self.desk.work(work, request):
            done = None if job is None else self._shown(job.future.result(), controls, job.seconds, offer=offer)
            yield updates if done is None else done

    async def _take_page(self, values: Sequence[Any], request: gr.Request) -> AsyncIterator[Updates]:
        controls = read_controls(values)
        self.studio.shelf.check(controls.visit.model)
        yield {self.parts.download: None}
        work = partial(self.studio.explain, controls.visit, controls.wanted)
        async for job, updates in self.desk.work(work, request):
            if job is None:
                yield updates
                continue
            file = downloads.save_words(job.future.result(), controls.wanted, controls.by, self.desk.new_folder())
            ready = cards.status(f"{file.name} is ready.")
            yield {self.parts.download: str(file), self.parts.status: ready} | self.desk.idle()

    def _shown(self, record: TextRecord, controls: TextControls, seconds: float | None, *, offer: bool) -> Updates:
        parts = self.parts
        updates: Updates = {
            parts.predictions: cards.predictions(record),
            parts.words: text_cards.words(record, controls.wanted, controls.by),
        }
        if offer:
            updates[parts.classes] = gr.update(choices=record.class_choices(), value=list(controls.wanted.classes))
        return updates | self.desk.done(seconds)
