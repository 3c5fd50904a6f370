"""The text tab: its events, and the explanations behind them, each computed once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

import vitreous
from vitreous.errors import InputError, ModelError
from vitreous.models.hf_models import LoadedTextModel
from vitreous.text.explanation import By
from vitreous.web import rendering
from vitreous.web.jobs import CancelledError, Job, SessionJobs, Throughput, Worker, monitored
from vitreous.web.layout import TEXT_EXAMPLES, TextComponents
from vitreous.web.models import TextModelCache
from vitreous.web.rendering import status_html
from vitreous.web.requests import ExplainRequest, RunMethods, compute, compute_first
from vitreous.web.results import BoundedCache, TargetKey, TextResults
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

MAX_CHARACTERS = 20_000  # some eight pages


@dataclass(frozen=True)
class TextInput:
    """A text and the model to explain it with.

    Attributes:
        text: The text.
        model: The model's name.
        windows: Whether a text that is too long for the model is explained in windows; otherwise it is truncated.
    """

    text: str
    model: str
    windows: bool = False

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise InputError("Write or paste a text first.")
        if len(self.text) > MAX_CHARACTERS:
            raise InputError(f"The text has {len(self.text):,} characters; the limit is {MAX_CHARACTERS:,}.")

    @property
    def key(self) -> tuple[str, str, bool]:
        """The cache key."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest(), self.model, self.windows


class TextService:
    """Explains texts and caches the results.

    ``explain`` takes a ``Job`` and must be called on the worker; the others may be called from any thread.

    Args:
        models: The models.
        worker: The thread that runs models, shared with the image service.
        cache_bytes: Size of the result cache.

    Attributes:
        texts_run: How many texts models have processed since the start.
    """

    def __init__(self, models: TextModelCache, worker: Worker, *, cache_bytes: int = 16 * 2**20) -> None:
        self.models, self.worker = models, worker
        self.cache: BoundedCache[TextResults] = BoundedCache(cache_bytes)
        self.texts_run = 0
        self._throughputs: dict[str, Throughput] = {}

    def cached(self, text: TextInput, request: ExplainRequest) -> TextResults | None:
        """Return the results of a text if everything requested is there."""
        results = self.cache.get(text.key)
        if results is None or results.missing(request.methods, request.targets_for(results)):
            return None
        return results

    def explain(self, text: TextInput, request: ExplainRequest, job: Job) -> TextResults:
        """Compute the scores that are requested and missing."""
        job.unit = "texts"
        job.start_stage(f"loading {text.model}")
        model = self.models.get(text.model)
        job.throughput = self._throughputs.setdefault(text.model, job.throughput)
        results = self.cache.get(text.key) or _tokenize(text, model)
        try:
            with monitored(model.model, job, self._count):
                if results.sample is None:
                    run = _explainer(model, text, results, request.targets)
                    count = max(1, len(request.targets))
                    compute_first(results, request.methods, run, job, classes=count, subject="the text")
                classes = request.targets_for(results)
                run = _explainer(model, text, results, classes)
                missing = results.missing(request.methods, classes)
                compute(results, missing, run, job, classes=len(classes), subject="the text")
        finally:
            # Store what was computed, even if the rest is cancelled or fails.
            if results.sample is not None:
                self.cache.put(text.key, results)
        return results

    def _count(self, texts: int) -> None:
        self.texts_run += texts


def _tokenize(text: TextInput, model: LoadedTextModel) -> TextResults:
    """Count the tokens of a text.

    Raises:
        InputError: the text has no tokens besides special ones.
    """
    reader = model.reader
    tokens = len(reader.read(text.text, "the text").pieces)
    fits = text.windows or reader.capacity is None
    return TextResults(text.text, tokens, tokens if fits else min(tokens, reader.capacity or tokens))


def _explainer(
    model: LoadedTextModel, text: TextInput, results: TextResults, classes: Sequence[TargetKey]
) -> RunMethods:
    def run(methods: Sequence[str]) -> None:
        target = [[one for one in classes if isinstance(one, int)]] if classes else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the page says itself that the text was truncated
            results.add(vitreous.explain_text(model, text.text, methods, target, windows=text.windows))

    return run


@dataclass(frozen=True)
class TextControls:
    """The settings of the text tab."""

    text: TextInput
    request: ExplainRequest
    by: By


def read_text_controls(values: Sequence[Any]) -> TextControls:
    """Parse the values of ``TextComponents.controls``."""
    text, model, long, classes, spelled, by, *groups = values
    if by not in ("max", "sum") or long not in ("cut", "windows"):
        raise InputError("Long texts are truncated or explained in windows; words are scored by max or sum.")
    text = TextInput(str(text or ""), str(model or "").strip(), windows=long == "windows")
    return TextControls(text, ExplainRequest(read_methods(spelled, groups), tuple(map(int, classes or ()))), by)


class TextTab(TabController):
    """The events of the text tab; the arguments are those of ``ImageTab``."""

    def __init__(
        self, service: TextService, parts: TextComponents, jobs: SessionJobs, streams: OpenStreams, folder: Path
    ) -> None:
        super().__init__(jobs, streams, folder, parts)
        self.service, self.parts = service, parts

    def connect(self) -> None:
        """Attach the events to the components."""
        parts, pending = self.parts, self.parts.pending
        state = [parts.status, parts.stop]
        shown = [parts.predictions, parts.words, parts.classes, parts.model, parts.shown_model]
        runs = [
            self.connect_run("words", shown, "run_words"),
            self.connect_run("download", [parts.download], "run_text_download"),
        ]
        runs[-1].then(None, js=click_script("vitreous-text-download"))
        inputs = [pending["words"], parts.shown_model, *parts.controls()]
        outputs = [*state, pending["words"], *shown]
        parts.explain.click(self.open, inputs, outputs, api_name="explain_text", **SHARED_OPTIONS)
        parts.text.submit(self.open, inputs, outputs, **SHARED_OPTIONS)
        parts.example.click(
            lambda number: TEXT_EXAMPLES[int(number)], parts.example, parts.text, **SHARED_OPTIONS
        ).then(self.open, inputs, outputs, **SHARED_OPTIONS)
        parts.model.change(self.change_model, inputs, outputs, **SHARED_OPTIONS)
        for part in (*parts.methods, parts.classes, parts.long):
            part.input(self.show, inputs, outputs, **SHARED_OPTIONS)
        parts.spelled.submit(self.show, inputs, outputs, **SHARED_OPTIONS)
        parts.by.input(self.show, inputs, outputs, **{**SHARED_OPTIONS, "trigger_mode": "always_last"})
        files = [*state, pending["download"], parts.download]
        parts.save.click(
            self.save, [pending["download"], *parts.controls()], files, api_name="save_text", **SHARED_OPTIONS
        )
        parts.stop.click(
            self.stop, parts.shown_model, [*state, parts.model], queue=False, cancels=runs, **SHARED_OPTIONS
        )

    async def open(self, request: gr.Request, previous: Task | None, shown_model: str, *values: Any) -> Updates:
        """Explain the text, and offer the classes of the model."""
        return await self._explain(request, previous, shown_model, values, offer_classes=True)

    async def show(self, request: gr.Request, previous: Task | None, shown_model: str, *values: Any) -> Updates:
        """Show what is requested of the text."""
        return await self._explain(request, previous, shown_model, values, offer_classes=False)

    async def change_model(self, request: gr.Request, previous: Task | None, shown_model: str, *values: Any) -> Updates:
        """Explain the text with another model, which has other classes."""
        text, model, long, _, *others = values
        if model == shown_model:
            return unchanged()  # the choice was put back
        if str(text or "").strip():
            changed = (text, model, long, [], *others)
            return await self._explain(request, previous, shown_model, changed, offer_classes=True)

        def check() -> Updates:
            self.service.models.check(str(model or ""))
            return {
                self._status: status_html(f"{model} will be loaded with the first text."),
                self.parts.classes: gr.update(choices=[], value=[]),
            }

        return await self.begin("words", previous, check, request, partial(self._restore_model, shown_model))

    async def save(self, request: gr.Request, previous: Task | None, *values: Any) -> Updates:
        """Download the coloured text as an HTML page."""

        def make() -> Task:
            controls = read_text_controls(values)
            self.service.models.check(controls.text.model)

            def show(results: TextResults, _seconds: float | None) -> Updates:
                file = rendering.save_text_report(results, controls.request, controls.by, self.new_folder())
                return self.file_ready(self.parts.download, file)

            return Task(partial(self.service.explain, controls.text, controls.request), show)

        return await self.begin_download(self.parts.download, previous, make, request)

    def stop(self, request: gr.Request, shown_model: str) -> Updates:
        """Stop the session's job; the words shown are those of the model before it."""
        self.cancel(request)
        return self.stopped() | self._restore_model(shown_model, ModelError(""))

    async def _explain(
        self,
        request: gr.Request,
        previous: Task | None,
        shown_model: str,
        values: Sequence[Any],
        *,
        offer_classes: bool,
    ) -> Updates:
        def make() -> Task:
            self.service.models.check(str(values[1] or "").strip())
            controls = read_text_controls(values)
            arguments = (controls.text, controls.request)
            return Task(
                partial(self.service.explain, *arguments),
                partial(self._show_words, controls, offer_classes=offer_classes),
                partial(self.service.cached, *arguments),
            )

        return await self.begin("words", previous, make, request, partial(self._restore_model, shown_model))

    def _restore_model(self, shown_model: str, error: Exception) -> Updates:
        """Set the model back to the one whose words are shown."""
        return {self.parts.model: shown_model} if isinstance(error, ModelError | CancelledError) else {}

    def _show_words(
        self, controls: TextControls, results: TextResults, seconds: float | None, *, offer_classes: bool
    ) -> Updates:
        parts = self.parts
        updates: Updates = {
            parts.predictions: rendering.predictions_html(results),
            parts.words: rendering.text_html(results, controls.request, controls.by),
            parts.shown_model: controls.text.model,
        }
        if offer_classes:
            classes = list(controls.request.targets)
            updates[parts.classes] = gr.update(choices=results.class_choices(), value=classes)
        return updates | self.done(seconds)
