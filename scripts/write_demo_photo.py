"""Compose the demo photo of two animals from free photos of a dog and a cat (examples/photos/README.md)."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps

from vitreous.models.demo import PHOTO, TWO_PHOTO

DOG = Path(__file__).parents[1] / "examples" / "photos" / "dog.jpg"
SIZE = 448  # twice the demo model's input
DOG_HEIGHT = 260
DOG_BOX = (269, 0, 612, 199)  # head and shoulders


def main() -> None:
    """Write the photo: the dog above, the cat below."""
    sheet = Image.new("RGB", (SIZE, SIZE))
    with Image.open(DOG) as dog, Image.open(PHOTO) as cat:
        sheet.paste(ImageOps.fit(dog.convert("RGB").crop(DOG_BOX), (SIZE, DOG_HEIGHT)), (0, 0))
        below = ImageOps.fit(cat.convert("RGB"), (SIZE, SIZE - DOG_HEIGHT), centering=(0.5, 0.25))
        sheet.paste(below, (0, DOG_HEIGHT))
    sheet.save(TWO_PHOTO, quality=92, optimize=True)


if __name__ == "__main__":
    main()
