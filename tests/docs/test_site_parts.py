"""Parts of the site: typeset formulas, the gallery, the list of pages for language models, the table script."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import forked
from loading_scripts import load_script
from vitreous.methods import list_methods

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("plain", "typeset"),
    [
        (
            "mean_h (A * dy_c/dA)^+ (GAE eq. 5)",
            "mean<sub><i>h</i></sub> (<i>A</i> ⊙ ∂<i>y</i><sub><i>c</i></sub>/∂<i>A</i>)<sup>+</sup> (GAE eq. 5)",
        ),
        ("W_O^h", "<i>W</i><sub><i>O</i></sub><sup><i>h</i></sup>"),
        ("G a Gaussian low-pass", "<i>G</i> a Gaussian low-pass"),
        ("A Markov chain", "A Markov chain"),
        ("p < 1 & ||x_j||", "<i>p</i> &lt; 1 &amp; ‖<i>x</i><sub><i>j</i></sub>‖"),
        ("z(Ā F') of block l's own", "<i>z</i>(<i>Ā</i> <i>F</i>') of block l's own"),
    ],
)
def test_formulas_are_typeset(plain, typeset, monkeypatch):
    assert load_script("mkdocs_hooks", monkeypatch).typeset(plain) == typeset


def test_tags_of_all_formulas_are_closed(monkeypatch):
    hooks = load_script("mkdocs_hooks", monkeypatch)
    formulas = re.findall(r"^- formula: (.+)$", (DOCS / "methods.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(formulas) > 50
    for formula in formulas:
        shown = hooks.typeset(formula)
        assert re.sub(r"</?(i|sub|sup)>", "", shown).count("<") == 0
        for tag in ("i", "sub", "sup"):
            assert shown.count(f"<{tag}>") == shown.count(f"</{tag}>")


def test_formulas_in_latex_are_of_methods_and_come_with_what_typesets_them(monkeypatch):
    hooks = load_script("mkdocs_hooks", monkeypatch)
    latex = tomllib.loads(hooks.FORMULAS.read_text(encoding="utf-8"))
    headings = set(re.findall(r"^### (\w+)$", (DOCS / "methods.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(latex) <= headings
    page = SimpleNamespace(file=SimpleNamespace(src_uri="methods.md"))
    shown = hooks.on_page_markdown((DOCS / "methods.md").read_text(encoding="utf-8"), page=page)
    assert shown.count('<div class="latex">') == len(latex)
    katex = DOCS / "assets" / "katex"
    style = (katex / "katex.min.css").read_text(encoding="utf-8")
    fonts = set(re.findall(r"url\((fonts/[^)]+)\)", style))
    assert fonts == {f"fonts/{file.name}" for file in (katex / "fonts").iterdir()}
    assert "The MIT License" in (katex / "LICENSE").read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in katex.rglob("*") if file.is_file()) < 650_000


def test_badges_say_what_the_project_file_says(monkeypatch):
    script = load_script("write_pictures", monkeypatch)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, drawn in script.badges().items():
        assert (DOCS / "images" / "badges" / f"{name}.svg").read_text(encoding="utf-8") == drawn
        assert f"docs/images/badges/{name}.svg" in readme


def test_the_gallery_shows_every_method(monkeypatch):
    script = load_script("write_gallery", monkeypatch)
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert page == script.page(), "run python scripts/write_gallery.py --missing"
    shown = {re.split("[.:]", spelling)[0] for spelling in re.findall(r"^### `([^`]+)`$", page, re.MULTILINE)}
    assert {info.name for info in list_methods()} == shown, "run python scripts/write_gallery.py --missing"
    pictures = sorted(script.PICTURES.glob("*.jpg"))
    # JPEGs are small enough for a repository, and every one is on the page.
    assert sum(file.stat().st_size for file in pictures) < 3 * 2**20
    linked = set(re.findall(r"\]\((images/gallery/[^)]+)\)", page))
    assert {f"images/gallery/{file.name}" for file in pictures} == linked
    with Image.open(pictures[0]) as first:
        assert first.size == (4 * script.TILE + 3 * script.GAP, script.TILE)


def test_the_list_for_language_models_has_every_page():
    result = forked.run([str(ROOT / "scripts" / "write_llms.py"), "--check"])
    assert result.returncode == 0, result.stderr
    listed = set(re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
