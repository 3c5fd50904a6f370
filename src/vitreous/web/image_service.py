"""Explanations of images, independent of the page: maps, attention rows and curves, each computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import vitreous
from vitreous.api.explain import network_of
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.explanation.trust import Trust
from vitreous.html.report import measure
from vitreous.inputs.patch_geometry import plane
from vitreous.methods.decomposition import ContributionMatrix
from vitreous.methods.spelling import parse
from vitreous.models import LoadedModel
from vitreous.pictures.curves import Curves, recorded
from vitreous.pictures.strips import depth_of
from vitreous.tape.diagnosis import missing_linear_part
from vitreous.targets import Contrast, Prompt, Similarity
from vitreous.web.jobs import Job, Limits, Throughput, Worker, monitored
from vitreous.web.models import PROMPT_MODEL, ModelCache
from vitreous.web.requests import ExplainRequest, RunMethods, all_depths, compute, compute_first, is_single_pass
from vitreous.web.results import (
    BlockRows,
    BoundedCache,
    ImageResults,
    PromptTarget,
    SimilarTarget,
    TargetKey,
    Upload,
    kind_of,
    load_image,
    read_upload,
)

CURVE_POINTS = 11  # per curve


@dataclass(frozen=True)
class ImageInput:
    """An image and the model to explain it with."""

    upload: Upload
    model: str

    @property
    def key(self) -> tuple[str, str]:
        """The cache key: the file's content and the model, not the file's name."""
        return self.upload.digest, self.model


class ImageService:
    """Explains images and caches the results.

    Methods that take a ``Job`` run the model and must be called on ``worker``; the others may be called from any
    thread.

    Attributes:
        worker: The thread that runs models.
        images_run: How many images models have processed since the start.
    """

    def __init__(
        self,
        models: ModelCache,
        *,
        cache_bytes: int = 256 * 2**20,
        upload_bytes: int = 20 * 2**20,
        limits: Limits | None = None,
    ) -> None:
        self.models = models
        self.upload_bytes = upload_bytes
        self.cache: BoundedCache[ImageResults] = BoundedCache(cache_bytes)
        self.worker = Worker(limits)
        self.images_run = 0
        self._throughputs: dict[str, Throughput] = {}
        self._grids: dict[str, tuple[int, ...]] = {}  # patches of each model's last image

    def read(self, path: str | Path, name: str, model: str) -> ImageInput:
        """Read an uploaded file.

        Raises:
            ImageError: it is too large, or gone.
        """
        return ImageInput(read_upload(path, name, self.upload_bytes), model)

    def cached(self, photo: ImageInput, request: ExplainRequest) -> ImageResults | None:
        """Return the results of an image if everything requested is there."""
        results = self.cache.get(photo.key)
        if results is None or results.sample is None:
            return None
        missing = results.missing(request.methods_for(results.depth), request.targets_for(results))
        return None if missing else results

    def explain(self, photo: ImageInput, request: ExplainRequest, job: Job) -> ImageResults:
        """Compute the maps that are requested and missing."""
        model, results = self._open(photo, job)
        with self._storing(photo, results), self._monitored(model, job):
            if results.sample is None:
                first = [target for target in request.targets if kind_of(target) == "class"]
                run = self._explainer(photo.model, model, results, first)
                count = max(1, len(first))
                compute_first(results, request.methods, run, job, classes=count, subject="the photo")
            assert results.sample is not None
            results.grid = self._grids[photo.model] = tuple(results.sample.grid)
            targets = request.targets_for(results)
            shown = request.methods_for(results.depth)
            ahead = _other_depths(request, results.depth) if results.missing(shown, targets) else []
            for kind in dict.fromkeys(map(kind_of, targets)):
                some = [target for target in targets if kind_of(target) == kind]
                missing = results.missing([*shown, *ahead], some)
                todo = [one for one in some if any((method, one) not in results.scores for method in missing)]
                run = self._explainer(photo.model, model, results, todo)
                compute(results, missing, run, job, classes=len(todo), subject="the photo", kind=kind)
        return results

    def measure_trust(self, photo: ImageInput, request: ExplainRequest, job: Job) -> Trust:
        """Measure how reliable the maps of the first class are."""
        results = self.explain(photo, request, job)
        model = self.models.get(photo.model)
        target, methods = trusted(results, request)
        key = (tuple(methods), target)
        if key not in results.trust:
            with self._storing(photo, results), self._monitored(model, job):
                job.start_stage("measuring trust")
                explanation = results.explanation(methods, [target])
                (results.trust[key],) = vitreous.trust(model, results.photo.pixels, explanation)
        return results.trust[key]

    def cached_trust(self, photo: ImageInput, request: ExplainRequest) -> Trust | None:
        """Return what was measured before."""
        results = self.cached(photo, request)
        if results is None or not results.trust:
            return None
        try:
            target, methods = trusted(results, request)
        except InputError:
            return None
        return results.trust.get((tuple(methods), target))

    def rows(self, photo: ImageInput, block: int, job: Job) -> BlockRows:
        """Compute the attention rows of a block."""
        model, results = self._open(photo, job)
        if block not in results.rows:
            with self._storing(photo, results), self._monitored(model, job):
                job.start_stage(f"reading block {block}", 1)
                results.rows[block] = block_rows(model, results.photo.pixels, block)
        return results.rows[block]

    def cached_rows(self, photo: ImageInput, block: int) -> BlockRows | None:
        """Return the attention rows of a block if they are there."""
        results = self.cache.get(photo.key)
        return None if results is None else results.rows.get(block)

    def curves(self, photo: ImageInput, request: ExplainRequest, job: Job) -> tuple[ImageResults, list[list[Curves]]]:
        """Measure deletion and insertion of the maps shown, per class; no curves for regression outputs."""
        results = self.explain(photo, request, job)
        model = self.models.get(photo.model)
        methods = shown_methods(results, request) if results.has_curves else []
        classes = explained_classes(results, request)
        todo = {one: [method for method in methods if (method, one) not in results.curves] for one in classes}
        with self._storing(photo, results), self._monitored(model, job):
            job.start_stage("measuring curves", 2 * CURVE_POINTS * sum(map(len, todo.values())))
            for one, missing in todo.items():
                if missing:
                    explanation = results.explanation(missing, [one])
                    found = measure(model, results.photo.pixels, explanation, 0)
                    results.curves |= {(curve.method, one): curve for curve in found.curves}
                    results.by = found.by
        return results, [[results.curves[method, one] for method in methods] for one in classes]

    def close(self) -> None:
        """Cancel all jobs and end the worker thread."""
        self.worker.close()

    def _explainer(
        self, name: str, model: LoadedModel, results: ImageResults, targets: Sequence[TargetKey]
    ) -> RunMethods:
        """Return a function that explains targets of one kind; without targets, the predicted class."""
        pixels = results.photo.pixels

        def run(methods: Sequence[str]) -> None:
            if not targets:
                results.add(vitreous.explain(model, pixels, methods))
            elif isinstance(targets[0], PromptTarget):
                dual: Any = self.models.dual_encoder(name)
                if dual is None:
                    raise UnsupportedModelError(f"{name} reads no text: prompts need a model such as {PROMPT_MODEL}.")
                prompts = [Prompt(one.text) for one in targets if isinstance(one, PromptTarget)]
                results.add(vitreous.explain(dual, pixels, methods, [prompts]), targets)
            elif isinstance(targets[0], SimilarTarget):
                others = [self._reference(one.upload, model) for one in targets if isinstance(one, SimilarTarget)]
                results.add(vitreous.explain(self.models.embedding_tower(name), pixels, methods, [others]), targets)
            else:
                classes = [one for one in targets if isinstance(one, int | Contrast)]
                results.add(vitreous.explain(model, pixels, methods, [classes]), classes)

        return run

    def _reference(self, upload: Upload, model: LoadedModel) -> Similarity:
        """Return the target of another image: the cosine of both embeddings."""
        return Similarity(load_image(upload, model, self.upload_bytes).pixels[0], upload.name)

    def _open(self, photo: ImageInput, job: Job) -> tuple[LoadedModel, ImageResults]:
        job.start_stage(f"loading {photo.model}")
        model = self.models.get(photo.model)
        job.throughput = self._throughputs.setdefault(photo.model, job.throughput)
        results = self.cache.get(photo.key)
        if results is None:
            job.start_stage("reading the photo")
            loaded = load_image(photo.upload, model, self.upload_bytes)
            results = ImageResults(loaded, depth_of(model), grid=self._grids.get(photo.model))
        job.check()
        return model, results

    @contextmanager
    def _monitored(self, model: LoadedModel, job: Job) -> Iterator[None]:
        with monitored(network_of(model), job, self._count):
            yield

    def _count(self, images: int) -> None:
        self.images_run += images

    @contextmanager
    def _storing(self, photo: ImageInput, results: ImageResults) -> Iterator[None]:
        """Store what was computed, even if the rest is cancelled or fails."""
        try:
            yield
        finally:
            if results.sample is not None:
                self.cache.put(photo.key, results)


def shown_methods(results: ImageResults, request: ExplainRequest) -> list[str]:
    """Return the spellings of the maps shown: those requested, at the requested depth, that work for all targets."""
    targets = request.targets_for(results)
    return [
        method
        for method in dict.fromkeys(request.methods_for(results.depth))
        if all(results.reason(method, target) is None for target in targets)
    ]


def explained_classes(results: ImageResults, request: ExplainRequest) -> list[int]:
    """Return the classes among the targets: curves are measured of them."""
    return [one for one in request.targets_for(results) if isinstance(one, int)]


def trusted(results: ImageResults, request: ExplainRequest) -> tuple[int, list[str]]:
    """Return the class and the methods whose maps trust is measured of.

    Raises:
        InputError: no class is explained.
    """
    target = next(iter(explained_classes(results, request)), None)
    methods = shown_methods(results, request)
    if target is None or not methods:
        raise InputError("Trust is measured for a class: explain one, by a method that works on this model.")
    return target, methods


def block_rows(model: LoadedModel, pixels: Tensor, block: int) -> BlockRows:
    """Run the model once and read the attention of one block.

    Raises:
        UnsupportedModelError: the block does not exist, or its attention cannot be recorded.
    """
    if not 0 <= block < depth_of(model, pixels):
        raise UnsupportedModelError(f"there is no block {block}: this model has {depth_of(model, pixels)} blocks")
    recipe = parse(f"attin:layer={block}")
    with recorded(model, pixels, recipe) as view:
        if block in view.tape.unseen_attention or view.tape.other_attention is not None:
            raise UnsupportedModelError(f"block {block} of this model has no attention call, or more than one")
        layout = view.layout
        patches = slice(layout.prefix, layout.prefix + layout.patches)
        attention = view.attention(block).rows(patches).mean(dim=1)[0][:, patches].clone().cpu()
        contribution = None
        if missing_linear_part(view.tape, recipe.needs(view.depth)) is None:
            read = cast("ContributionMatrix", recipe.readout).reader(view, block)
            contribution = read(patches)[0][:, patches].clone().cpu()
        return BlockRows(block, plane(layout.grid), attention, contribution)


def _other_depths(request: ExplainRequest, depth: int) -> list[str]:
    """Return the maps for all positions of the depth slider once it was moved: they share one run."""
    if request.depth is None or request.depth >= depth:
        return []
    return [spelling for method in request.methods if is_single_pass(method) for spelling in all_depths(method, depth)]
