"""Uploaded photos: read within limits, identified by content, kept small; and the example photos of the page."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from vitreous.errors import ImageError
from vitreous.inputs.images import find_images, read_image
from vitreous.models import LoadedModel, demo
from vitreous.models.pixels import find_pixels

DISPLAY_SIZE = 1024  # pixels of the longer side of the copy kept for drawing; the model gets the full photo
_MAX_EXAMPLES = 12
_THUMBNAIL_SIZE = 160


@dataclass(frozen=True)
class Upload:
    """An uploaded file.

    Attributes:
        path: The file.
        name: The visitor's name for it.
        digest: SHA-256 of its content.
    """

    path: Path
    name: str
    digest: str


@dataclass(frozen=True)
class Photo:
    """A decoded photo, preprocessed for one model.

    Attributes:
        name: The visitor's name for it.
        picture: The photo for drawing, no side longer than ``DISPLAY_SIZE``.
        seen: The part that the model sees.
        pixels: The model's input, (1, channels, height, width).
    """

    name: str
    picture: Image.Image
    seen: Image.Image
    pixels: Tensor

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        pictures = sum(3 * image.width * image.height for image in (self.picture, self.seen))
        return pictures + self.pixels.nbytes


def read_upload(path: str | Path, name: str, limit: int) -> Upload:
    """Read a file and hash it.

    Raises:
        ImageError: the file is larger than ``limit`` bytes, or does not exist any more.
    """
    return Upload(Path(path), name, hashlib.sha256(_read(Path(path), name, limit)).hexdigest())


def load_photo(upload: Upload, model: LoadedModel, limit: int) -> Photo:
    """Decode a photo within the limits of ``read_image`` and preprocess it for a model.

    Raises:
        ImageError: the file is not an image that can be read safely.
    """
    stream = io.BytesIO(_read(upload.path, upload.name, limit))
    stream.name = upload.name  # errors name the file as the visitor knows it, not its path on the server
    image = read_image(stream)
    pixels, pictures = find_pixels(model, model.model, image)
    assert pictures is not None
    picture = image.copy() if max(image.size) <= DISPLAY_SIZE else image
    picture.thumbnail((DISPLAY_SIZE, DISPLAY_SIZE), Image.Resampling.LANCZOS)
    return Photo(upload.name, picture, pictures[0], pixels)


def example_photos(folders: Sequence[Path]) -> list[Path]:
    """List the shipped photo and photos in the allowed folders."""
    found = [demo.PHOTO]
    for folder in folders:
        try:
            found += find_images([folder])
        except ImageError:  # a folder of checkpoints without photos
            continue
    return found[:_MAX_EXAMPLES]


def write_thumbnails(photos: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Write a small JPEG of each photo, so that the page loads quickly; unreadable photos are skipped."""
    written = {}
    for number, photo in enumerate(photos):
        try:
            small = read_image(photo)
        except ImageError:
            continue
        small.thumbnail((_THUMBNAIL_SIZE, _THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
        written[photo] = folder / f"example-{number}.jpg"
        small.save(written[photo], quality=85)
    return written


def _read(path: Path, name: str, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ImageError(f"{name}: the photo is no longer on the server; please upload it again.") from error
    if len(content) > limit:
        raise ImageError(f"{name}: the file is larger than {limit / 2**20:.0f} MB, the limit of this server.")
    return content
