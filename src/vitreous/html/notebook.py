"""Explanations in notebooks: a small comparison of the maps, and the predictions in a table."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image

from vitreous._utils.storage import PNG_LEVEL
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import register_view
from vitreous.html.page import render
from vitreous.pictures.comparison import comparison

_MOST = 4  # images in an output cell
_TILE = 150
_TOP = 3


@dataclass(frozen=True)
class _Shown:
    """One image: its comparison if it has a picture, and rows of class, output and whether it is explained."""

    drawn: Image.Image | None
    alt: str
    rows: list[tuple[str, str, bool]]


@register_view(Explanation, "notebook:html")
def as_html(explanation: Explanation) -> str:
    """Show the first few images, each with its comparison if it has a picture, and its predictions."""
    shown = [_shown(explanation, index) for index in range(min(len(explanation), _MOST))]
    return render(
        "notebook.html",
        images=shown,
        more=len(explanation) - len(shown),
        quantity=explanation.quantity,
        text=repr(explanation),
    )


@register_view(Explanation, "notebook:png")
def as_png(explanation: Explanation) -> bytes | None:
    """Draw the comparison of the first image, or nothing without a picture to draw on."""
    drawn = _comparison(explanation, 0)
    if drawn is None:
        return None
    stream = io.BytesIO()
    drawn.save(stream, format="PNG", compress_level=PNG_LEVEL)
    return stream.getvalue()


def _shown(explanation: Explanation, index: int) -> _Shown:
    explained = {explanation.class_index(index, number) for number in range(explanation.classes_per_image)}
    rows = [
        (label.replace("_", " "), explanation.format_output(number, index), number in explained)
        for number, label, _ in explanation.top(_TOP, index=index)
    ]
    return _Shown(_comparison(explanation, index), f"maps of image {index}", rows)


def _comparison(explanation: Explanation, index: int) -> Image.Image | None:
    return None if explanation.images is None else comparison(explanation, index, tile=_TILE)
