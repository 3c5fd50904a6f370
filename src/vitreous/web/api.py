"""The JSON interface beside the page: the same models, limits and cache, for programs. See docs/web.md."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import vitreous
from vitreous._utils.defaults import split_spellings
from vitreous.errors import InputError, VitreousError
from vitreous.inputs.patch_geometry import plane
from vitreous.web.image_service import ImageInput, ImageService
from vitreous.web.jobs import CancelledError, Job
from vitreous.web.requests import MAX_CLASSES, MAX_METHODS, ExplainRequest
from vitreous.web.results import ImageResults, TargetKey, read_target
from vitreous.web.views import RECOMMENDED, describe_method, method_catalogue, predictions_of, target_json, warning_of

_POLL_INTERVAL = 0.2  # seconds
_METHODS = ",".join(RECOMMENDED)
_FIELDS = ("image", "methods", "targets", "model", "depth", "trust")


class Method(BaseModel):
    """A method, by its spelling."""

    spelling: str
    family: str
    summary: str
    citation: str
    year: int
    link: str
    cost: str
    signed: bool
    class_specific: bool


class ModelInfo(BaseModel):
    """The model that is used where a request names none, and the limits of this server."""

    model: str
    class_names: list[str] | None
    models: list[str]
    methods: list[str]
    max_methods: int
    max_targets: int
    max_image_bytes: int
    max_seconds: float
    version: str


class Prediction(BaseModel):
    """A class with its probability; ``None`` where outputs are values."""

    index: int
    label: str
    probability: float | None


class Map(BaseModel):
    """The raw scores of one method for one target, row by row; or why there are none."""

    method: str
    target: Any
    label: str
    signed: bool | None = None
    rows: int | None = None
    columns: int | None = None
    scores: list[float] | None = None
    failed: str | None = None


class Explained(BaseModel):
    """The answer to ``POST /api/explain``.

    Attributes:
        model: The model.
        grid: Rows and columns of patches.
        frame: What the model sees of the image: left, top, right and bottom, from 0 to 1.
        predictions: The most probable classes, the most probable first.
        warning: Says that no class fits; empty otherwise.
        maps: A map for every target and method.
        trust: How reliable the maps of the first class are, if requested; see docs/trust.md.
        seconds: How long the model ran; 0 for results that were cached.
    """

    model: str
    grid: tuple[int, int]
    frame: tuple[float, float, float, float]
    predictions: list[Prediction]
    warning: str
    maps: list[Map]
    trust: dict[str, Any] | None = None
    seconds: float


class Refusal(BaseModel):
    """Why a request was refused, in one sentence."""

    error: str


def build_api(service: ImageService, folder: Path) -> FastAPI:
    """Build the interface.

    Args:
        service: Computes explanations.
        folder: Where images are kept while they are explained.
    """
    refusals: dict[int | str, dict[str, Any]] = {400: {"model": Refusal}, 413: {"model": Refusal}}
    api = FastAPI(title="Vitreous", version=vitreous.__version__, docs_url=None, redoc_url=None)

    @api.exception_handler(VitreousError)
    async def refuse(_: Request, error: VitreousError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    @api.get("/methods")
    def methods() -> list[Method]:
        """All methods; recipes that the page suggests as well."""
        return [_method(one["spelling"]) for one in method_catalogue()["methods"]]

    @api.get("/model")
    def model() -> ModelInfo:
        """The default model and the limits of this server."""
        name = service.models.default
        names = service.models.get(name).class_names
        limits = service.worker.limits
        return ModelInfo(
            model=name,
            class_names=None if names is None else list(names),
            models=service.models.names(),
            methods=list(RECOMMENDED),
            max_methods=MAX_METHODS,
            max_targets=MAX_CLASSES,
            max_image_bytes=service.upload_bytes,
            max_seconds=float("inf") if limits is None else limits.seconds,
            version=vitreous.__version__,
        )

    @api.post("/explain", responses=refusals)
    async def explain(
        request: Request,
        image: Annotated[UploadFile, File(description="The image, in a format that Pillow reads.")],
        methods: Annotated[str, Form(description="Method spellings, separated by commas.")] = _METHODS,
        targets: Annotated[
            str,
            Form(
                description="A JSON list of class numbers, contrasts "
                '{"kind": "contrast", "a": 3, "b": 5} and prompts {"kind": "prompt", "text": "a cat"}; '
                "empty for the predicted class."
            ),
        ] = "[]",
        model: Annotated[str, Form(description="The model; empty for that of the server.")] = "",
        depth: Annotated[int | None, Form(description="How many blocks are aggregated; all by default.")] = None,
        trust: Annotated[bool, Form(description="Also measure how reliable the maps are.")] = False,  # noqa: FBT002
    ) -> Explained:
        """Explain an image: the prediction, and the raw scores of every method for every target."""
        unknown = [name for name in await request.form() if name not in _FIELDS]
        if unknown:
            raise InputError(f"There is no field {unknown[0]!r}; the fields are {', '.join(_FIELDS)}.")
        wanted = ExplainRequest(tuple(split_spellings([methods])), _targets(targets), depth)
        name = model or service.models.default
        service.models.check(name)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="api-") as file:
            file.write(await image.read(service.upload_bytes + 1))
            file.flush()
            photo = service.read(file.name, Path(image.filename or "image").name, name)
            results = service.cached(photo, wanted)
            seconds = 0.0
            if results is None:
                results, seconds = await _run(service, request, lambda job: service.explain(photo, wanted, job))
            measured = None
            if trust:
                measured = service.cached_trust(photo, wanted)
            if trust and measured is None:
                measured, longer = await _run(service, request, lambda job: service.measure_trust(photo, wanted, job))
                seconds += longer
        answer = _answer(results, photo, wanted, seconds)
        return answer if measured is None else answer.model_copy(update={"trust": measured.as_dict()})

    return api


async def _run(service: ImageService, request: Request, work: Any) -> tuple[Any, float]:
    """Wait for a job, and cancel it if the client has disconnected."""
    job: Job = service.worker.submit(work)
    future = asyncio.wrap_future(job.future)
    try:
        while not (await asyncio.wait({future}, timeout=_POLL_INTERVAL))[0]:
            if await request.is_disconnected():
                job.cancel()
        return future.result(), job.seconds
    except CancelledError as error:
        raise InputError("The request was cancelled.") from error
    finally:
        job.cancel()


def _targets(text: str) -> tuple[TargetKey, ...]:
    try:
        values = json.loads(text)
        if not isinstance(values, list):
            raise InputError("targets must be a JSON list.")
        return tuple(read_target(one) for one in values)
    except VitreousError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError("targets must be a JSON list of class numbers, contrasts and prompts.") from error


def _method(spelling: str) -> Method:
    found = describe_method(spelling)
    return Method(
        **{name: found[name] for name in Method.model_fields if name in found}
        | {"class_specific": found["classSpecific"]}
    )


def _answer(results: ImageResults, photo: ImageInput, wanted: ExplainRequest, seconds: float) -> Explained:
    sample = results.sample
    assert sample is not None
    assert sample.preprocessing is not None
    width, height = results.photo.picture.size
    frame = sample.preprocessing.frame((height, width))
    return Explained(
        model=photo.model,
        grid=plane(sample.grid),
        frame=(frame.left / width, frame.top / height, frame.right / width, frame.bottom / height),
        predictions=[
            Prediction(index=one["index"], label=one["label"], probability=one["value"])
            for one in predictions_of(results)
        ],
        warning=warning_of(results),
        maps=[
            _map(results, method, target)
            for target in wanted.targets_for(results)
            for method in wanted.methods_for(results.depth)
        ],
        seconds=round(seconds, 3),
    )


def _map(results: ImageResults, method: str, target: TargetKey) -> Map:
    assert results.sample is not None
    reason = results.reason(method, target)
    key = target_json(target)
    if reason is not None:
        return Map(method=method, target=key, label=str(key), failed=reason)
    scores, label = results.scores[method, target], results.label(target)
    if not bool(scores.isfinite().all()):
        return Map(method=method, target=key, label=label, failed="The scores are not finite.")
    rows, columns = results.sample.grid_for(scores)
    return Map(
        method=method,
        target=key,
        label=label,
        signed=results.signed[method],
        rows=rows,
        columns=columns,
        scores=scores.reshape(-1).tolist(),
    )
