"""Pieces of the page as HTML: predictions, maps, rows, curves, the methods' papers, and how far work has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from vitreous.cost import EXAMPLE_DEPTH
from vitreous.errors import InputError
from vitreous.html import page
from vitreous.html.report import Measured, curve_cards, legend, meaning, no_curves
from vitreous.methods import list_methods
from vitreous.methods.registry import FAMILIES, MethodInfo
from vitreous.outputs import percent
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.curves import Curves
from vitreous.spelling import parse
from vitreous.web.depths import at_depth
from vitreous.web.drawing import Sliders, backdrop_of, draw_map, draw_rows
from vitreous.web.findings import Findings
from vitreous.web.jobs import Job
from vitreous.web.record import Record
from vitreous.web.rows import BlockRows
from vitreous.web.wanted import Wanted, classes_of

_TOP = 5


def predictions(record: Findings[Any]) -> str:
    """Give the most likely classes with bars."""
    assert record.sample is not None
    prefix = "" if record.sample.class_names else "class "
    rows = [
        (prefix + one.label.replace("_", " "), one.probability or 0.0, record.sample.format_output(one.class_index))
        for one in record.sample.top(_TOP)
    ]
    return f"<h2>What the model says</h2>{page.bars(rows)}"


def no_predictions() -> str:
    """Give what stands there before there is a photo."""
    return '<h2>What the model says</h2><p class="vitreous-faint">Nothing yet.</p>'


def maps(record: Record, wanted: Wanted, sliders: Sliders) -> str:
    """Give the maps side by side, a row for each class."""
    backdrop = backdrop_of(record)
    parts = []
    for class_index in classes_of(wanted, record):
        cards = [_map_card(record, method, class_index, wanted, sliders, backdrop) for method in wanted.methods]
        caption = page.escape(record.caption(class_index))
        parts.append(f'<h3>Why {caption}?</h3>\n<div class="vitreous-grid">{"".join(cards)}</div>\n')
    parts.append(legend(wanted.methods))
    return "".join(parts)


def patch_rows(record: Record, rows: BlockRows, patch: tuple[int, int]) -> str:
    """Give what a patch draws on."""
    backdrop = backdrop_of(record)
    number = patch[0] * rows.grid[1] + patch[1]
    own, all_patches = float(rows.attention[number, number]), float(rows.attention[number].sum())
    captions = {
        "attention": f"<b>attention</b>, averaged over heads: {percent(own)} to itself, "
        f"{percent(max(0.0, all_patches - own))} to other patches, "
        f"{percent(max(0.0, 1 - all_patches))} to class and register tokens",
        "contribution": "<b>contribution</b>: how long the vectors are that attention brings from each patch "
        "(<code>attin</code>)",
    }
    cards = [
        _figure(picture, captions[name], f"{name} of patch {patch[0]}, {patch[1]} in block {rows.block}")
        for name, picture in draw_rows(rows, patch, backdrop).items()
    ]
    if rows.contribution is None:
        cards.append("<p>Contributions cannot be read from this model: its attention has no plain projection.</p>")
    where = f"Block {rows.block}: what the patch in row {patch[0]}, column {patch[1]} draws on"
    return f'<h3>{where}</h3>\n<div class="vitreous-grid">{"".join(cards)}</div>'


def curves(record: Record, wanted: Wanted, found: Sequence[Sequence[Curves]]) -> str:
    """Give the charts of deletion and insertion for every class, or say why there are none."""
    if not record.has_curves:
        return no_curves()
    parts = [
        f"<h3>{page.escape(record.caption(class_index))}</h3>{curve_cards(Measured(tuple(lines), record.by))}"
        for class_index, lines in zip(classes_of(wanted, record), found, strict=True)
        if lines
    ]
    return f'<div class="vitreous-curves">{"".join(parts)}</div>'


def papers(family: str, *, texts: bool = False) -> str:
    """Give links to the papers of a family's methods."""
    links = [
        f'<a href="{page.escape(info.link)}" target="_blank" rel="noopener noreferrer" '
        f'title="{page.escape(info.citation)}">{page.escape(info.name)}</a>'
        for info in _offered(texts=texts)
        if info.family == family
    ]
    return f'<p class="vitreous-papers">Papers: {", ".join(links)}</p>'


def families(*, texts: bool = False) -> dict[str, list[tuple[str, str]]]:
    """Give the methods of every family, for ``texts`` those that need no picture.

    What they are called on the page with one line on each, and their names.
    """
    found: dict[str, list[tuple[str, str]]] = {family: [] for family in FAMILIES}
    for info in _offered(texts=texts):
        found[info.family].append((f"{info.name} — {info.summary.replace('``', '')}", info.name))
    return {family: members for family, members in found.items() if members}


def _offered(*, texts: bool) -> list[MethodInfo]:
    # Whether a picture is needed does not depend on the depth.
    return [info for info in list_methods() if not (texts and parse(info.name).needs(EXAMPLE_DEPTH).picture)]


def progress(job: Job, before: int) -> str:
    """Tell how far a piece of work is."""
    if job.cancelled:
        return status("Stopping …")
    if before and job.stage == "waiting":
        people = "1 other request" if before == 1 else f"{before} other requests"
        return f'<p class="vitreous-status" role="status">Waiting for {people} …</p>'
    counted = f", {job.asked} {job.things} asked" if job.asked > 1 and job.expected is None else ""
    about = "" if job.estimate is None else f", about {max(1, round(job.estimate))} s in all"
    text = f"{job.stage[:1].upper()}{job.stage[1:]}{counted}{about} …"
    value = "" if job.fraction is None else f' value="{job.fraction:.3f}"'
    return f'<p class="vitreous-status" role="status">{page.escape(text)}<progress max="1"{value}></progress></p>'


def status(text: str, *, error: bool = False) -> str:
    """Give a sentence for the visitor."""
    kind = ' class="vitreous-status vitreous-error" role="alert"' if error else ' class="vitreous-status" role="status"'
    return f"<p{kind}>{page.escape(text)}</p>"


def _map_card(
    record: Record, method: str, class_index: int, wanted: Wanted, sliders: Sliders, backdrop: BaseImage
) -> str:
    shown = method if wanted.depth is None else at_depth(method, wanted.depth, record.depth)
    note = "" if shown is not None else " <span>aggregates no blocks: the depth does not change it</span>"
    shown = shown or method
    caption = f'<code title="{page.escape(meaning(method))}">{page.escape(shown)}</code>{note}'
    if shown in record.failed:
        return page.figure(f"<p>{page.escape(record.failed[shown])}</p>", caption)
    try:
        picture = draw_map(record, shown, class_index, sliders, backdrop)
    except InputError as error:
        return page.figure(f"<p>{page.escape(error)}</p>", caption)
    return _figure(picture, caption, f"map of {shown} for {record.caption(class_index)}")


def _figure(picture: Image.Image, caption: str, alt: str) -> str:
    return page.figure(page.picture(picture, alt), caption)
