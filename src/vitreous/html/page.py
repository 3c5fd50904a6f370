"""The scaffold of every page: the Jinja2 environment, and the parts that pages share."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as _escape
from PIL import Image

from vitreous._utils.text import printable
from vitreous.pictures.colours import ramp

_RAMP = 144  # pixels across a legend


def render(template: str, **values: Any) -> str:
    """Render a template of ``vitreous/html/templates``; text is escaped, ``Markup`` is not."""
    return _environment().get_template(template).render(**values)


def macro(template: str, name: str, *arguments: Any) -> str:
    """Call one macro of a template."""
    return str(getattr(_environment().get_template(template).module, name)(*arguments))


def opening(title: str, *, heading: str | None = None, style: str | None = None) -> str:
    """Render a page up to its body.

    Args:
        title: Title of the page in the browser.
        heading: Heading of the page; its title by default.
        style: A style sheet among the templates, added to the common one.
    """
    return render("opening.html", title=title, heading=heading, style=style)


def closing() -> str:
    """Render the end of a page."""
    return render("closing.html")


def document(title: str, body: str, *, heading: str | None = None, style: str | None = None) -> str:
    """Render a whole page around a body that is already HTML; see ``opening``."""
    return render("page.html", title=title, heading=heading, style=style, body=Markup(body))  # noqa: S704


def escape(text: object) -> str:
    """Escape a text for HTML and for attributes; what UTF-8 cannot encode becomes a backslash escape."""
    return str(_escape(printable(str(text))))


def data_uri(content: bytes, kind: str) -> str:
    """Make a data URI; ``kind`` is the media type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture(image: Image.Image, alt: str, *, exact: bool = False) -> str:
    """Embed an image: as JPEG, which is a fifth of the size, or as PNG when ``exact``."""
    stream = io.BytesIO()
    if exact:
        image.save(stream, format="PNG")
    else:
        image.convert("RGB").save(stream, format="JPEG", quality=88)
    source = data_uri(stream.getvalue(), "image/png" if exact else "image/jpeg")
    return macro("macros.html", "picture", source, image.size, alt)


def figure(content: str, caption: str) -> str:
    """Render a card; content and caption are already HTML."""
    return macro("macros.html", "figure", Markup(content), Markup(caption))  # noqa: S704


def bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Render bars, each with a label, a length from 0 to 1 and a text after it."""
    return macro("macros.html", "bars", clipped(rows))


def clipped(rows: Iterable[tuple[str, float, str]]) -> list[tuple[str, float, str]]:
    """Clip the lengths of bars to 0 and 1."""
    return [(label, min(max(length, 0.0), 1.0), text) for label, length, text in rows]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table of texts; it scrolls on narrow screens."""
    return macro("macros.html", "table", headings, rows)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vitreous.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_encodable,
    )
    environment.filters["picture"] = lambda *given, **options: Markup(picture(*given, **options))  # noqa: S704
    environment.filters["ramp"] = lambda signed: ramp(_RAMP, signed=signed)
    return environment


def _encodable(value: object) -> object:
    """File names may hold bytes that UTF-8 cannot encode."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
