"""Compare images for ``vitreous similar`` and save what is found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import vitreous
from vitreous._utils.storage import atomic_file, atomic_folder, write_text
from vitreous.api.similarity import PatchMatch, SimilarImages
from vitreous.cli.explain_images import find_image_files
from vitreous.errors import ImageError, InputError, MethodError
from vitreous.explanation.views import display_maps
from vitreous.inputs.images import read_image
from vitreous.methods.spelling import parse
from vitreous.models.dual_encoder import load_dual_encoder
from vitreous.models.loaded import LoadedModel
from vitreous.models.loading import load_model
from vitreous.pictures.style import font, overlay
from vitreous.pictures.tiles import Row, Tile, tiled

_MATCH_METHOD = "decompx:layer=-1"
_NEIGHBOUR_METHODS = ("decompx.skipplus",)
_SIDE = 512  # pixels of the longer side of an image in the picture of a match
_GAP = 24
_COLOURS = ("#00e5ff", "#ffea00", "#76ff03", "#ff4081", "#ffffff", "#ff9100", "#b388ff", "#1de9b6")
_TILE = 230


@dataclass(frozen=True)
class SimilarRequest:
    """The options of one ``vitreous similar`` call."""

    image: str
    other: str
    model: str
    methods: Sequence[str] | None
    k: int
    pairs: int
    out: Path
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    image_size: tuple[int, int] | None = None
    device: str = "cpu"


def run(request: SimilarRequest) -> dict[str, Any]:
    """Compare an image with another one or with a folder, save the results and return them as JSON values."""
    for spelling in request.methods or ():
        parse(spelling)  # report a misspelled method before loading the model
    image = _one_file(request.image)
    files, _ = find_image_files(request.other)
    if os.path.isdir(request.other):  # noqa: PTH112  # does not raise on names that no file can have
        return _neighbours(request, image, files)
    if request.methods is not None and len(request.methods) != 1:
        raise MethodError(f"two images are matched by one method, not by {len(request.methods)}")
    return _match(request, image, files[0])


def _one_file(name: str) -> Path:
    files, skipped = find_image_files(name)
    if skipped is not None:
        raise ImageError(f"{name} is a folder: the first argument is one image, a folder is the second")
    return files[0]


def _load(request: SimilarRequest) -> LoadedModel:
    options: dict[str, Any] = {
        "mean": request.mean, "std": request.std, "image_size": request.image_size, "device": request.device,
    }  # fmt: skip
    if not request.model.startswith("open_clip/"):
        return load_model(request.model, **options)
    dual = load_dual_encoder(request.model, **options)
    model = dual.loaded(dual.model)
    assert isinstance(model, LoadedModel)  # what is loaded by name has its preprocessing
    return model


def _match(request: SimilarRequest, first: Path, second: Path) -> dict[str, Any]:
    images = [read_image(file) for file in (first, second)]
    model = _load(request)
    found = vitreous.match_patches(model, images[0], images[1], (request.methods or (_MATCH_METHOD,))[0])
    pairs = found.pairs(request.pairs)
    report = {
        "model": request.model,
        "method": found.method,
        "images": [str(first), str(second)],
        "similarity": found.similarity,
        "pairs": [{"first": list(a), "second": list(b), "score": score} for a, b, score in pairs],
        "maps": [
            scores.view(grid).tolist() for scores, grid in zip((found.first, found.second), found.grids, strict=True)
        ],
    }
    picture = draw_match(found, [model.preprocessing.displayed(image) for image in images], request.pairs)
    with atomic_folder(request.out, overwrite=True) as folder:
        picture.save(folder / "match.png")
        np.save(folder / "scores.npy", found.scores.cpu().numpy())
        write_text(folder / "match.json", json.dumps(report, indent=1))
    return {**report, "folder": str(request.out), "picture": str(request.out / "match.png")}


def draw_match(found: PatchMatch, images: Sequence[Image.Image], pairs: int) -> Image.Image:
    """Draw both images with their maps side by side, and numbered boxes around the patches that match best."""
    overlays = []
    for image, scores, grid in zip(images, (found.first, found.second), found.grids, strict=True):
        scale = _SIDE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        heatmap = display_maps(scores, grid, (size[1], size[0]), signed=True, smooth=True)
        overlays.append(overlay(image.resize(size), heatmap.cpu().numpy(), signed=True))
    starts = (0, overlays[0].width + _GAP)
    canvas = Image.new("RGB", (starts[1] + overlays[1].width, max(each.height for each in overlays)), "white")
    for left, each in zip(starts, overlays, strict=True):
        canvas.paste(each, (left, 0))
    draw = ImageDraw.Draw(canvas)
    for number, (*places, _) in enumerate(found.pairs(pairs)):
        ink = _COLOURS[number % len(_COLOURS)]
        boxes = [
            _box(place, grid, each.size, left)
            for place, grid, each, left in zip(places, found.grids, overlays, starts, strict=True)
        ]
        draw.line([*(((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes)], fill=ink, width=1)
        for box in boxes:
            draw.rectangle(box, outline=ink, width=2)
            draw.text((box[0] + 3, box[1] + 1), str(number + 1), fill=ink, font=font(14, bold=True))
    return canvas


def _box(
    place: tuple[int, int], grid: tuple[int, int], size: tuple[int, int], left: int
) -> tuple[float, float, float, float]:
    """The rectangle of a patch, given its row and column, in an image whose left edge is at ``left``."""
    height, width = size[1] / grid[0], size[0] / grid[1]
    x, y = left + place[1] * width, place[0] * height
    return (x, y, x + width - 1, y + height - 1)


def _neighbours(request: SimilarRequest, query: Path, files: Sequence[Path]) -> dict[str, Any]:
    if len(files) == 1 and files[0].resolve() == query.resolve():
        raise InputError(f"{request.other} holds no image besides {query.name}")
    model = _load(request)
    found = vitreous.similar(model, query, list(files), request.methods or _NEIGHBOUR_METHODS, k=request.k)
    report = {
        "model": request.model,
        "methods": list(found.query.methods),
        "image": str(query),
        "neighbours": [
            {"image": str(file), "similarity": similarity}
            for file, similarity in zip(found.files, found.similarities, strict=True)
        ],
    }
    found.query.save(request.out / "query", overwrite=True)
    found.neighbours.save(request.out / "neighbours", overwrite=True)
    picture = request.out / "neighbours.png"
    draw_neighbours(found, query.name).save(picture)
    with atomic_file(request.out / "neighbours.json") as draft:
        draft.write_text(json.dumps(report, indent=1))
    return {**report, "folder": str(request.out), "picture": str(picture)}


def draw_neighbours(found: SimilarImages, name: str) -> Any:
    """Draw a row for every neighbour: the query and the neighbour, with the maps of every method."""
    methods = found.query.methods
    rows = [
        Row(
            [
                tile
                for method in methods
                for tile in (
                    Tile(found.query.overlay(method, 0, number), name),
                    Tile(found.neighbours.overlay(method, number), file.name),
                )
            ],
            f"{file.name}: cosine {similarity:.3f}",
        )
        for number, (file, similarity) in enumerate(zip(found.files, found.similarities, strict=True))
    ]
    headings = [heading for method in methods for heading in (method, "")] if len(methods) > 1 else []
    return tiled(rows, tile=_TILE, headings=headings)
