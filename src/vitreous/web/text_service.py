"""Explanations of texts, independent of the page, each computed once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import vitreous
from vitreous.errors import InputError
from vitreous.models.text_models import LoadedTextModel
from vitreous.web.jobs import Job, Throughput, Worker, monitored
from vitreous.web.models import TextModelCache
from vitreous.web.requests import ExplainRequest, RunMethods, compute, compute_first
from vitreous.web.results import BoundedCache, TextResults

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
        if results is None or results.missing(request.methods, request.classes_for(results)):
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
                    run = _explainer(model, text, results, request.classes)
                    count = max(1, len(request.classes))
                    compute_first(results, request.methods, run, job, classes=count, subject="the text")
                classes = request.classes_for(results)
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


def _explainer(model: LoadedTextModel, text: TextInput, results: TextResults, classes: Sequence[int]) -> RunMethods:
    def run(methods: Sequence[str]) -> None:
        target = [list(classes)] if classes else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the page says itself that the text was truncated
            results.add(vitreous.explain_text(model, text.text, methods, target, windows=text.windows))

    return run
