"""Rendering: maps as pictures, parts of the page as HTML, downloads as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous._utils.storage import write_text
from vitreous.errors import InputError
from vitreous.explanation.folder import arrays_of
from vitreous.html import page, report
from vitreous.html import words as words_html
from vitreous.inputs.model_io import percent
from vitreous.methods import list_methods
from vitreous.methods.registry import FAMILIES, MethodInfo
from vitreous.methods.spelling import EXAMPLE_DEPTH, parse
from vitreous.pictures import Look
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.curves import Curves
from vitreous.pictures.style import strongest_word_colour
from vitreous.pictures.tiles import SHARPNESS, Row, Tile, tiled
from vitreous.text.explanation import By, TextExplanation
from vitreous.web.image_service import ImageInput, explained_classes, shown_methods
from vitreous.web.requests import ExplainRequest
from vitreous.web.results import BlockRows, ImageResults, ResultCache, TargetKey, TextResults

Sign = Literal["both", "for", "against"]
SIGNS: tuple[Sign, ...] = get_args(Sign)
MAP_SIZE = 420  # pixels of the longer side of a map on the page
_DOWNLOAD_SIZE = 260  # of a map in the downloaded picture
_TOP_CLASSES = 5
_TOP_WORDS = 6

NO_TEXT_MODEL = (
    '<div class="v-how"><h3>Which words of a text explain its class?</h3>'
    "<p>Text models need the transformers library. Install it and start the page again:</p>"
    '<pre><code>pip install "vitreous[hf]"\nvitreous serve</code></pre>'
    "<p class='v-faint'>The shipped classifier demo-text tells praise of films from blame; "
    "<code>--text-model hf/FOLDER</code> or <code>hf/ID</code> takes another one.</p></div>"
)
NO_PREDICTION = '<h2>Prediction</h2><p class="vitreous-faint">None yet.</p>'


@dataclass(frozen=True)
class DisplaySettings:
    """How maps are drawn; changing it does not run the model.

    Attributes:
        opacity: Of the colours over the grey image, from 0 to 1.
        sign: Which scores are shown of signed maps.
        threshold: The fraction of the largest score below which scores are hidden, from 0 to 1.
        smooth: Interpolate between patches; otherwise patches are rectangles.
    """

    opacity: float = DEFAULT_OPACITY
    sign: Sign = "both"
    threshold: float = 0.0
    smooth: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.opacity <= 1 and 0 <= self.threshold <= 1 and self.sign in SIGNS):
            raise InputError("Opacity and threshold must be between 0 and 1, and the sign both, for or against.")


# Pictures.


def filter_scores(scores: Tensor, *, signed: bool, settings: DisplaySettings) -> Tensor:
    """Hide scores below the threshold or of the other sign: set them to 0, or to the minimum if unsigned."""
    if not signed:
        low, high = scores.min(), scores.max()
        return torch.where(scores >= low + settings.threshold * (high - low), scores, low)
    kept = scores.abs() >= settings.threshold * scores.abs().max()
    if settings.sign != "both":
        kept &= scores > 0 if settings.sign == "for" else scores < 0
    return torch.where(kept, scores, torch.zeros_like(scores))


def base_image(results: ImageResults, size: int = MAP_SIZE) -> BaseImage:
    """Return the image to draw on."""
    assert results.sample is not None
    return BaseImage.of(results.sample, 0, results.photo.picture).fitted(size, size)


def draw_map(
    results: ImageResults, method: str, target: TargetKey, settings: DisplaySettings, base: BaseImage
) -> Image.Image:
    """Draw one map. The colour scale is that of the unfiltered map, so that colours keep their meaning.

    Raises:
        InputError: the scores are not finite.
    """
    assert results.sample is not None
    scores, signed = results.scores[method, target], results.signed[method]
    shown = filter_scores(scores, signed=signed, settings=settings)
    span = (float(scores.min()), float(scores.max()))
    look = Look(smooth=settings.smooth, opacity=settings.opacity)
    return base.lay(shown, results.sample.grid_for(scores), signed=signed, look=look, span=span)


def patch_at(base: BaseImage, grid: tuple[int, int], x: float, y: float) -> tuple[int, int]:
    """Return row and column of the patch at a point of the drawn image, or the nearest one."""
    frame, geometry = base.frame, base.geometry
    relative = (y - frame.top) / (frame.bottom - frame.top), (x - frame.left) / (frame.right - frame.left)
    row, column = (
        place * grid[axis] if geometry is None else float(geometry.positions(axis, torch.tensor(place)))
        for axis, place in enumerate(relative)
    )
    return min(max(int(row), 0), grid[0] - 1), min(max(int(column), 0), grid[1] - 1)


def mark_patch(picture: Image.Image, base: BaseImage, grid: tuple[int, int], patch: tuple[int, int]) -> Image.Image:
    """Draw an outline around a patch."""
    frame, geometry = base.frame, base.geometry
    height, width = frame.bottom - frame.top, frame.right - frame.left
    down, across = height / grid[0], width / grid[1]
    top, left = frame.top + patch[0] * down, frame.left + patch[1] * across
    if geometry is not None:
        rows, columns = (geometry.cell(axis, number) for axis, number in enumerate(patch))
        top, left = frame.top + rows[0] * height, frame.left + columns[0] * width
        down, across = (rows[1] - rows[0]) * height, (columns[1] - columns[0]) * width
    marked = picture.copy()
    draw = ImageDraw.Draw(marked)
    draw.rectangle((left - 2, top - 2, left + across + 1, top + down + 1), outline="#000000", width=1)
    draw.rectangle((left - 1, top - 1, left + across, top + down), outline="#ffffff", width=2)
    return marked


def draw_rows(rows: BlockRows, patch: tuple[int, int], base: BaseImage) -> dict[str, Image.Image]:
    """Draw the attention and the contribution of all patches to one patch."""
    number = patch[0] * rows.grid[1] + patch[1]
    matrices = {"attention": rows.attention, "contribution": rows.contribution}
    return {
        name: mark_patch(base.lay(matrix[number], rows.grid, signed=False), base, rows.grid, patch)
        for name, matrix in matrices.items()
        if matrix is not None
    }


# HTML.


def status_html(text: str, *, error: bool = False, progress: float | None = None) -> str:
    """Render a status line, with a bar where ``progress`` is known."""
    kind = ' class="vitreous-status vitreous-error" role="alert"' if error else ' class="vitreous-status" role="status"'
    bar = "" if progress is None else f'<progress value="{progress:.3f}" aria-label="progress"></progress>'
    return f"<p{kind}>{page.escape(text)}{bar}</p>"


def predictions_html(results: ResultCache[Any]) -> str:
    """Render the most probable classes as bars."""
    assert results.sample is not None
    prefix = "" if results.sample.class_names else "class "
    rows = [
        (prefix + one.label.replace("_", " "), one.probability or 0.0, results.sample.format_output(one.class_index))
        for one in results.sample.top(_TOP_CLASSES)
    ]
    return f"<h2>Prediction</h2>{page.bars(rows)}"


def rows_html(results: ImageResults, rows: BlockRows, patch: tuple[int, int]) -> str:
    """Render what a patch attends to."""
    number = patch[0] * rows.grid[1] + patch[1]
    own, all_patches = float(rows.attention[number, number]), float(rows.attention[number].sum())
    captions = {
        "attention": f"<b>attention</b>, averaged over heads: {percent(own)} to itself, "
        f"{percent(max(0.0, all_patches - own))} to other patches, "
        f"{percent(max(0.0, 1 - all_patches))} to class and register tokens",
        "contribution": "<b>contribution</b>: norm of the vector that attention carries from each patch "
        "(<code>attin</code>)",
    }
    cards = [
        _figure(picture, captions[name], f"{name} of patch {patch[0]}, {patch[1]} in block {rows.block}")
        for name, picture in draw_rows(rows, patch, base_image(results)).items()
    ]
    if rows.contribution is None:
        cards.append("<p>Contributions are not available: this model's attention has no linear output projection.</p>")
    title = f"Block {rows.block}: what the patch in row {patch[0]}, column {patch[1]} attends to"
    return f'<h3>{title}</h3>\n<div class="vitreous-grid">{"".join(cards)}</div>'


def curves_html(results: ImageResults, request: ExplainRequest, found: Sequence[Sequence[Curves]]) -> str:
    """Render the deletion and insertion charts of every class, or why there are none."""
    if not results.has_curves:
        return report.no_curves()
    parts = [
        f"<h3>{page.escape(results.caption(class_index))}</h3>"
        + report.curve_cards(report.Measured(tuple(lines), results.by))
        for class_index, lines in zip(explained_classes(results, request), found, strict=True)
        if lines
    ]
    return f'<div class="vitreous-curves">{"".join(parts)}</div>'


def text_html(results: TextResults, request: ExplainRequest, by: By) -> str:
    """Render the text coloured by every method, classes side by side."""
    classes = request.targets_for(results)
    shown = [method for method in request.methods if (method, "class") not in results.failed]
    explanation = results.explanation(shown, classes) if shown else None
    parts = [
        f'<p class="vitreous-faint">{_truncation_note(results)}</p>' if results.used_tokens < results.tokens else ""
    ]
    for method in request.methods:
        parts.append(f'<h3><code title="{page.escape(report.meaning(method))}">{page.escape(method)}</code></h3>\n')
        if explanation is None or (method, "class") in results.failed:
            parts.append(f"<p>{page.escape(results.failed[method, 'class'])}</p>\n")
            continue
        cards = [_text_card(results, explanation, method, number, by) for number in range(len(classes))]
        parts.append(f'<div class="vitreous-grid vitreous-texts">{"".join(cards)}</div>\n')
    legend = words_html.legend(explanation, word_colour) if explanation else ""
    return f'<div class="vitreous-words">{legend}{"".join(parts)}</div>'


def word_colour(strength: float, /, *, signed: bool) -> str:
    """Return a translucent colour that works on light and dark backgrounds."""
    red, green, blue = strongest_word_colour(strength, signed=signed)
    return f"rgb({red} {green} {blue} / calc({min(1.0, abs(strength)):.3f} * var(--vitreous-strength)))"


def papers_html(family: str, *, texts: bool = False) -> str:
    """Render links to the papers of a family's methods."""
    links = [
        f'<a href="{page.escape(info.link)}" target="_blank" rel="noopener noreferrer" '
        f'title="{page.escape(info.citation)}">{page.escape(info.name)}</a>'
        for info in _offered_methods(texts=texts)
        if info.family == family
    ]
    return f'<p class="vitreous-papers">Papers: {", ".join(links)}</p>'


def method_families(*, texts: bool = False) -> dict[str, list[tuple[str, str]]]:
    """Return label and name of the methods of every family; for ``texts``, of those that need no image."""
    found: dict[str, list[tuple[str, str]]] = {family: [] for family in FAMILIES}
    for info in _offered_methods(texts=texts):
        found[info.family].append((f"{info.name} — {info.summary.replace('``', '')}", info.name))
    return {family: members for family, members in found.items() if members}


# Downloads.


def save_png(
    results: ImageResults, photo: ImageInput, request: ExplainRequest, settings: DisplaySettings, folder: Path
) -> Path:
    """Write the maps as they are shown, as one picture."""
    methods = _downloaded_methods(results, request)
    base = base_image(results, _DOWNLOAD_SIZE * SHARPNESS)
    rows = [
        Row(
            [
                Tile(base.photo, results.caption(class_index)),
                *(Tile(draw_map(results, method, class_index, settings, base)) for method in methods),
            ]
        )
        for class_index in request.targets_for(results)
    ]
    signs = sorted({results.signed[method] for method in methods})
    picture = tiled(rows, tile=_DOWNLOAD_SIZE, headings=("photo", *methods), legend=signs)
    return picture.save(folder / _file_name(photo, "png"))


def save_npz(results: ImageResults, photo: ImageInput, request: ExplainRequest, folder: Path) -> Path:
    """Write raw scores, classes and logits, as ``Explanation.save`` does."""
    explanation = results.explanation(_downloaded_methods(results, request), request.targets_for(results))
    file = folder / _file_name(photo, "npz")
    np.savez(file, **arrays_of(explanation))
    return file


def save_report(
    results: ImageResults,
    photo: ImageInput,
    request: ExplainRequest,
    found: Sequence[Sequence[Curves]],
    folder: Path,
) -> Path:
    """Write a self-contained HTML report about the image."""
    methods = _downloaded_methods(results, request)
    explanation = results.explanation(methods, request.targets_for(results))
    # Of targets that are no classes there are no curves.
    measured = [report.Measured(tuple(curves), results.by) for curves in found] if results.has_curves else []
    measured = measured if len(measured) == explanation.classes_per_image else []
    command = f"vitreous serve: {photo.model}, {', '.join(methods)}"
    body = (
        report.photo_section(photo.upload.name, results.photo.picture, explanation, measured)
        + report.methods_section(methods, curves=results.has_curves)
        + report.provenance_section(explanation.provenance, command)
    )
    file = folder / _file_name(photo, "html")
    write_text(file, page.document("Why did the model say this?", body, style=report.STYLE))
    return file


def save_text_report(results: TextResults, request: ExplainRequest, by: By, folder: Path) -> Path:
    """Write the coloured text as an HTML page."""
    methods = [method for method in request.methods if (method, "class") not in results.failed]
    if not methods:
        raise InputError("There is no explanation to download.")
    file = folder / "vitreous-text.html"
    write_text(file, results.explanation(methods, request.targets_for(results)).html(by=by))
    return file


def _downloaded_methods(results: ImageResults, request: ExplainRequest) -> list[str]:
    methods = list(dict.fromkeys(shown_methods(results, request)))
    if not methods:
        raise InputError("There is no map to download.")
    return methods


def _file_name(photo: ImageInput, suffix: str) -> str:
    """Name a file after the user's name of the image, reduced to safe characters."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(photo.upload.name).stem).strip("-")[:60]
    return f"vitreous-{stem or 'photo'}.{suffix}"


def _figure(picture: Image.Image, caption: str, alt: str) -> str:
    return page.figure(page.picture(picture, alt), caption)


def _text_card(results: TextResults, explanation: TextExplanation, method: str, number: int, by: By) -> str:
    caption = f"Why {page.escape(results.caption(explanation.class_index(0, number)))}?"
    text = words_html.coloured(explanation, method, 0, number, by, word_colour)
    listed = explanation.shows(method, 0, number, by=by) and not explanation.is_flat(method, 0, number, by=by)
    strongest = _top_words(explanation, method, number, by) if listed else ""
    return f"<figure><figcaption>{caption}</figcaption>{text}{strongest}</figure>\n"


def _top_words(explanation: TextExplanation, method: str, number: int, by: By) -> str:
    """List the words with the largest scores, readable without colours and without a pointer."""
    shown = explanation.display_scores(method, 0, number, by=by).tolist()
    signed = explanation.signed[method]
    items = "".join(
        f'<li><span dir="auto" style="background: {word_colour(shown[word], signed=signed)}">'
        f"{page.escape(explanation.words[0][word].text[:40])}</span> "
        f'<span class="number">{score:{"+" if signed else ""}.3g}</span></li>'
        for word, score in explanation.strongest(method, 0, number, by=by, count=_TOP_WORDS)
    )
    return f'<ol class="vitreous-strongest" aria-label="strongest words">{items}</ol>'


def _truncation_note(results: TextResults) -> str:
    return (
        f"The text has {results.tokens:,} tokens; the model reads the first {results.used_tokens:,}. "
        "Windows explain all of it."
    )


def _offered_methods(*, texts: bool) -> list[MethodInfo]:
    # Whether an image is needed does not depend on the depth.
    return [info for info in list_methods() if not (texts and parse(info.name).needs(EXAMPLE_DEPTH).picture)]
