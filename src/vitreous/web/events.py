"""What happens when the page is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous.errors import InputError
from vitreous.method_lists import split_spellings
from vitreous.web import cards, downloads
from vitreous.web.desk import Desk, Updates, press
from vitreous.web.drawing import Sliders, backdrop_of, mark_patch, patch_at
from vitreous.web.jobs import Job
from vitreous.web.layout import Parts
from vitreous.web.record import Record
from vitreous.web.studio import Studio, Visit
from vitreous.web.visitors import Visitors
from vitreous.web.wanted import Wanted, classes_of

_NO_PHOTO = "Choose a photo first."


@dataclass(frozen=True)
class Controls:
    """What a visitor has set, read once."""

    visit: Visit | None
    wanted: Wanted
    sliders: Sliders


def read_controls(values: Sequence[Any]) -> Controls:
    """Read the values of ``Parts.wanted``."""
    visit, classes, spelled, depth, opacity, sign, threshold, smooth, *groups = values
    methods = read_methods(spelled, groups)
    wanted = Wanted(methods, tuple(int(one) for one in classes or ()), None if depth is None else int(depth))
    return Controls(visit, wanted, Sliders(float(opacity), sign, float(threshold), bool(smooth)))


def read_methods(spelled: str | None, groups: Sequence[Any]) -> tuple[str, ...]:
    """Read which methods are ticked and which are spelled."""
    ticked = [method for group in groups for method in group or ()]
    return tuple(dict.fromkeys([*ticked, *(split_spellings([spelled]) if spelled and spelled.strip() else [])]))


class Events:
    """The page's answers to its visitors.

    Args:
        studio: What does the work.
        parts: What is on the page.
        examples: The photos that can be picked.
        visitors: Who waits for what.
        folder: Where files for downloads are written.
    """

    def __init__(
        self, studio: Studio, parts: Parts, examples: Sequence[Path], visitors: Visitors, folder: Path
    ) -> None:
        self.studio, self.parts, self.examples = studio, parts, list(examples)
        self.desk = Desk(visitors, parts.status, parts.stop, folder)

    def connect(self) -> None:
        """Say which use of the page calls what."""
        parts, wanted = self.parts, self.parts.wanted()
        opened = [parts.visit, parts.status, parts.stop, parts.predictions, parts.classes, parts.maps, parts.depth]
        opened += [parts.block, parts.picture, parts.rows, parts.curves, parts.row, parts.column]
        options = {"show_progress": "hidden", "trigger_mode": "multiple", "api_visibility": "undocumented"}
        parts.photo.upload(self.open_upload, [parts.photo, parts.model, *wanted], opened, api_name="upload", **options)
        parts.example.click(self.open_example, [parts.example, parts.model, *wanted], opened, **options)
        parts.model.change(self.change_model, [parts.model, *wanted], opened, **options)
        shown = [parts.status, parts.stop, parts.maps]
        for part in (*parts.methods, parts.classes):
            part.input(self.show, wanted, shown, **options)
        parts.spelled.submit(self.show, wanted, shown, api_name="show", **options)
        for part in (parts.opacity, parts.threshold, parts.depth, parts.sign, parts.smooth):
            part.input(self.show, wanted, shown, **{**options, "trigger_mode": "always_last"})
        patch = [parts.visit, parts.block, parts.row, parts.column]
        drawn = [parts.status, parts.stop, parts.rows, parts.picture, parts.row, parts.column]
        parts.picture.select(self.press_patch, patch, drawn, **options)
        parts.look.click(self.look_at_patch, patch, drawn, **options)
        parts.block.input(self.look_at_patch, patch, drawn, **{**options, "trigger_mode": "always_last"})
        measured = [parts.status, parts.stop, parts.curves]
        parts.measure.click(self.measure, wanted, measured, api_name="measure", **options)
        written = [parts.status, parts.stop, parts.download]
        for button, take in ((parts.png, self.take_png), (parts.npz, self.take_npz), (parts.report, self.take_report)):
            button.click(take, wanted, written, **options).then(None, js=press("vitreous-download"))
        # It shows nothing itself: its answer could come after that of the work that it has stopped.
        parts.stop.click(self.desk.stop, None, None, queue=False, **options)

    async def open_upload(
        self, request: gr.Request, path: str | None, model: str, *values: Any
    ) -> AsyncIterator[Updates]:
        """Explain a photo that a visitor has uploaded."""
        if path is not None:
            async for updates in self._open(path, Path(path).name, model, values, request):
                yield updates

    async def open_example(
        self, request: gr.Request, number: int | None, model: str, *values: Any
    ) -> AsyncIterator[Updates]:
        """Explain one of the examples."""
        if number is not None and 0 <= int(number) < len(self.examples):
            example = self.examples[int(number)]
            async for updates in self._open(example, example.name, model, values, request):
                yield updates

    async def change_model(self, request: gr.Request, model: str, *values: Any) -> AsyncIterator[Updates]:
        """Explain the photo with another model."""
        visit = values[0]
        if visit is None:
            yield {self.parts.status: cards.status(f"{model} will be loaded with the first photo.")}
            return
        async for updates in self._open(visit.upload.path, visit.upload.name, model, values, request):
            yield updates

    async def show(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Show the maps that are wanted, at once where they have been made before."""

        def begin() -> tuple[Visit, Controls, Record | None]:
            controls = read_controls(values)
            visit = _there(controls)
            return visit, controls, self.studio.known(visit, controls.wanted)

        def done(record: Record, seconds: float | None) -> Updates:
            controls = read_controls(values)
            maps = cards.maps(record, controls.wanted, controls.sliders)
            return {self.parts.maps: maps} | self.desk.done(seconds)

        async for updates in self.desk.guarded(self._explain(begin, done, request), request):
            yield updates

    async def press_patch(
        self, request: gr.Request, event: gr.SelectData, visit: Visit | None, block: int, _row: int, _column: int
    ) -> AsyncIterator[Updates]:
        """Look at the patch that was pressed."""
        record = None if visit is None else self.studio.cache.get(visit.key)
        if visit is None or record is None or record.sample is None:
            yield {self.parts.status: cards.status(_NO_PHOTO, error=True)}
            return
        across, down = event.index
        row, column = patch_at(backdrop_of(record), record.sample.grid, float(across), float(down))
        async for updates in self.look_at_patch(request, visit, block, row, column):
            yield updates

    async def look_at_patch(
        self, request: gr.Request, visit: Visit | None, block: int, row: int, column: int
    ) -> AsyncIterator[Updates]:
        """Show what a patch draws on."""
        async for updates in self.desk.guarded(self._look(visit, block, row, column, request), request):
            yield updates

    async def measure(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Measure the curves of the maps that are shown."""
        async for updates in self.desk.guarded(self._measure(values, request), request):
            yield updates

    async def take_png(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Hand over the maps as a picture."""
        async for updates in self.desk.guarded(self._take_home("png", values, request), request):
            yield updates

    async def take_npz(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Hand over the numbers."""
        async for updates in self.desk.guarded(self._take_home("npz", values, request), request):
            yield updates

    async def take_report(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Hand over a report."""
        async for updates in self.desk.guarded(self._take_home("report", values, request), request):
            yield updates

    async def _open(
        self, path: str | Path, name: str, model: str, values: Sequence[Any], request: gr.Request
    ) -> AsyncIterator[Updates]:
        visits: list[Visit] = []

        def begin() -> tuple[Visit, Controls, Record | None]:
            # Classes of another photo or model mean nothing here, and the depth is another model's.
            controls = read_controls([values[0], [], values[2], None, *values[4:]])
            self.studio.shelf.check(str(model or ""))
            visits.append(self.studio.receive(path, name, model))
            return visits[0], controls, self.studio.known(visits[0], controls.wanted)

        def done(record: Record, seconds: float | None) -> Updates:
            controls = read_controls([values[0], [], values[2], None, *values[4:]])
            return self._opened(visits[0], record, controls, seconds)

        async for updates in self.desk.guarded(self._explain(begin, done, request), request):
            yield updates

    async def _explain(
        self,
        begin: Callable[[], tuple[Visit, Controls, Record | None]],
        done: Callable[[Record, float | None], Updates],
        request: gr.Request,
    ) -> AsyncIterator[Updates]:
        visit, controls, record = begin()
        if record is not None:
            self.desk.stop(request)
            yield await asyncio.to_thread(done, record, None)
            return
        async for job, updates in self.desk.work(partial(self.studio.explain, visit, controls.wanted), request):
            # Dozens of maps take a while to draw, in which others would wait.
            yield updates if job is None else await asyncio.to_thread(done, job.future.result(), job.seconds)

    async def _look(
        self, visit: Visit | None, block: int, row: int, column: int, request: gr.Request
    ) -> AsyncIterator[Updates]:
        if visit is None:
            raise InputError(_NO_PHOTO)
        if self.studio.known_rows(visit, int(block)) is None:
            async for job, updates in self.desk.work(partial(self.studio.rows, visit, int(block)), request):
                if job is None:
                    yield updates
        record, rows = self.studio.cache.get(visit.key), self.studio.known_rows(visit, int(block))
        if record is None or rows is None or record.sample is None:
            return  # stopped, or another request has taken its place
        patch = min(max(int(row), 0), rows.grid[0] - 1), min(max(int(column), 0), rows.grid[1] - 1)
        backdrop = backdrop_of(record)
        yield {
            self.parts.rows: cards.patch_rows(record, rows, patch),
            self.parts.picture: mark_patch(backdrop.photo, backdrop, rows.grid, patch),
            self.parts.row: patch[0],
            self.parts.column: patch[1],
        } | self.desk.done(None)

    async def _measure(self, values: Sequence[Any], request: gr.Request) -> AsyncIterator[Updates]:
        controls = read_controls(values)
        visit = _there(controls)
        async for job, updates in self.desk.work(partial(self.studio.curves, visit, controls.wanted), request):
            if job is None:
                yield updates
            else:
                record, found = job.future.result()
                shown = cards.curves(record, controls.wanted, found)
                yield {self.parts.curves: shown} | self.desk.done(job.seconds)

    async def _take_home(self, kind: str, values: Sequence[Any], request: gr.Request) -> AsyncIterator[Updates]:
        controls = read_controls(values)
        visit, wanted = _there(controls), controls.wanted
        work: Callable[[Job], Any] = partial(self.studio.explain, visit, wanted)
        if kind == "report":
            work = partial(self.studio.curves, visit, wanted)
        yield {self.parts.download: None}
        async for job, updates in self.desk.work(work, request):
            if job is None:
                yield updates
                continue
            folder = self.desk.new_folder()
            if kind == "report":
                record, found = job.future.result()
                save = partial(downloads.save_report, record, visit, wanted, found, folder)
            elif kind == "png":
                save = partial(downloads.save_png, job.future.result(), visit, wanted, controls.sliders, folder)
            else:
                save = partial(downloads.save_npz, job.future.result(), visit, wanted, folder)
            file = await asyncio.to_thread(save)  # drawing takes seconds, in which others would wait
            ready = cards.status(f"{file.name} is ready.")
            yield {self.parts.download: str(file), self.parts.status: ready} | self.desk.idle()

    def _opened(self, visit: Visit, record: Record, controls: Controls, seconds: float | None) -> Updates:
        parts, sample = self.parts, record.sample
        assert sample is not None
        classes: Updates = {"value": list(classes_of(controls.wanted, record))}
        if controls.visit is None or controls.visit.model != visit.model:  # otherwise the page has them
            classes["choices"] = record.class_choices()
        return {
            parts.visit: visit,
            parts.predictions: cards.predictions(record),
            parts.classes: gr.update(**classes),
            parts.maps: cards.maps(record, controls.wanted, controls.sliders),
            parts.depth: gr.update(maximum=record.depth, value=record.depth),
            parts.block: gr.update(maximum=record.depth - 1, value=record.depth - 1),
            parts.picture: backdrop_of(record).photo,
            parts.rows: "",
            parts.curves: "",
            parts.row: gr.update(maximum=sample.grid[0] - 1, value=sample.grid[0] // 2),
            parts.column: gr.update(maximum=sample.grid[1] - 1, value=sample.grid[1] // 2),
        } | self.desk.done(seconds)


def _there(controls: Controls) -> Visit:
    if controls.visit is None:
        raise InputError(_NO_PHOTO)
    return controls.visit
