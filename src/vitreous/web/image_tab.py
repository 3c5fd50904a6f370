"""The events of the image tab."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from vitreous.errors import ImageError, InputError, ModelError, VitreousError
from vitreous.inputs.patch_geometry import plane
from vitreous.web import rendering
from vitreous.web.image_service import ImageInput, ImageService
from vitreous.web.jobs import CancelledError, Job, SessionJobs
from vitreous.web.layout import ImageComponents
from vitreous.web.rendering import DisplaySettings, base_image, mark_patch, patch_at, status_html
from vitreous.web.requests import ExplainRequest
from vitreous.web.results import BlockRows, Example, ImageResults, SimilarTarget, Upload, read_target
from vitreous.web.security import OpenStreams
from vitreous.web.tab_controller import SHARED_OPTIONS, TabController, Task, Updates, click_script, unchanged
from vitreous.web.views import RECOMMENDED, trust_of, view_of

_NO_IMAGE = "Choose a photo first."
_LIKELY_AT_FIRST = 2  # classes that the opening example shows
_ASK = "(query, ...others) => [window.vitreous.request(), ...others]"
OPENING = ExplainRequest(RECOMMENDED, likely=_LIKELY_AT_FIRST)


@dataclass(frozen=True)
class ImageControls:
    """What the page's scripts request.

    Attributes:
        request: What is explained.
        settings: How maps are drawn in downloads.
        command: What else: ``example``, the number of an example photo, or ``model``, the name of another model.
    """

    request: ExplainRequest
    settings: DisplaySettings
    command: dict[str, Any] = field(default_factory=dict)


def read_image_controls(query: str | None, second: Upload | None = None) -> ImageControls:
    """Parse and check a request of the page's scripts.

    Raises:
        InputError: it is not one.
    """
    try:
        values = json.loads(query or "")
        drawn = values.get("settings") or {}
        settings = DisplaySettings(
            float(drawn["opacity"]), drawn["sign"], float(drawn["threshold"]), bool(drawn["smooth"])
        )
        depth = values.get("depth")
        targets = tuple(read_target(one, second) for one in values.get("questions") or ())
        methods = tuple(dict.fromkeys(str(one) for one in values["methods"]))
        command = {name: values[name] for name in ("example", "model") if name in values}
    except VitreousError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError("The request cannot be read; reload the page.") from error
    return ImageControls(ExplainRequest(methods, targets, None if depth is None else int(depth)), settings, command)


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
        examples: Sequence[Example],
        jobs: SessionJobs,
        streams: OpenStreams,
        folder: Path,
    ) -> None:
        super().__init__(jobs, streams, folder, parts)
        self.service, self.parts, self.examples = service, parts, list(examples)
        self._credits = {one.path.name: one.credit for one in examples}
        self._numbers = itertools.count(1)

    def connect(self, page: Any) -> None:
        """Attach the events to the components."""
        parts, pending = self.parts, self.parts.pending
        with_query = {**SHARED_OPTIONS, "js": _ASK}
        state = [parts.status, parts.stop]
        opened = [parts.photo, parts.model, parts.view, parts.block, parts.picture, parts.rows, parts.curves]
        opened += [parts.row, parts.column, parts.upload]
        drawn = [parts.rows, parts.picture, parts.row, parts.column]
        runs = [
            self.connect_run("maps", [*opened, parts.second], "run_maps"),
            self.connect_run("rows", drawn, "run_rows"),
            self.connect_run("curves", [parts.curves], "run_curves"),
            self.connect_run("trust", [parts.view], "run_trust"),
            self.connect_run("download", [parts.download], "run_download"),
        ]
        runs[-1].then(None, js=click_script("vitreous-download"))

        session, maps = parts.session(), [*state, pending["maps"]]
        inputs, outputs = [*session, pending["maps"], parts.model], [*maps, *opened]
        page.load(self.open_first, inputs, outputs, **with_query)
        parts.open.click(self.open_example, inputs, outputs, api_name="open", **with_query)
        parts.upload.upload(self.open_upload, [*inputs, parts.upload], outputs, api_name="upload", **with_query)
        parts.model.change(self.change_model, inputs, outputs, **with_query)
        shown = [*maps, parts.view, parts.model]
        parts.show.click(self.show, [*session, pending["maps"]], shown, api_name="show", **with_query)
        parts.second_upload.upload(
            self.open_second,
            [*session, pending["maps"], parts.second_upload],
            [*shown, parts.second],
            api_name="second",
            **with_query,
        )
        parts.trust.click(
            self.trust,
            [*session, pending["trust"]],
            [*state, pending["trust"], parts.view],
            api_name="trust",
            **with_query,
        )

        rows = [*state, pending["rows"], *drawn]
        patch = [pending["rows"], parts.photo, parts.block, parts.row, parts.column]
        parts.picture.select(self.select_patch, patch, rows, **SHARED_OPTIONS)
        parts.look.click(self.show_patch, patch, rows, **SHARED_OPTIONS)
        parts.block.input(self.show_patch, patch, rows, **{**SHARED_OPTIONS, "trigger_mode": "always_last"})

        curves = [*state, pending["curves"], parts.curves]
        parts.measure.click(self.measure, [*session, pending["curves"]], curves, api_name="measure", **with_query)
        files = [*state, pending["download"], parts.download]
        for button, kind in ((parts.png, "png"), (parts.npz, "npz"), (parts.report, "report")):
            save = getattr(self, f"save_{kind}")
            button.click(save, [*session, pending["download"]], files, **with_query)
        parts.stop.click(
            self.stop, parts.photo, [*state, parts.model, parts.view], queue=False, cancels=runs, **SHARED_OPTIONS
        )

    async def open_first(
        self,
        request: gr.Request,
        query: str,
        photo: ImageInput | None,
        second: Upload | None,
        previous: Task | None,
        model: str,
    ) -> Updates:
        """Show the first example when the page opens, with the two most probable classes."""
        if photo is not None or not self.examples:
            return unchanged()
        return await self._open(
            self.examples[0].path, previous, model, (query, photo, second), request, _LIKELY_AT_FIRST
        )

    async def open_example(
        self,
        request: gr.Request,
        query: str,
        photo: ImageInput | None,
        second: Upload | None,
        previous: Task | None,
        model: str,
    ) -> Updates:
        """Explain an example image, or the same image with another model."""
        session = (query, photo, second)
        try:
            command = read_image_controls(query, second).command
        except InputError:
            command = {}
        number = command.get("example")
        if isinstance(number, int) and 0 <= number < len(self.examples):
            return await self._open(self.examples[number].path, previous, model, session, request)
        if photo is None or not isinstance(command.get("model"), str):
            return unchanged()
        return await self._open(photo.upload.path, previous, command["model"], session, request, name=photo.upload.name)

    async def open_upload(
        self,
        request: gr.Request,
        query: str,
        photo: ImageInput | None,
        second: Upload | None,
        previous: Task | None,
        model: str,
        path: str | None,
    ) -> Updates:
        """Explain an uploaded image."""
        if path is None:
            return unchanged()
        return await self._open(path, previous, model, (query, photo, second), request)

    async def change_model(
        self,
        request: gr.Request,
        query: str,
        photo: ImageInput | None,
        second: Upload | None,
        previous: Task | None,
        model: str,
    ) -> Updates:
        """Explain the image with another model."""
        if model == (self.service.models.default if photo is None else photo.model):
            return unchanged()  # the choice was put back
        if photo is not None:
            session = (query, photo, second)
            return await self._open(photo.upload.path, previous, model, session, request, name=photo.upload.name)

        def check() -> Updates:
            self.service.models.check(str(model or ""))
            return {self._status: status_html(f"{model} will be loaded with the first photo.")}

        return await self.begin("maps", previous, check, request, partial(self._restore, None))

    async def show(
        self, request: gr.Request, query: str, photo: ImageInput | None, second: Upload | None, previous: Task | None
    ) -> Updates:
        """Show the requested maps."""

        def make() -> Task:
            chosen, wanted = _chosen(photo), read_image_controls(query, second).request
            return self._explain_task(chosen, wanted, partial(self._show_maps, chosen, wanted))

        return await self.begin("maps", previous, make, request, partial(self._restore, photo))

    async def open_second(
        self,
        request: gr.Request,
        query: str,
        photo: ImageInput | None,
        second: Upload | None,
        previous: Task | None,
        path: str | None,
    ) -> Updates:
        """Explain why the image is similar to another one, besides the classes that are shown."""
        if path is None:
            return unchanged()

        def make() -> Task:
            chosen = _chosen(photo)
            other = self.service.read(path, Path(path).name, chosen.model).upload
            wanted = read_image_controls(query, second).request
            classes = tuple(one for one in wanted.targets if not isinstance(one, SimilarTarget))
            wanted = replace(wanted, targets=(*classes[:1], SimilarTarget(other)))

            def show(results: ImageResults, seconds: float | None) -> Updates:
                return self._show_maps(chosen, wanted, results, seconds) | {self.parts.second: other}

            return self._explain_task(chosen, wanted, show)

        return await self.begin("maps", previous, make, request, partial(self._restore, photo))

    async def trust(
        self, request: gr.Request, query: str, photo: ImageInput | None, second: Upload | None, previous: Task | None
    ) -> Updates:
        """Measure how reliable the maps shown are."""

        def make() -> Task:
            arguments = _chosen(photo), read_image_controls(query, second).request

            def show(found: Any, seconds: float | None) -> Updates:
                return self._send({"trust": trust_of(found)}) | self.done(seconds)

            return Task(
                partial(self.service.measure_trust, *arguments), show, partial(self.service.cached_trust, *arguments)
            )

        return await self.begin("trust", previous, make, request)

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
            row, column = patch_at(base_image(results), plane(results.sample.grid), float(x), float(y))
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
            chosen = _chosen(photo)
            return Task(
                partial(self.service.rows, chosen, int(block)),
                partial(self._show_rows, chosen, int(row), int(column)),
                partial(self.service.cached_rows, chosen, int(block)),
            )

        return await self.begin("rows", previous, make, request)

    async def measure(
        self, request: gr.Request, query: str, photo: ImageInput | None, second: Upload | None, previous: Task | None
    ) -> Updates:
        """Measure the curves of the maps shown."""

        def make() -> Task:
            wanted = read_image_controls(query, second).request
            return Task(partial(self.service.curves, _chosen(photo), wanted), partial(self._show_curves, wanted))

        return await self.begin("curves", previous, make, request)

    async def save_png(
        self, request: gr.Request, query: str, photo: ImageInput | None, second: Upload | None, previous: Task | None
    ) -> Updates:
        """Download the maps as a picture."""

        def save(results: ImageResults, chosen: ImageInput, controls: ImageControls) -> Path:
            return rendering.save_png(results, chosen, controls.request, controls.settings, self.new_folder())

        return await self._save(self.service.explain, save, previous, (query, photo, second), request)

    async def save_npz(
        self, request: gr.Request, query: str, photo: ImageInput | None, second: Upload | None, previous: Task | None
    ) -> Updates:
        """Download the scores."""

        def save(results: ImageResults, chosen: ImageInput, controls: ImageControls) -> Path:
            return rendering.save_npz(results, chosen, controls.request, self.new_folder())

        return await self._save(self.service.explain, save, previous, (query, photo, second), request)

    async def save_report(
        self, request: gr.Request, query: str, photo: ImageInput | None, second: Upload | None, previous: Task | None
    ) -> Updates:
        """Download a report."""

        def save(measured: Any, chosen: ImageInput, controls: ImageControls) -> Path:
            results, curves = measured
            return rendering.save_report(results, chosen, controls.request, curves, self.new_folder())

        return await self._save(self.service.curves, save, previous, (query, photo, second), request)

    def stop(self, request: gr.Request, photo: ImageInput | None) -> Updates:
        """Stop the session's job; the maps shown are those of the model before it."""
        self.cancel(request)
        return self.stopped() | (self._restore(photo, CancelledError("Stopped.")) or {})

    async def _open(
        self,
        path: str | Path,
        previous: Task | None,
        model: str,
        session: tuple[str, ImageInput | None, Upload | None],
        request: gr.Request,
        likely: int = 1,
        *,
        name: str | None = None,
    ) -> Updates:
        query, before, second = session

        def make() -> Task:
            self.service.models.check(str(model or ""))
            photo = self.service.read(path, name or Path(path).name, model)
            # Targets belong to another image or model, and the depth to another model.
            wanted = replace(read_image_controls(query, second).request, targets=(), depth=None, likely=likely)
            return self._explain_task(photo, wanted, partial(self._show_image, photo, wanted))

        def restore(error: Exception) -> Updates:
            unreadable = {self.parts.upload: None} if isinstance(error, ImageError) else {}  # the box showed its name
            return self._restore(before, error) | unreadable

        return await self.begin("maps", previous, make, request, restore)

    async def _save(
        self,
        work: Callable[[ImageInput, ExplainRequest, Job], Any],
        save: Callable[[Any, ImageInput, ImageControls], Path],
        previous: Task | None,
        session: tuple[str, ImageInput | None, Upload | None],
        request: gr.Request,
    ) -> Updates:
        query, photo, second = session

        def make() -> Task:
            chosen, controls = _chosen(photo), read_image_controls(query, second)

            def show(result: Any, _seconds: float | None) -> Updates:
                return self.file_ready(self.parts.download, save(result, chosen, controls))

            return Task(partial(work, chosen, controls.request), show)

        return await self.begin_download(self.parts.download, previous, make, request)

    def _explain_task(
        self, photo: ImageInput, wanted: ExplainRequest, show: Callable[[ImageResults, float | None], Updates]
    ) -> Task:
        arguments = (photo, wanted)
        return Task(partial(self.service.explain, *arguments), show, partial(self.service.cached, *arguments))

    def _restore(self, photo: ImageInput | None, error: Exception) -> Updates:
        """Set model, methods and questions back to those whose maps are shown."""
        updates = self._send({"rejected": True})
        if photo is not None or isinstance(error, ModelError):
            updates[self.parts.model] = self.service.models.default if photo is None else photo.model
        return updates

    def _view(self, photo: ImageInput, wanted: ExplainRequest, results: ImageResults) -> Updates:
        view = view_of(
            results,
            photo,
            wanted,
            reads_text=self.service.models.reads_prompts(photo.model),
            credit=self._credits.get(photo.upload.name, ""),
            trust=self.service.cached_trust(photo, wanted),
        )
        return self._send(view)

    def _send(self, values: dict[str, Any]) -> Updates:
        """Return the page's scripts an answer, as text: Gradio would compare dictionaries part by part.

        The number makes the same maps another answer.
        """
        return {self.parts.view: json.dumps({**values, "number": next(self._numbers)})}

    def _show_maps(
        self, photo: ImageInput, wanted: ExplainRequest, results: ImageResults, seconds: float | None
    ) -> Updates:
        return self._view(photo, wanted, results) | self.done(seconds)

    def _show_image(
        self, photo: ImageInput, wanted: ExplainRequest, results: ImageResults, seconds: float | None
    ) -> Updates:
        parts, sample = self.parts, results.sample
        assert sample is not None
        updates: Updates = {
            parts.photo: photo,
            parts.model: photo.model,
            parts.block: gr.update(maximum=results.depth - 1, value=results.depth - 1),
            parts.picture: base_image(results).photo,
            parts.rows: "",
            parts.curves: "",
            parts.row: gr.update(maximum=sample.grid[0] - 1, value=sample.grid[0] // 2),
            parts.column: gr.update(maximum=sample.grid[1] - 1, value=sample.grid[1] // 2),
        }
        return updates | self._show_maps(photo, wanted, results, seconds)

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


def _chosen(photo: ImageInput | None) -> ImageInput:
    if photo is None:
        raise InputError(_NO_IMAGE)
    return photo
