"""Draw the pictures of README.md and docs/start.md again: what the commands there write.

Figures, the gallery and the pictures of the page have scripts of their own; ``make pictures`` runs all.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
FIGURES = ("classes", "curves")
WIDEST, COLOURS = 1400, 128  # of figures, which are drawings and small photos


BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}: {value}">
<title>{name}: {value}</title><clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>
<g clip-path="url(#r)"><rect width="{left}" height="20" fill="#444"/>
<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{middle}" y="14">{name}</text>
<text x="{end}" y="14">{value}</text></g></svg>
"""


def badges() -> dict[str, str]:
    """The badges of README.md: what pyproject.toml says, and nothing that changes by itself."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    prefix = "Programming Language :: Python :: "
    versions = [one.removeprefix(prefix) for one in project["classifiers"] if one.startswith(prefix)]
    assert settings["tool"]["mypy"]["strict"]
    told = {
        "python": ("python", f"{versions[0]} to {versions[-1]}", "#3b6ea8"),
        "licence": ("licence", project["license"], "#3b7d4f"),
        "typed": ("typed", "mypy strict", "#3b6ea8"),
        "offline": ("runs", "offline", "#3b7d4f"),
    }
    drawn = {}
    for file, (name, value, colour) in told.items():
        left, right = (round(6.6 * len(text) + 12) for text in (name, value))
        sizes = {"left": left, "right": right, "width": left + right, "middle": left / 2, "end": left + right / 2}
        drawn[file] = BADGE.format(name=name, value=value, colour=colour, **sizes)
    return drawn


def demo_command() -> list[str]:
    """The command of ``make demo``."""
    rule = re.search(
        r"^demo:.*\n\t\$\(BIN\)/vitreous (.+?)\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    assert rule is not None
    return rule[1].replace("\\\n", " ").split()


def run(arguments: list[str], folder: Path) -> None:
    """Run the command line in a folder."""
    subprocess.run([sys.executable, "-m", "vitreous", *arguments], cwd=folder, check=True)  # noqa: S603


def main() -> None:
    """Draw all, or the badges alone (``--badges``)."""
    (IMAGES / "badges").mkdir(exist_ok=True)
    for name, drawn in badges().items():
        (IMAGES / "badges" / f"{name}.svg").write_text(drawn, encoding="utf-8")
    if "--badges" in sys.argv:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(demo_command(), folder)
        (comparison,) = folder.glob("demo-output/*/comparison.png")
        comparison.replace(IMAGES / "demo.png")
        for name in FIGURES:
            run(["figure", name, "demo", "--out", f"{name}.png"], folder)
            with Image.open(folder / f"{name}.png") as figure:
                small = figure.convert("RGB")
                small.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
                small.quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
