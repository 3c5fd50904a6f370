"""What the scripts of the page are given: methods to choose from, and raw scores, which they draw."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from vitreous._utils.defaults import DEFAULT_OPACITY, PAPERS, RECIPE
from vitreous.errors import MethodError
from vitreous.explanation.trust import LIKELY, Trust, figures_of
from vitreous.inputs.model_io import percent
from vitreous.inputs.patch_geometry import plane
from vitreous.methods import list_methods
from vitreous.methods.registry import MethodInfo
from vitreous.methods.spelling import cost_of, parse
from vitreous.pictures.base_image import BaseImage
from vitreous.targets import Contrast
from vitreous.web.image_service import ImageInput
from vitreous.web.models import COMMON_NAMES, PROMPT_MODEL
from vitreous.web.requests import MAX_CLASSES, MAX_METHODS, ExplainRequest, at_depth
from vitreous.web.results import Example, ImageResults, PromptTarget, SimilarTarget, TargetKey, jpeg_url, thumbnail

RECOMMENDED = (RECIPE, "tokentm", "decompx.skipplus")
# Spellings besides the plain methods that the picker lists.
_RECIPES = (
    "decompx.skipplus",
    "decompx.skipplus.propagate",
    "gae.propagate",
    "gae:rule=libra",
    "tokentm:rule=libra",
    "attcat:rule=libra",
    "fullgrad_plus:rule=libra",
    "fullgrad_plus.skipplus",
    "alti.skipplus",
    "ixg.skipplus",
)
_PRESETS = (
    ("Recommended", RECOMMENDED, "One map for several purposes, beside two that measure nearly as well"),
    ("The papers", PAPERS, "TokenTM, GradToken and SkipPLUS"),
    ("Fast", ("gradtoken", "gradcam", "raw_attention", "rollout"), "At most a backward pass through the last block"),
    ("Signed", ("decompx", "attnlrp", "fullgrad_plus:rule=libra"), "What speaks for and what speaks against"),
    ("Black-box", ("occlusion", "rise:budget=300"), "Run the model on masked photos; slow"),
)
_SMALL_MAP = 4096  # scores that are sent as 32 bits each; maps of pixels take 16
_TOP_CLASSES = 5
_SHOWN_SIZE = 900  # pixels of the longer side of the photo that the page draws on


def page_config(examples: Sequence[Example]) -> dict[str, Any]:
    """Return what does not change while the page runs."""
    small = [(one, thumbnail(one.path)) for one in examples]
    return {
        "opacity": DEFAULT_OPACITY,
        "methods": list(RECOMMENDED),
        "catalogue": method_catalogue(),
        "examples": [
            {"name": one.path.name, "title": one.title, "credit": one.credit, "src": src} for one, src in small
        ],
        "tables": {name: _colours(signed=name == "signed") for name in ("signed", "unsigned")},
        "limits": {"questions": MAX_CLASSES},
        "promptModel": PROMPT_MODEL,
    }


@cache
def method_catalogue() -> dict[str, Any]:
    """Return all methods and presets for the picker."""
    methods = list_methods()
    spelled = [(info.name, info) for info in methods]
    spelled += [(recipe, parse(recipe).info) for recipe in _RECIPES]
    known = {info.name for info in methods}
    presets = [
        {"name": name, "methods": list(spellings), "hint": hint}
        for name, spellings, hint in _PRESETS
        if all(parse(spelling).info.name in known for spelling in spellings)
    ]
    rows = [describe_method(spelling, info) for spelling, info in spelled]
    for row in rows[len(methods) :]:
        row["family"] = "recipes"
    first = sorted(
        (row for row in rows if row["spelling"] in RECOMMENDED), key=lambda row: RECOMMENDED.index(row["spelling"])
    )
    rows = [row | {"family": "recommended"} for row in first] + [row for row in rows if row not in first]
    return {"methods": rows, "presets": presets, "limit": MAX_METHODS}


def describe_method(spelling: str, info: MethodInfo | None = None) -> dict[str, Any]:
    """Return what is known of a method before it runs."""
    info = info or parse(spelling).info
    cost = _cost_label(spelling)
    return {
        "spelling": spelling,
        "family": info.family,
        "summary": info.summary.replace("``", ""),
        "paper": info.paper,
        "author": info.paper.partition(",")[0],
        "year": info.year,
        "citation": info.citation,
        "link": info.link,
        "cost": cost,
        "speed": "slow" if cost == "many runs" else "fast" if "backward" not in cost else "usual",
        "signed": info.signed,
        "classSpecific": info.class_specific,
    }


def _cost_label(spelling: str) -> str:
    try:
        return cost_of(spelling).label
    except MethodError:  # a block that a model with twelve blocks does not have
        return ""


def _colours(*, signed: bool) -> list[int]:
    """Return 256 colours, red, green and blue after each other."""
    if signed:
        # Bright on both sides: weak scores are transparent, so there is no dark middle to look through.
        stops = np.array([[9, 74, 178], [43, 125, 224], [92, 190, 255], [255, 170, 90], [240, 85, 45], [178, 16, 16]])
        places = np.linspace(0, 1, 256)
        at = [0.0, 0.25, 0.499, 0.501, 0.75, 1.0]
        table = np.stack([np.interp(places, at, stops[:, channel]) for channel in range(3)], axis=-1)
        return [int(one) for one in np.rint(table).astype(int).ravel()]
    from matplotlib import colormaps  # noqa: PLC0415  # slow to import

    table = colormaps["inferno"](np.linspace(0, 1, 256))[:, :3]
    return [int(one) for one in np.rint(255 * table).astype(int).ravel()]


def view_of(
    results: ImageResults,
    photo: ImageInput,
    request: ExplainRequest,
    *,
    reads_text: bool,
    credit: str = "",
    trust: Trust | None = None,
) -> dict[str, Any]:
    """Return everything that the page shows of an image."""
    sample = results.sample
    assert sample is not None
    base = BaseImage.of(sample, 0, results.photo.picture)
    largest = max(base.photo.size)
    base = base if largest <= _SHOWN_SIZE else base.fitted(_SHOWN_SIZE, _SHOWN_SIZE)
    frame, grid = base.frame, plane(sample.grid)
    targets = request.targets_for(results)
    methods = [_method(method, request, results) for method in request.methods]
    return {
        "photo": {
            "name": photo.upload.name,
            "src": jpeg_url(base.photo, 90),
            "width": base.photo.width,
            "height": base.photo.height,
            "frame": [frame.left, frame.top, frame.right, frame.bottom],
            "credit": credit,
        },
        "grid": list(grid),
        "edges": _edges(base, grid),
        "model": {
            "name": photo.model,
            "knows": knowledge(photo.model, results, reads_text=reads_text),
            "names": results.class_names(),
            "text": reads_text,
        },
        "blocks": results.depth,
        "depth": request.depth,
        "predictions": predictions_of(results),
        "warning": warning_of(results),
        "questions": [_question(results, target) for target in targets],
        "methods": methods,
        "maps": [[map_of(results, method["shown"], target) for method in methods] for target in targets],
        "trust": None if trust is None else trust_of(trust),
        "measureTrust": photo.model == "demo" and isinstance(targets[0], int),  # a few seconds
    }


def knowledge(model: str, results: ImageResults, *, reads_text: bool) -> str:
    """Say what a model can tell apart."""
    count = len(results.class_names())
    if reads_text:
        return f"compares photos with any text; the bars are {len(COMMON_NAMES)} common names"
    if model == "demo":
        return f"knows {count} breeds of cats and dogs, and nothing else"
    assert results.sample is not None
    if results.sample.scale == "value":
        return f"has {count} output{'s' if count > 1 else ''}, which are values"
    return f"knows {count:,} classes" + ("" if results.sample.class_names else ", whose names are not known")


def warning_of(results: ImageResults) -> str:
    """Warn where no class fits; empty otherwise."""
    assert results.sample is not None
    top = results.sample.top(1)[0]
    if top.probability is None or top.probability >= LIKELY or results.sample.logits.shape[1] < 2:
        return ""
    return (
        f"No class fits: the most probable one has {percent(top.probability)}. The photo may show nothing that this "
        "model knows, and the maps explain a guess."
    )


def predictions_of(results: ImageResults) -> list[dict[str, Any]]:
    """Return the most probable classes, the most probable first."""
    assert results.sample is not None
    names = results.class_names()
    return [
        {
            "index": one.class_index,
            "label": names[one.class_index],
            "value": one.probability,
            "text": results.sample.format_output(one.class_index),
        }
        for one in results.sample.top(_TOP_CLASSES)
    ]


def map_of(results: ImageResults, method: str, target: TargetKey) -> dict[str, Any]:
    """Return the raw scores of one map, or why there is none."""
    reason = results.reason(method, target)
    if reason is not None:
        return {"failed": reason}
    assert results.sample is not None
    scores = results.scores[method, target]
    if not bool(scores.isfinite().all()):
        return {"failed": "The scores of this map are not finite, so that it cannot be drawn."}
    low, high = float(scores.min()), float(scores.max())
    rows, columns = results.sample.grid_for(scores)
    kind, data = _encoded(scores, low, high)
    return {
        "rows": rows,
        "columns": columns,
        "type": kind,
        "data": data,
        "low": low,
        "high": high,
        "signed": results.signed[method],
        "constant": low == high,
    }


def trust_of(found: Trust) -> dict[str, Any]:
    """Return what the card shows of a measurement."""
    return {
        "verdict": found.verdict,
        "sentence": found.sentence.removeprefix(f"Trust: {found.verdict}. "),  # which the badge says
        "method": found.method,
        "target": found.target_name.replace("_", " "),
        "figures": figures_of(found),
        "notes": list(found.notes),
    }


def _method(method: str, request: ExplainRequest, results: ImageResults) -> dict[str, Any]:
    shown = method if request.depth is None else at_depth(method, request.depth, results.depth)
    note = "" if shown is not None else "the depth has no effect"
    return describe_method(method) | {"shown": shown or method, "note": note}


def _question(results: ImageResults, target: TargetKey) -> dict[str, Any]:
    computed = isinstance(target, int) or target in results.objects
    label = results.label(target) if computed else str(target)
    found: dict[str, Any] = {"key": target_json(target), "label": label, "text": "", "title": f"Why {label}?"}
    if isinstance(target, PromptTarget):
        found |= {"label": target.text, "title": f"Where is “{target.text}”?"}
    elif isinstance(target, SimilarTarget):
        name = target.upload.name
        found |= {
            "label": f"similar to {name}",
            "title": f"Why similar to {name}?",
            "thumb": thumbnail(target.upload.path),
        }
    if computed:
        found["text"] = _value_text(results, target)
    return found


def _value_text(results: ImageResults, target: TargetKey) -> str:
    text = results.value(target)
    if isinstance(target, Contrast):
        return f"logits differ by {text}"
    if isinstance(target, PromptTarget):
        return f"score {text}"
    return f"cosine {text}" if isinstance(target, SimilarTarget) else text


def target_json(target: TargetKey) -> Any:
    """Return a target as the page spells it."""
    if isinstance(target, Contrast):
        return {"kind": "contrast", "a": target.index, "b": target.other}
    if isinstance(target, PromptTarget):
        return {"kind": "prompt", "text": target.text}
    return {"kind": "similar"} if isinstance(target, SimilarTarget) else target


def _edges(base: BaseImage, grid: tuple[int, int]) -> dict[str, list[tuple[float, float]] | None]:
    """Return where patches begin and end, in parts of what the model sees; ``None`` for equal cells."""
    if base.geometry is None:
        return {"rows": None, "columns": None}
    rows, columns = ([base.geometry.cell(axis, number) for number in range(grid[axis])] for axis in (0, 1))
    return {"rows": rows, "columns": columns}


def _encoded(scores: Tensor, low: float, high: float) -> tuple[str, str]:
    values = scores.reshape(-1).double().numpy()
    if values.size <= _SMALL_MAP:
        return "f4", base64.b64encode(values.astype("<f4").tobytes()).decode()
    steps = np.rint((values - low) / (high - low or 1.0) * 65535).astype("<u2")
    return "u2", base64.b64encode(steps.tobytes()).decode()
