"""The events of the image tab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous.errors import InputError, ModelError
from vitreous.web import rendering
from vitreous.web.image_service import ImageInput, ImageService
from vitreous.web.jobs import CancelledError, Job, SessionJobs
from vitreous.web.layout import ImageComponents
from vitreous.web.rendering import DisplaySettings, base_image, mark_patch, patch_at, status_html
from vitreous.web.requests import ExplainRequest
from vitreous.web.results import BlockRows, ImageResults
from vitreous.web.security import OpenStreams
from vitreous.web.tab_controller import (
    SHARED_OPTIONS,
    TabController,
    Task,
    Updates,
    click_script,
    read_methods,
    unchanged,
)

_NO_IMAGE = "Choose a photo first."


@dataclass(frozen=True)
class ImageControls:
    """The settings of the image tab."""

    photo: ImageInput | None
    request: ExplainRequest
    settings: DisplaySettings

    @property
    def chosen_image(self) -> ImageInput:
        """The image; an error if there is none yet."""
        if self.photo is None:
            raise InputError(_NO_IMAGE)
        return self.photo


def read_image_controls(values: Sequence[Any]) -> ImageControls:
    """Parse the values of ``ImageComponents.controls``."""
    photo, classes, spelled, depth, opacity, sign, threshold, smooth, *groups = values
    methods = read_methods(spelled, groups)
    request = ExplainRequest(methods, tuple(int(one) for one in classes or ()), None if depth is None else int(depth))
    return ImageControls(photo, request, DisplaySettings(float(opacity), sign, float(threshold), bool(smooth)))


class ImageTab(TabController):
    """The events of the image tab.

    Args:
        service: Computes explanations.
        parts: The components of the tab.
        examples: The example images.
        jobs: The jobs of all sessions.
        streams: The event streams of all sessions.
        folder: Where downloads are written.
    """

    def __init__(
        self,
        service: ImageService,
        parts: ImageComponents,
        examples: Sequence[Path],
        jobs: SessionJobs,
        streams: OpenStreams,
        folder: Path,
    ) -> None:
        super().__init__(jobs, streams, folder, parts)
        self.service, self.parts, self.examples = service, parts, list(examples)

    def connect(self) -> None:
        """Attach the events to the components."""
        parts, controls, pending = self.parts, self.parts.controls(), self.parts.pending
        latest = {**SHARED_OPTIONS, "trigger_mode": "always_last"}
        state = [parts.status, parts.stop]
        opened = [parts.photo, parts.model, parts.predictions, parts.classes, parts.maps, parts.depth, parts.block]
        opened += [parts.picture, parts.rows, parts.curves, parts.row, parts.column]
        drawn = [parts.rows, parts.picture, parts.row, parts.column]
        runs = [
            self.connect_run("maps", opened, parts.maps, "run_maps"),
            self.connect_run("rows", drawn, parts.rows, "run_rows"),
            self.connect_run("curves", [parts.curves], parts.curves, "run_curves"),
            self.connect_run("download", [parts.download], parts.status, "run_download"),
        ]
        runs[-1].then(None, js=click_script("vitreous-download"))

        maps = [*state, pending["maps"]]
        inputs = [pending["maps"], parts.model, *controls]
        parts.upload.upload(
            self.open_upload, [parts.upload, *inputs], [*maps, *opened], api_name="upload", **SHARED_OPTIONS
        )
        parts.example.click(self.open_example, [parts.example, *inputs], [*maps, *opened], **SHARED_OPTIONS)
        parts.model.change(self.change_model, inputs, [*maps, *opened], **SHARED_OPTIONS)
        inputs = [pending["maps"], *controls]
        for part in (*parts.methods, parts.classes):
            part.input(self.show, inputs, [*maps, parts.maps], **SHARED_OPTIONS)
        parts.spelled.submit(self.show, inputs, [*maps, parts.maps], api_name="show", **SHARED_OPTIONS)
        for part in (parts.opacity, parts.threshold, parts.depth, parts.sign, parts.smooth):
            part.input(self.show, inputs, [*maps, parts.maps], **latest)

        rows = [*state, pending["rows"], *drawn]
        patch = [pending["rows"], parts.photo, parts.block, parts.row, parts.column]
        parts.picture.select(self.select_patch, patch, rows, **SHARED_OPTIONS)
        parts.look.click(self.show_patch, patch, rows, **SHARED_OPTIONS)
        parts.block.input(self.show_patch, patch, rows, **latest)

        curves = [*state, pending["curves"], parts.curves]
        parts.measure.click(self.measure, [pending["curves"], *controls], curves, api_name="measure", **SHARED_OPTIONS)
        files = [*state, pending["download"], parts.download]
        for button, kind in ((parts.png, "png"), (parts.npz, "npz"), (parts.report, "report")):
            save = getattr(self, f"save_{kind}")
            button.click(save, [pending["download"], *controls], files, **SHARED_OPTIONS)
        parts.stop.click(self.stop, parts.photo, [*state, parts.model], queue=False, cancels=runs, **SHARED_OPTIONS)

    async def open_upload(
        self, request: gr.Request, path: str | None, previous: Task | None, model: str, *values: Any
    ) -> Updates:
        """Explain an uploaded image."""
        if path is None:
            return unchanged()
        return await self._open(path, Path(path).name, previous, model, values, request)

    async def open_example(
        self, request: gr.Request, number: int | None, previous: Task | None, model: str, *values: Any
    ) -> Updates:
        """Explain an example image."""
        if number is None or not 0 <= int(number) < len(self.examples):
            return unchanged()
        example = self.examples[int(number)]
        return await self._open(example, example.name, previous, model, values, request)

    async def change_model(self, request: gr.Request, previous: Task | None, model: str, *values: Any) -> Updates:
        """Explain the image with another model."""
        photo: ImageInput | None = values[0]
        if model == (self.service.models.default if photo is None else photo.model):
            return unchanged()  # the choice was put back
        if photo is not None:
            return await self._open(photo.upload.path, photo.upload.name, previous, model, values, request)

        def check() -> Updates:
            self.service.models.check(str(model or ""))
            return {self._status: status_html(f"{model} will be loaded with the first photo.")}

        return await self.begin("maps", previous, check, request, partial(self._restore_model, None))

    async def show(self, request: gr.Request, previous: Task | None, *values: Any) -> Updates:
        """Show the requested maps."""

        def make() -> Task:
            controls = read_image_controls(values)
            return self._explain_task(controls.chosen_image, controls, partial(self._show_maps, controls))

        return await self.begin("maps", previous, make, request)

    async def select_patch(
        self,
        request: gr.Request,
        event: gr.SelectData,
        previous: Task | None,
        photo: ImageInput | None,
        block: int,
        _row: int,
        _column: int,
    ) -> Updates:
        """Show the attention rows of the patch that was clicked."""
        results = None if photo is None else self.service.cache.get(photo.key)
        row = column = 0
        if results is not None and results.sample is not None:
            x, y = event.index
            row, column = patch_at(base_image(results), results.sample.grid, float(x), float(y))
        return await self.show_patch(request, previous, photo, block, row, column)

    async def show_patch(
        self,
        request: gr.Request,
        previous: Task | None,
        photo: ImageInput | None,
        block: int,
        row: int,
        column: int,
    ) -> Updates:
        """Show the attention rows of a patch."""

        def make() -> Task:
            if photo is None:
                raise InputError(_NO_IMAGE)
            return Task(
                partial(self.service.rows, photo, int(block)),
                partial(self._show_rows, photo, int(row), int(column)),
                partial(self.service.cached_rows, photo, int(block)),
            )

        return await self.begin("rows", previous, make, request)

    async def measure(self, request: gr.Request, previous: Task | None, *values: Any) -> Updates:
        """Measure the curves of the maps shown."""

        def make() -> Task:
            controls = read_image_controls(values)
            work = partial(self.service.curves, controls.chosen_image, controls.request)
            return Task(work, partial(self._show_curves, controls.request))

        return await self.begin("curves", previous, make, request)

    async def save_png(self, request: gr.Request, previous: Task | None, *values: Any) -> Updates:
        """Download the maps as a picture."""

        def save(results: ImageResults, photo: ImageInput, controls: ImageControls) -> Path:
            return rendering.save_png(results, photo, controls.request, controls.settings, self.new_folder())

        return await self._save(self.service.explain, save, previous, values, request)

    async def save_npz(self, request: gr.Request, previous: Task | None, *values: Any) -> Updates:
        """Download the scores."""

        def save(results: ImageResults, photo: ImageInput, controls: ImageControls) -> Path:
            return rendering.save_npz(results, photo, controls.request, self.new_folder())

        return await self._save(self.service.explain, save, previous, values, request)

    async def save_report(self, request: gr.Request, previous: Task | None, *values: Any) -> Updates:
        """Download a report."""

        def save(measured: Any, photo: ImageInput, controls: ImageControls) -> Path:
            results, curves = measured
            return rendering.save_report(results, photo, controls.request, curves, self.new_folder())

        return await self._save(self.service.curves, save, previous, values, request)

    def stop(self, request: gr.Request, photo: ImageInput | None) -> Updates:
        """Stop the session's job; the maps shown are those of the model before it."""
        self.cancel(request)
        return self.stopped() | self._restore_model(photo, CancelledError("Stopped."))

    async def _open(
        self,
        path: str | Path,
        name: str,
        previous: Task | None,
        model: str,
        values: Sequence[Any],
        request: gr.Request,
    ) -> Updates:
        def make() -> Task:
            # Classes belong to another image or model, and the depth to another model.
            controls = read_image_controls([values[0], [], values[2], None, *values[4:]])
            self.service.models.check(str(model or ""))
            photo = self.service.read(path, name, model)
            return self._explain_task(photo, controls, partial(self._show_image, photo, controls))

        return await self.begin("maps", previous, make, request, partial(self._restore_model, values[0]))

    async def _save(
        self,
        work: Callable[[ImageInput, ExplainRequest, Job], Any],
        save: Callable[[Any, ImageInput, ImageControls], Path],
        previous: Task | None,
        values: Sequence[Any],
        request: gr.Request,
    ) -> Updates:
        def make() -> Task:
            controls = read_image_controls(values)
            photo = controls.chosen_image

            def show(result: Any, _seconds: float | None) -> Updates:
                return self.file_ready(self.parts.download, save(result, photo, controls))

            return Task(partial(work, photo, controls.request), show)

        return await self.begin_download(self.parts.download, previous, make, request)

    def _explain_task(
        self, photo: ImageInput, controls: ImageControls, show: Callable[[ImageResults, float | None], Updates]
    ) -> Task:
        arguments = (photo, controls.request)
        return Task(partial(self.service.explain, *arguments), show, partial(self.service.cached, *arguments))

    def _restore_model(self, photo: ImageInput | None, error: Exception) -> Updates:
        """Set the model back to the one whose maps are shown."""
        if photo is None and not isinstance(error, ModelError):
            return {}
        return {self.parts.model: self.service.models.default if photo is None else photo.model}

    def _show_maps(self, controls: ImageControls, results: ImageResults, seconds: float | None) -> Updates:
        maps = rendering.maps_html(results, controls.request, controls.settings)
        return {self.parts.maps: maps} | self.done(seconds)

    def _show_image(
        self, photo: ImageInput, controls: ImageControls, results: ImageResults, seconds: float | None
    ) -> Updates:
        parts, sample = self.parts, results.sample
        assert sample is not None
        classes: Updates = {"value": list(controls.request.classes_for(results))}
        if controls.photo is None or controls.photo.model != photo.model:  # otherwise the page has them
            classes["choices"] = results.class_choices()
        return {
            parts.photo: photo,
            parts.predictions: rendering.predictions_html(results),
            parts.classes: gr.update(**classes),
            parts.maps: rendering.maps_html(results, controls.request, controls.settings),
            parts.depth: gr.update(maximum=results.depth, value=results.depth),
            parts.block: gr.update(maximum=results.depth - 1, value=results.depth - 1),
            parts.picture: base_image(results).photo,
            parts.rows: "",
            parts.curves: "",
            parts.row: gr.update(maximum=sample.grid[0] - 1, value=sample.grid[0] // 2),
            parts.column: gr.update(maximum=sample.grid[1] - 1, value=sample.grid[1] // 2),
        } | self.done(seconds)

    def _show_rows(self, photo: ImageInput, row: int, column: int, rows: BlockRows, seconds: float | None) -> Updates:
        results = self.service.cache.get(photo.key)
        if results is None or results.sample is None:
            raise InputError("The photo is no longer in the cache; please choose it again.")
        patch = min(max(row, 0), rows.grid[0] - 1), min(max(column, 0), rows.grid[1] - 1)
        base = base_image(results)
        return {
            self.parts.rows: rendering.rows_html(results, rows, patch),
            self.parts.picture: mark_patch(base.photo, base, rows.grid, patch),
            self.parts.row: patch[0],
            self.parts.column: patch[1],
        } | self.done(seconds)

    def _show_curves(self, request: ExplainRequest, measured: Any, seconds: float | None) -> Updates:
        results, found = measured
        return {self.parts.curves: rendering.curves_html(results, request, found)} | self.done(seconds)
