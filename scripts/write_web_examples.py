"""Write the example photos of the page with their credits.

They are free photos: of the demo, and of those that scikit-image and scikit-learn ship.
"""

from __future__ import annotations

import json
from pathlib import Path

import skimage
import sklearn
from PIL import Image, ImageOps

FOLDER = Path(__file__).parents[1] / "src/vitreous/web/examples"
DEMO = FOLDER.parents[1] / "models/demo"
_SIZE = 448
_QUALITY = 90

DOG = "Dog: Hans Kemperman, public domain"
CHELSEA = "Chelsea: Stefan van der Walt, CC0"
COFFEE = "Coffee: Rachel Michetti, CC0"
ASTRONAUT = "Eileen Collins: NASA, public domain"
ROCKET = "Falcon 9: SpaceX, CC0"
FLOWER = "Flower: vultilion, CC BY 2.0"
TWO = "A cat and a German shepherd, which the demo model does not know"


def photo(name: str) -> Image.Image:
    """Open a photo of scikit-image or scikit-learn."""
    folder = Path(sklearn.__file__).parent / "datasets/images"
    if not (folder / name).is_file():
        folder = Path(skimage.__file__).parent / "data"
    return Image.open(folder / name).convert("RGB")


def without_colour(image: Image.Image) -> Image.Image:
    """Return the image in grey."""
    return ImageOps.grayscale(image).convert("RGB")


def stacked(upper: Image.Image, lower: Image.Image) -> Image.Image:
    """Put two photos above each other in a square."""
    size = (_SIZE, _SIZE // 2)
    sheet = Image.new("RGB", (_SIZE, _SIZE))
    for row, image in enumerate((upper, lower)):
        sheet.paste(ImageOps.fit(image, size, centering=(0.5, 0.2)), (0, row * size[1]))
    return sheet


def mosaic(images: list[Image.Image]) -> Image.Image:
    """Put four photos into a square."""
    half = _SIZE // 2
    sheet = Image.new("RGB", (_SIZE, _SIZE))
    for number, image in enumerate(images):
        sheet.paste(ImageOps.fit(image, (half, half)), (half * (number % 2), half * (number // 2)))
    return sheet


def main() -> None:
    """Write all of them."""
    cat, coffee, rocket, flower = (photo(name) for name in ("chelsea.png", "coffee.png", "rocket.jpg", "flower.jpg"))
    astronaut = photo("astronaut.png")
    face = cat.crop((75, 0, 375, 300))
    pictures = {
        "cat-and-dog": (TWO, Image.open(DEMO / "cat-and-dog.jpg"), [DOG, CHELSEA]),
        "cat": ("A cat", cat, [CHELSEA]),
        "four-photos": ("Four photos", mosaic([coffee, face, rocket, flower]), [CHELSEA, COFFEE, ROCKET, FLOWER]),
        "grey-cat": ("Without colour", without_colour(face), [CHELSEA]),
        "cat-and-coffee": ("Cat and coffee", stacked(coffee, cat), [CHELSEA, COFFEE]),
        "coffee": ("Coffee", coffee, [COFFEE]),
        "astronaut": ("A person", astronaut, [ASTRONAUT]),
        "flower": ("A flower", flower, [FLOWER]),
    }
    FOLDER.mkdir(exist_ok=True)
    listed = []
    for name, (title, image, credits_) in pictures.items():
        image.thumbnail((_SIZE, _SIZE), Image.Resampling.LANCZOS)
        image.save(FOLDER / f"{name}.jpg", quality=_QUALITY, optimize=True)
        listed.append({"file": f"{name}.jpg", "title": title, "credit": "; ".join(credits_)})
    (FOLDER / "examples.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
