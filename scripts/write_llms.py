"""Write docs/llms.txt, a list of the pages for language models, from the navigation of the site.

python scripts/write_llms.py [--check]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generated import write_or_check

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILE = DOCS / "llms.txt"
LONGEST = 160  # characters about a page
INTRODUCTION = """# Vitreous

> Explains Vision Transformers and text encoders: which image regions, or words, led to a prediction? A Python library
> (`import vitreous`), a command line (`vitreous`) and a web page (`vitreous serve`), with named protocols to evaluate
> explanations. Works offline; the demo model comes as a Python package.

`vitreous.explain(model, images, methods=["tokentm", "gradtoken", "decompx.skipplus"], target=None)` returns an
`Explanation` with raw `scores` (images, patches), `heatmap()`, `overlay()`, `figure()` and `save()`. A method is
spelled `name[.aggregation...][:option=value,...]`. Models are `nn.Module`s, or names such as `demo`, `hf/FOLDER` and
`timm/vit_base_patch16_224`. Errors are subclasses of `vitreous.errors.VitreousError` and say what to do.
"""


def pages(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """Titles and files of a part of the navigation, in order."""
    for entry in entries:
        ((title, value),) = entry.items()
        if isinstance(value, str):
            yield title, value
        else:
            yield from pages(value)


def sentence(file: Path) -> str:
    """The first sentence of a page, without links and marks."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    prose = [block for block in blocks if re.match(r"[A-Z*`]", block) and not block.startswith("Written by")]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose[0]).replace("**", "") if prose else ""
    first = re.split(r"(?<=[.?])\s", plain)[0].rstrip(":")
    return first if len(first) <= LONGEST else f"{first[:LONGEST].rsplit(' ', 1)[0]} ..."


def text() -> str:
    """The whole file."""
    # Tags of Python objects, which mkdocs knows, do not occur in this configuration.
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    parts = [INTRODUCTION, "## Pages\n"]
    parts += [f"- [{title}]({file}): {sentence(DOCS / file)}".rstrip(": ") for title, file in pages(navigation)]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the file, or with --check fail if it is not what the pages say."""
    write_or_check(FILE, text(), "write_llms")


if __name__ == "__main__":
    main()
