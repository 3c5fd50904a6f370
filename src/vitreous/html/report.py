"""The report on explained photos: predictions, maps, curves, what the methods mean and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitreous.aggregate import AGGREGATIONS
from vitreous.errors import InputError
from vitreous.explanation import Explanation
from vitreous.html import page
from vitreous.html.chart import Line, line_chart, look_of, percent_axis, swatch
from vitreous.pictures.backdrop import Backdrop
from vitreous.pictures.captions import class_caption
from vitreous.pictures.data.curves import NO_CURVES, Curves, area
from vitreous.pictures.overlay import colour
from vitreous.spelling import parse

_PICTURE = 560  # pixels of the longer side: sharp in a card, and a page of a hundred photos can still be sent
_TOP = 5


@dataclass(frozen=True)
class Measured:
    """The curves of the maps for one class, and whether they go by patches or pixels."""

    curves: tuple[Curves, ...]
    by: str


def photo_section(name: str, photo: Image.Image | None, explanation: Explanation, measured: Sequence[Measured]) -> str:
    """Tell about one photo.

    Args:
        name: What it is called.
        photo: The photo before preprocessing; without it the explanation's own picture is drawn on.
        explanation: The explanation of this photo alone.
        measured: The curves for each explained class, in their order; empty where they were not asked for or the
            model has none, since its outputs are values.
    """
    backdrop = Backdrop.of(explanation, 0, photo).fitted(_PICTURE, _PICTURE)
    prefix = "" if explanation.class_names else "class "
    predicted = page.bars(
        (prefix + one.label.replace("_", " "), one.probability or 0.0, explanation.saying(one.class_index))
        for one in explanation.top(_TOP)
    )
    caption = f"{backdrop.name}. {page.escape(backdrop.note)}" if backdrop.note else backdrop.name
    shown = page.figure(page.picture(backdrop.photo, f"the {backdrop.name}"), caption)
    parts = [f'<section>\n<h2>{page.escape(name)}</h2>\n<div class="photo">{shown}{predicted}</div>\n']
    for target in range(explanation.classes_per_image):
        parts.append(f"<h3>Why {page.escape(class_caption(explanation, 0, target))}?</h3>\n")
        parts.append(_maps(backdrop, explanation, target))
        if measured:
            parts.append(curve_cards(measured[target]))
    if explanation.scale == "value":
        parts.append(no_curves())
    parts.append("</section>\n")
    return "".join(parts)


def methods_section(methods: Sequence[str], *, curves: bool = True) -> str:
    """Tell what each method means, in a sentence, and what curves mean where there are any."""
    items = "".join(
        f"<dt><code>{page.escape(method)}</code></dt><dd>{page.escape(meaning(method))}</dd>\n" for method in methods
    )
    measured = (
        '<p class="faint">Curves: the most relevant parts are deleted from the photo, or inserted into an empty one, '
        "and the model is asked again. A good map makes deletion fall early and insertion rise early.</p>\n"
    )
    return (
        f"<section>\n<h2>What the methods mean</h2>\n<dl>\n{items}</dl>\n{legend(methods)}"
        '<p class="faint">Every map fills its colours by itself: colours can be compared within a map, not between '
        "maps. Faded parts of a photo were not seen by the model, since its input is cropped.</p>\n"
        f"{measured if curves else ''}</section>\n"
    )


def making_section(provenance: Mapping[str, Any], command: str) -> str:
    """Tell how the page was made."""
    versions = provenance.get("versions", {})
    rows = [
        ("model", str(provenance.get("model"))),
        ("kind", f"{provenance.get('family')}, {provenance.get('model_class')}"),
        ("fingerprint", f"sha256 {provenance.get('fingerprint')}"),
        ("made", str(provenance.get("created"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    table = page.table(("", ""), rows)
    return f"<section>\n<h2>How this was made</h2>\n<pre>{page.escape(command)}</pre>\n{table}</section>\n"


def failures_section(failures: Mapping[str, str]) -> str:
    """Tell which photos could not be explained, and why."""
    if not failures:
        return ""
    items = "".join(f"<li>{page.escape(error)}</li>\n" for error in failures.values())
    return f"<section>\n<h2>Not explained</h2>\n<ul>\n{items}</ul>\n</section>\n"


def meaning(spelling: str) -> str:
    """Say what a method shows, and how its layers are combined where the spelling says so."""
    recipe = parse(spelling)
    sentences = [recipe.info.summary.replace("``", "")]
    named = spelling.partition(":")[0].split(".")[1:]
    sentences += [(AGGREGATIONS[name].__doc__ or "").strip().splitlines()[0] for name in named if name in AGGREGATIONS]
    if recipe.propagate:
        sentences.append("Spread by the average attention of the lower blocks.")
    return f"{' '.join(sentences)} ({recipe.info.paper}, {recipe.info.year})"


def _maps(backdrop: Backdrop, explanation: Explanation, target: int) -> str:
    cards = []
    for method in explanation.methods:
        caption = f"<code>{page.escape(method)}</code>"
        scores, signed = explanation.scores_of(method, 0, target), explanation.signed[method]
        try:
            drawn = backdrop.lay(scores, explanation.grid_of(method), signed=signed)
        except InputError as error:
            cards.append(page.figure(f"<p>{page.escape(error)}</p>", caption))
            continue
        alt = f"map of {method} for {explanation.label(0, target)}"
        cards.append(page.figure(page.picture(drawn, alt), caption))
    return f'<div class="grid">\n{"".join(cards)}</div>\n'


def no_curves() -> str:
    """Say why a model whose outputs are values has no curves."""
    return f'<p class="faint">{page.escape(NO_CURVES[:1].upper() + NO_CURVES[1:])}.</p>\n'


def curve_cards(measured: Measured) -> str:
    """Give the charts of deletion and insertion with the areas under the curves."""
    curves = measured.curves
    cards = []
    for kind, done in (("deletion", "deleted"), ("insertion", "inserted")):
        values = [one.deletion if kind == "deletion" else one.insertion for one in curves]
        lines = [
            Line(one.method, (100 * one.fractions).tolist(), (100 * line).tolist(), look_of(number))
            for number, (one, line) in enumerate(zip(curves, values, strict=True))
        ]
        chart = line_chart(
            lines,
            title=f"{kind} curves",
            across=percent_axis(f"{measured.by} {done} (%)"),
            up=percent_axis("probability of the class (%)"),
        )
        better = "low is better" if kind == "deletion" else "high is better"
        entries = "".join(
            f'<div class="entry">{swatch(number)} <code>{page.escape(one.method)}</code> '
            f"<span>{100 * area(one.fractions, line):.1f}</span></div>"
            for number, (one, line) in enumerate(zip(curves, values, strict=True))
        )
        cards.append(page.figure(chart, f"<b>{kind}</b>, area under the curve in %, {better}{entries}"))
    return f'<div class="grid charts">\n{"".join(cards)}</div>\n'


STYLE = """.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); margin-top: .9rem; }
.charts figure > svg { margin: 0 auto; }
.photo { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; }
.photo figure { flex: 1 1 16rem; max-width: 22rem; } .photo .bars { flex: 1 1 18rem; }
.entry { display: flex; gap: .45rem; align-items: center; } .entry svg { flex: none; }
.entry span { white-space: nowrap; }
dt { margin-top: .6rem; } dd { margin: 0 0 0 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 1rem 0; font-size: .9rem; }
.legend div { display: flex; gap: .5rem; align-items: center; }
.legend img { width: 9rem; height: .8rem !important; border-radius: .2rem; }
"""


def legend(methods: Sequence[str]) -> str:
    """Tell what the colours of the methods' maps mean."""
    signs = sorted({parse(method).signed for method in methods})
    return f'<div class="legend">{"".join(map(_ramp, signs))}</div>\n'


def _ramp(signed: bool) -> str:  # noqa: FBT001
    ramp = np.broadcast_to(np.linspace(-1.0 if signed else 0.0, 1.0, 144), (1, 144))
    image = Image.fromarray(np.ascontiguousarray(colour(ramp, signed=signed)[..., :3]))
    low, high = ("against the class", "for it") if signed else ("low", "high")
    return f"<div>{low} {page.picture(image, f'colours from {low} to {high}', exact=True)} {high}</div>"
