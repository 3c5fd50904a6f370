"""The scaffolding of a page: style for light and dark, narrow and wide; escaped text; pictures inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape as _escape

from PIL import Image

from vitreous.printable import printable

# A browser that honours this fetches nothing and runs nothing, whatever the page says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #5c5c5c; --paper: #ffffff; --card: #f6f6f7;
  --line: #dcdce0; --accent: #0067a3; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --faint: #a8a8ad; --paper: #141416; --card: #1e1e21;
  --line: #3a3a40; --accent: #63b7ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.25rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; } a { color: var(--accent); } code { font-size: .92em; }
img { display: block; }
.faint { color: var(--faint); font-size: .9rem; }
.grid { display: grid; gap: .9rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
figure { margin: 0; padding: .6rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
figure img { margin: 0 auto; border-radius: .25rem; }
figcaption { margin-top: .45rem; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .95rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); }
th, td:first-child { overflow-wrap: normal; }
.bars { display: grid; grid-template-columns: fit-content(45%) 1fr 4rem; gap: .3rem .75rem; max-width: 36rem;
  align-items: center; margin: .5rem 0; padding: 0; }
.bar { height: .7rem; border-radius: .35rem; background: var(--card); border: 1px solid var(--line); overflow: hidden; }
.bar span { display: block; height: 100%; background: var(--accent); }
.bars .number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; margin: .5rem 0;
  white-space: pre-wrap; font-size: .88rem; }
nav ul { columns: 16rem; padding-left: 1.2rem; }
svg { max-width: 100%; height: auto; display: block; }
""".strip()

_FLUID = "max-width: 100%; height: auto"  # also in pages that are not ours, such as notebooks

CLOSING = "</main>\n</body>\n</html>\n"


def opening(title: str, *, heading: str | None = None, style: str = "") -> str:
    """Give the page up to where its body is written.

    Args:
        title: what the browser calls the page.
        heading: what stands above it; its title where it has no other.
        style: what is added to the common style.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{_STYLE}\n{style}</style>\n'
        f"</head>\n<body>\n<main>\n<h1>{escape(heading or title)}</h1>\n"
    )


def document(title: str, body: str, *, heading: str | None = None, style: str = "") -> str:
    """Give a whole page around a body that is HTML already."""
    return opening(title, heading=heading, style=style) + body + CLOSING


def escape(text: object) -> str:
    """Give a text that means nothing in HTML, in an attribute neither, and that can be encoded."""
    return _escape(printable(str(text)), quote=True)


def data_uri(content: bytes, kind: str) -> str:
    """Give bytes as an address that holds them; ``kind`` is their media type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture(image: Image.Image, alt: str, *, exact: bool = False) -> str:
    """Give an image element that holds a picture: JPEG, which is a fifth of the size, or PNG where exact."""
    stream = io.BytesIO()
    if exact:
        image.save(stream, format="PNG")
    else:
        image.convert("RGB").save(stream, format="JPEG", quality=88)
    source = data_uri(stream.getvalue(), "image/png" if exact else "image/jpeg")
    return f'<img src="{source}" width="{image.width}" height="{image.height}" alt="{escape(alt)}" style="{_FLUID}">'


def figure(content: str, caption: str) -> str:
    """Give a card with a picture and a caption, both HTML already."""
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>\n"


def bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Give bars with a label, a length from 0 to 1 and the text behind it."""
    cells = "".join(
        f"<span>{escape(label)}</span>"
        f'<span class="bar"><span style="width: {100 * min(max(length, 0), 1):.2f}%"></span></span>'
        f'<span class="number">{escape(text)}</span>\n'
        for label, length, text in rows
    )
    return f'<div class="bars">\n{cells}</div>\n'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Give a table of texts. It scrolls where the page is narrow."""
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    header = f"<thead><tr>{head}</tr></thead>\n" if any(headings) else ""
    return f'<div class="scroll"><table>\n{header}<tbody>\n{body}</tbody></table></div>\n'
