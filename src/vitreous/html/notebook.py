"""How an explanation shows itself in a notebook: a small comparison of its maps, and its predictions in a table."""

from __future__ import annotations

import io

from PIL import Image

from vitreous.explanation import Explanation
from vitreous.html.page import escape, picture
from vitreous.pictures.comparison import comparison

_MOST = 4  # images that are shown; an output cell is for a glance
_TILE = 150
_TOP = 3


def as_html(explanation: Explanation) -> str:
    """Give the first few images, each with its comparison where there is a picture, and what the model says."""
    shown = range(min(len(explanation), _MOST))
    parts = [_image(explanation, index) for index in shown]
    if len(explanation) > len(shown):
        parts.append(f"<p>… and {len(explanation) - len(shown)} more images</p>")
    return f"<div>{''.join(parts)}<p><small><code>{escape(repr(explanation))}</code></small></p></div>"


def as_png(explanation: Explanation) -> bytes | None:
    """Give the comparison of the first image, or nothing where there is no picture to draw on."""
    drawn = _comparison(explanation, 0)
    if drawn is None:
        return None
    stream = io.BytesIO()
    drawn.save(stream, format="PNG")
    return stream.getvalue()


def _image(explanation: Explanation, index: int) -> str:
    drawn = _comparison(explanation, index)
    maps = "" if drawn is None else picture(drawn, f"maps of image {index}", exact=True)
    explained = {explanation.class_index(index, number) for number in range(explanation.classes_per_image)}
    likely = explanation.top(_TOP, index=index)
    rows = "".join(
        f"<tr><td>{escape(label.replace('_', ' '))}</td><td>{explanation.saying(number, index)}</td>"
        f"<td>{'explained' if number in explained else ''}</td></tr>"
        for number, label, _ in likely
    )
    return f"{maps}<table><tr><th>class</th><th>{explanation.quantity}</th><th></th></tr>{rows}</table>"


def _comparison(explanation: Explanation, index: int) -> Image.Image | None:
    return None if explanation.images is None else comparison(explanation, index, tile=_TILE)
