"""A visitor's photo: read within limits, known by its content, kept small."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from vitreous.errors import ImageError
from vitreous.images import read_image
from vitreous.models import LoadedModel
from vitreous.pixels import find_pixels

SHOWN = 1024  # pixels of the longer side of what is kept for drawing; the model gets the photo in full


@dataclass(frozen=True)
class Upload:
    """The file of a photo, as it was read once.

    Attributes:
        path: Where it lies.
        name: What the visitor calls it.
        digest: The SHA-256 of its content.
    """

    path: Path
    name: str
    digest: str


@dataclass(frozen=True)
class Photo:
    """A photo, ready for one model.

    Attributes:
        name: What the visitor calls it.
        picture: The photo for drawing, no side longer than ``SHOWN``.
        seen: What the model sees of it.
        pixels: The model's input, (1, channels, height, width).
    """

    name: str
    picture: Image.Image
    seen: Image.Image
    pixels: Tensor

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        pictures = sum(3 * image.width * image.height for image in (self.picture, self.seen))
        return pictures + self.pixels.nbytes


def receive(path: str | Path, name: str, limit: int) -> Upload:
    """Take a file in.

    Raises:
        ImageError: it is larger than ``limit`` bytes, or gone.
    """
    return Upload(Path(path), name, hashlib.sha256(_content(Path(path), name, limit)).hexdigest())


def develop(upload: Upload, model: LoadedModel, limit: int) -> Photo:
    """Decode a photo, within the limits of ``read_image``, and prepare it for a model.

    Raises:
        ImageError: it is not an image that can be read safely.
    """
    stream = io.BytesIO(_content(upload.path, upload.name, limit))
    stream.name = upload.name  # so that errors name the file as the visitor knows it, not where it lies
    image = read_image(stream)
    pixels, pictures = find_pixels(model, model.model, image)
    assert pictures is not None
    picture = image.copy() if max(image.size) <= SHOWN else image
    picture.thumbnail((SHOWN, SHOWN), Image.Resampling.LANCZOS)
    return Photo(upload.name, picture, pictures[0], pixels)


def _content(path: Path, name: str, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ImageError(f"{name}: the photo is no longer here; please upload it again.") from error
    if len(content) > limit:
        raise ImageError(f"{name}: the file is larger than {limit / 2**20:.0f} MB, which is all that is taken here.")
    return content
