"""Draw the pictures of README.md and docs/start.md again: what the commands there write.

Figures, the gallery and the pictures of the page have scripts of their own; ``make pictures`` runs all.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
FIGURES = ("classes", "curves")
WIDEST, COLOURS = 1400, 128  # of figures, which are drawings and small photos


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
    """Draw all."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(demo_command(), folder)
        (drawn,) = folder.glob("demo-output/*/comparison.png")
        drawn.replace(IMAGES / "demo.png")
        for name in FIGURES:
            run(["figure", name, "demo", "--out", f"{name}.png"], folder)
            with Image.open(folder / f"{name}.png") as figure:
                small = figure.convert("RGB")
                small.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
                small.quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
