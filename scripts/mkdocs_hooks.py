"""What mkdocs does besides: formulas of the methods page.

Those of scripts/formulas.toml are typeset by KaTeX in the browser; the text of every formula becomes HTML when the site
is built.
"""

from __future__ import annotations

import html
import re
import tomllib
from pathlib import Path
from typing import Any

_FORMULA = re.compile(r"^- formula: (.+)$", re.MULTILINE)
_METHOD = re.compile(r"^### ([a-z0-9_]+)\n\n(.+?)\n\n(?=- formula: )", re.MULTILINE | re.DOTALL)
FORMULAS = Path(__file__).with_name("formulas.toml")
# dy_c/dA, dy_c/d(output): a fraction of two differentials.
_DERIVATIVE = re.compile(r"\bd([a-zA-Z](?:_[a-z]+)?)/d(\([a-z ]+\)|[a-zA-Z](?:_[a-z]+)?)")
_SCRIPT = re.compile(r"([_^])(\{[^}]*\}|[A-Za-z0-9]+|[+])")
# A single letter is a variable, unless it is the article.
_LETTER = re.compile(r"(?<![\w&'^-])(?![aA] [A-Za-z]{2})([A-Za-z\u03b1-\u03c9Ā])(?=['²³ᵀ]?(?:[^\w']|_|$))")
_PRODUCTS = {" * ": " ⊙ ", " x gradient": " \u00d7 gradient"}


def typeset(formula: str) -> str:
    """Return a formula that is written as plain text as HTML: indices, exponents, differentials, letters in italics."""
    text = html.escape(formula, quote=False)
    for plain, sign in _PRODUCTS.items():
        text = text.replace(plain, sign)
    text = _DERIVATIVE.sub(r"∂\1/∂\2", text)
    text = re.sub(r"\|\|(.+?)\|\|", r"‖\1‖", text)
    return _SCRIPT.sub(_script, _LETTER.sub(r"<i>\1</i>", text))


def _script(found: re.Match[str]) -> str:
    tag = "sub" if found[1] == "_" else "sup"
    inner = found[2].strip("{}")
    inner = inner if len(inner) > 3 or not inner.isalpha() else f"<i>{inner}</i>"
    return f"<{tag}>{inner}</{tag}>"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Typeset the formulas of a page; called by mkdocs."""
    if page.file.src_uri != "methods.md":
        return markdown
    latex = tomllib.loads(FORMULAS.read_text(encoding="utf-8"))

    def add_latex(found: re.Match[str]) -> str:
        formula = latex.get(found[1])
        shown = f'<div class="latex">{html.escape(formula, quote=False)}</div>\n\n' if formula else ""
        return f"{found[0]}{shown}"

    markdown = _METHOD.sub(add_latex, markdown)
    return _FORMULA.sub(lambda found: f'- formula: <span class="formula">{typeset(found[1])}</span>', markdown)
