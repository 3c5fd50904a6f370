"""Writes docs/served.md, which models of the tests' zoo are served by which methods, and its summary in docs/models.md.

    python scripts/sweep_models.py --json docs/served/now.json
    python scripts/write_served_page.py [--check]

``docs/served/before.json`` is the same sweep at the last version that looked blocks up by module names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from generated import write_or_check

DOCS = Path(__file__).parents[1] / "docs"
FIVE = ("tokentm", "gradtoken", "decompx.skipplus", "gae", "ixg")
SHOWN = (*FIVE, "gradcam", "fullgrad", "attnlrp", "lrp", "rise:budget=4")
MARK = "<!-- served -->"  # stands around the table in docs/models.md
PACKAGES = {
    "vit_pytorch": "vit-pytorch",
    "x_transformers": "x-transformers",
    "monai": "MONAI",
    "kornia": "kornia",
    "self_attention_cv": "self-attention-cv",
    "clip": "two towers (CLIP), own code",
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "spellings": "one small ViT in many spellings",
    "own": "own-written ViTs",
    "volumes": "volumes and clips (3-D models)",
}


def package_of(model: dict[str, Any]) -> str:
    """The package that a model is from."""
    return str(model["name"]).partition("/")[0]


def share(models: list[dict[str, Any]], methods: int) -> tuple[str, str, str]:
    """Which part of models is served by all five main methods, by any method, and which part of all tries succeed."""
    if not models:
        return "-", "-", "-"
    five = sum(set(FIVE) <= set(model["served"]) for model in models)
    some = sum(bool(model["served"]) for model in models)
    tries = sum(len(model["served"]) for model in models) / methods
    return percent(five, models), percent(some, models), percent(tries, models)


def percent(count: float, models: list[dict[str, Any]]) -> str:
    """A share of models."""
    return f"{100 * count / len(models):.0f}%"


def summary(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The table of packages; models that were added to the zoo later have no share before."""
    known = {model["name"] for model in now["models"]}
    old_models = [model for model in before["models"] if model["name"] in known]
    lines = [
        (
            "| package | models | served by tokentm, gradtoken, decompx.skipplus, gae and ixg "
            "| served by some method | methods served |"
        ),
        "| --- | --- | --- | --- | --- |",
    ]
    for package, title in [*PACKAGES.items(), ("", "**all**")]:
        old, new = (
            [model for model in models if package in ("", package_of(model))] for models in (old_models, now["models"])
        )
        if new:
            pairs = zip(share(old, len(before["methods"])), share(new, len(now["methods"])), strict=True)
            cells = " | ".join(f"{first} → {second}" for first, second in pairs)
            lines.append(f"| {title} | {len(new)} | {cells} |")
    return lines


def details(now: list[dict[str, Any]]) -> list[str]:
    """The tables of models."""
    lines = []
    for package, title in PACKAGES.items():
        models = [model for model in now if package_of(model) == package]
        if not models:
            continue
        lines += ["", f"## {title[0].upper() + title[1:]}", ""]
        lines += [
            "| model | " + " | ".join(name.partition(":")[0] for name in SHOWN) + " | the first reason against one |"
        ]
        lines += ["| --- |" + " --- |" * (len(SHOWN) + 1)]
        for model in models:
            marks = " | ".join("yes" if method in model["served"] else "-" for method in SHOWN)
            against = [reason for reason, methods in model["refused"].items() if set(methods) & set(SHOWN)]
            reason = against[0].partition(": ")[2] if against else ""
            name = str(model["name"]).partition("/")[2]
            lines.append(f"| {name} | {marks} | {' '.join(reason.split())[:160].replace('|', '/')} |")
    return lines


def main() -> None:
    """Write the page, and the table of packages into the page on models."""
    before, now = (json.loads((DOCS / "served" / f"{name}.json").read_text()) for name in ("before", "now"))
    table = summary(before, now)
    introduction = (
        "Written by `scripts/write_served_page.py` from a sweep over small, randomly initialised models "
        f"(`scripts/sweep_models.py`, {len(now['models'])} models, {len(now['methods'])} methods each; versions in "
        '`constraints.txt`). It says what works, not what is good. "a → b": before the architecture was seen in the '
        "run, and now. For a model of your own, `vitreous models check` says the same."
    )
    lines = ["# Which models are served", "", introduction, "", *table, *details(now["models"])]
    models = (DOCS / "models.md").read_text(encoding="utf-8")
    start, _, rest = models.partition(MARK)
    _, _, end = rest.partition(MARK)
    wanted = {
        DOCS / "served.md": "\n".join(lines) + "\n",
        DOCS / "models.md": "\n".join([start + MARK, "", *table, "", MARK + end]),
    }
    for file, text in wanted.items():
        write_or_check(file, text, "write_served_page")


if __name__ == "__main__":
    main()
