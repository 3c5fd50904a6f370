"""Small pictures of images with their maps, made again from the data set and the model where these are at hand."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import replace

from PIL import Image

from vitreous.benchmark.measuring import resized
from vitreous.benchmark.report.extremes import Extremes
from vitreous.benchmark.results import Results
from vitreous.benchmark.workbench import Workbench, open_workbench
from vitreous.errors import VitreousError
from vitreous.explaining import explain

_SIDE = 132
_QUALITY = 80

Thumbnails = Mapping[tuple[str, int], str]


def thumbnails_of(results: Results, extremes: Iterable[Extremes]) -> tuple[Thumbnails, str | None]:
    """Pictures by method and image as ``data:`` addresses, and why some or all of them are missing."""
    try:
        benches = {number: open_workbench(store.run) for number, store in enumerate(results.stores)}
    except VitreousError as error:
        return {}, str(error)
    methods: dict[tuple[int, int], list[str]] = {}
    for each in extremes:
        for image in (*each.best, *each.worst):
            methods.setdefault((results.run_of(each.method), image.index), []).append(each.method)
    pictures: dict[tuple[str, int], str] = {}
    problem = None
    for (number, index), asked in methods.items():
        try:
            drawn = _draw(benches[number], index, asked)
        except VitreousError as error:
            problem = str(error)
        else:
            pictures |= {(method, index): address for method, address in drawn.items()}
    return pictures, problem


def _draw(bench: Workbench, index: int, methods: list[str]) -> dict[str, str]:
    """Explain the predicted class of an image as the protocol lets the model see it."""
    preprocessing = resized(bench.model.preprocessing, bench.protocol.resize)
    model = replace(bench.model, preprocessing=preprocessing)
    explanation = explain(model, [bench.data.load(index).image], methods)
    return {method: _address(explanation.overlay(method)) for method in methods}


def _address(picture: Image.Image) -> str:
    picture.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
