"""Images and texts with their maps, made again from the data set and the model where these are at hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitreous.benchmark.photo_material import resized
from vitreous.benchmark.report.extremes import Extremes
from vitreous.benchmark.results import Results
from vitreous.benchmark.store import Store, read_manifest
from vitreous.benchmark.text_material import places_of
from vitreous.benchmark.workbench import Workbench, open_workbench
from vitreous.datasets import Review
from vitreous.errors import VitreousError
from vitreous.explaining import explain
from vitreous.html.page import picture
from vitreous.html.words import excerpt
from vitreous.models.text_models import LoadedTextModel
from vitreous.text_explaining import explain_text

if TYPE_CHECKING:
    from PIL import Image

_SIDE = 132

Thumbnails = Mapping[tuple[str, int], str]


def thumbnails_of(results: Results, extremes: Iterable[Extremes]) -> tuple[Thumbnails, str | None]:
    """What is shown, as HTML by method and image, and why some or all of it is missing."""
    methods: dict[tuple[int, int], list[str]] = {}
    for each in extremes:
        for image in (*each.best, *each.worst):
            methods.setdefault((results.run_of(each.method), image.index), []).append(each.method)
    pictures: dict[tuple[str, int], str] = {}
    problem = None
    for (number, index), asked in sorted(methods.items()):  # run by run: one model is open at a time
        try:
            drawn = _draw(_opened(results.stores[number]), index, asked)
        except VitreousError as error:
            problem = str(error)
        else:
            pictures |= {(method, index): shown for method, shown in drawn.items()}
    return pictures, problem


def _opened(store: Store) -> Workbench:
    """What a run is made of; a model whose name is a path lies where the run was started from."""
    folder = Path(read_manifest(store.folder).get("folder", ""))
    with ExitStack() as elsewhere:
        with suppress(OSError):  # it is gone, or somebody else's: then only a path from the root is found
            elsewhere.enter_context(chdir(folder))
        return open_workbench(store.run)


def _draw(bench: Workbench, index: int, methods: list[str]) -> dict[str, str]:
    """Explain the predicted class of an image or text as the protocol lets the model see it."""
    sample = bench.data.load(index)
    if isinstance(bench.model, LoadedTextModel):
        assert isinstance(sample, Review)
        return _written(bench.model, sample, methods)
    assert not isinstance(sample, Review)
    preprocessing = resized(bench.model.preprocessing, bench.protocol.resize)
    explanation = explain(replace(bench.model, preprocessing=preprocessing), [sample.image], methods)
    return {method: _small(explanation.overlay(method)) for method in methods}


def _written(model: LoadedTextModel, sample: Review, methods: Sequence[str]) -> dict[str, str]:
    """The words around the highest one; those that people marked are underlined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is cut: the protocol says so
        explanation = explain_text(model, " ".join(sample.words), methods)
    marked = sample.rationale[places_of(sample, explanation.words[0])].tolist()
    return {method: excerpt(explanation, method, marked) for method in methods}


def _small(overlay: Image.Image) -> str:
    overlay.thumbnail((_SIDE, _SIDE))
    return picture(overlay, "")  # its name stands below
