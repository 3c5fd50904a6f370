"""Draw every method on four photos into docs/images/gallery, and write docs/gallery.md.

python scripts/write_gallery.py               # everything; methods of many runs take minutes
python scripts/write_gallery.py --only gae    # draw one method again
python scripts/write_gallery.py --text-only   # the page alone
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from PIL import Image

import vitreous
from vitreous.methods import list_methods
from vitreous.methods.registry import FAMILIES
from vitreous.methods.spelling import cost_of
from vitreous.models.demo import PHOTO, TWO_PHOTO

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
PHOTOS = (PHOTO, ROOT / "examples/photos/dog.jpg", ROOT / "examples/photos/kitten.jpg", TWO_PHOTO)
TILE, GAP, QUALITY = 176, 6, 82
MANY, HALF, TOGETHER = "many", (112, 112), 4
# Spellings that are worth a picture besides the plain name.
VARIANTS = {
    "gae": ("gae:rule=libra", "gae.propagate"),
    "tokentm": ("tokentm:rule=libra",),
    "fullgrad_plus": ("fullgrad_plus:rule=libra",),
    "alti": ("alti.skipplus",),
    "decompx": ("decompx.plus", "decompx.skipplus", "decompx.skipplus.propagate"),
}
# Fewer runs than by default: this is a gallery, not a measurement.
SHORTER = {
    **dict.fromkeys(("rise", "hsic", "tis", "lime", "kernel_shap"), "budget=256"),
    "scorecam": "budget=128",
    "vitcx": "budget=64",
    "smoothgrad": "samples=10",
    "integrated_gradients": "steps=10",
}
INTRODUCTION = """# Gallery

Every method on four photos, explained for the class that the demo model predicts. Methods that run the model many times
were drawn at half of its resolution. Written by `scripts/write_gallery.py`; do not edit.

![The four photos](images/gallery/photos.jpg)

Maps are scaled each by itself. Without sign, from zero (transparent) to the highest score (yellow). Signed: red speaks
for the class, blue against it. A map that looks good need not be faithful: measurements are in
[Choosing a method](choosing.md), and [trust](trust.md) measures the maps of one photo. Photos: Stefan van der Walt
(CC0), Hans Kemperman and Loliloli (public domain).
"""


def spellings() -> dict[str, list[str]]:
    """All spellings of the gallery by family."""
    found: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for info in list_methods():
        options = SHORTER.get(info.name)
        found[info.family] += [f"{info.name}:{options}" if options else info.name, *VARIANTS.get(info.name, ())]
    return found


def file_of(spelling: str) -> Path:
    """The picture of a spelling."""
    return PICTURES / f"{re.sub(r'[^a-z0-9_]+', '-', spelling)}.jpg"


def page() -> str:
    """The text of the page."""
    summaries = {info.name: info.summary for info in list_methods()}
    parts = [INTRODUCTION]
    for family, members in spellings().items():
        drawn = [spelling for spelling in members if file_of(spelling).is_file()]
        parts += [f"## {family.capitalize()}\n"] if drawn else []
        for spelling in drawn:
            name = re.split(r"[.:]", spelling)[0]
            text = summaries[name] if spelling == name or name in SHORTER else f"As `{name}`, another spelling."
            picture = file_of(spelling).relative_to(PAGE.parent).as_posix()
            parts.append(f"### `{spelling}`\n\n{text} [Details](methods.md#{name}).\n\n![{spelling}]({picture})\n")
    return "\n".join(parts)


def strip(tiles: list[Image.Image]) -> Image.Image:
    """Put tiles side by side."""
    sheet = Image.new("RGB", (len(tiles) * (TILE + GAP) - GAP, TILE), "white")
    for number, tile in enumerate(tiles):
        sheet.paste(tile.convert("RGB").resize((TILE, TILE), Image.Resampling.LANCZOS), (number * (TILE + GAP), 0))
    return sheet


def save(picture: Image.Image, file: Path) -> None:
    """Write a small JPEG."""
    picture.save(file, quality=QUALITY, optimize=True, progressive=True)


def draw(wanted: list[str]) -> None:
    """Draw the photos and the maps of some spellings."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    costly = [one for one in wanted if cost_of(one).label.startswith(MANY)]
    others = [one for one in wanted if one not in costly]
    groups = [("demo", None, others[start : start + TOGETHER]) for start in range(0, len(others), TOGETHER)]
    groups += [("demo", HALF, [one]) for one in costly]
    for name, size, group in groups:
        # Methods of one call share their passes.
        explanation = vitreous.explain(vitreous.load_model(name, image_size=size), list(PHOTOS), group)
        assert explanation.images is not None
        if size is None:
            save(strip(list(explanation.images)), PICTURES / "photos.jpg")
        for spelling in group:
            save(strip([explanation.overlay(spelling, index) for index in range(len(PHOTOS))]), file_of(spelling))
            print(spelling, flush=True)


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="SPELLING")
    parser.add_argument("--text-only", action="store_true")
    parser.add_argument("--missing", action="store_true", help="draw what has no picture yet")
    arguments = parser.parse_args()
    wanted = [one for members in spellings().values() for one in members]
    if arguments.only:
        wanted = [one for one in wanted if one in arguments.only or one.split(":")[0] in arguments.only]
    if arguments.missing:
        wanted = [one for one in wanted if not file_of(one).is_file()]
    if not arguments.text_only:
        draw(wanted)
    known = {file_of(one) for members in spellings().values() for one in members} | {PICTURES / "photos.jpg"}
    for file in PICTURES.glob("*.jpg"):
        if file not in known:
            file.unlink()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
