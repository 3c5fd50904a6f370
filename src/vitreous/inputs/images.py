"""Read images from untrusted files: upright 8-bit RGB, or an ``ImageError`` that names the file."""

from __future__ import annotations

import io
import math
import stat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vitreous._utils.messages import error_message
from vitreous.errors import ImageError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Source = str | Path | IO[bytes] | Image.Image | NDArray[np.uint8]

MAX_BYTES = 200 * 2**20
MAX_PIXELS = 80_000_000
_BAND_PIXELS = 2**20  # pixels converted at once

SUFFIXES = frozenset(
    {".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_FIRST_TRANSPOSED = 5  # EXIF orientations from here on swap width and height
# Pillow also opens formats that start other programs (EPS) or are not used for images in practice.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")


class Upright(NamedTuple):
    """An image with its EXIF orientation applied.

    Attributes:
        image: The image, upright.
        orientation: The EXIF orientation of the stored pixels, 1 to 8 (1 is upright); None without one.
    """

    image: Image.Image
    orientation: int | None

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height of the stored pixels."""
        width, height = self.image.size
        return (height, width) if (self.orientation or 1) >= _FIRST_TRANSPOSED else (width, height)


def read_image(source: Source) -> Image.Image:
    """Read an image as upright 8-bit RGB.

    The EXIF orientation is applied, transparency is blended with white, and more than 8 bits per channel are scaled.

    Args:
        source: A path, a binary file, a Pillow image, or 8-bit pixels: (height, width) or
            (height, width, channels) with 3 channels for RGB.

    Raises:
        ImageError: The image cannot be read, or would need too much memory.
        InputError: The source is none of these.
    """
    return read_oriented(source).image


def read_oriented(source: Source) -> Upright:
    """Read an image as ``read_image`` does, and return it with its EXIF orientation.

    Raises:
        ImageError: The image cannot be read, or would need too much memory.
    """
    upright, name = read_upright(source), _name(source)
    try:
        return upright._replace(image=_as_rgb(upright.image))
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    except MemoryError as error:
        raise _too_large(name, upright.image) from error
    except Exception as error:  # decoders can raise any exception on damaged bytes
        raise ImageError(f"{name}: the image is damaged or cut off ({error_message(error)})") from error


def read_upright(source: Source) -> Upright:
    """Read an image upright but with its stored values, not converted to RGB, as masks need it.

    Raises:
        ImageError: The image cannot be read, or would need too much memory.
    """
    name = _name(source)
    image = _image(source, name)
    _check_size(image, name)
    orientation = _orientation(image)  # before loading: Pillow rotates TIFFs on load and drops the tag
    try:
        image.load()
    except MemoryError as error:
        raise _too_large(name, image) from error
    except Exception as error:  # decoders can raise any exception on damaged bytes
        raise ImageError(f"{name}: the image is damaged or cut off ({error_message(error)})") from error
    if orientation in (None, 1):  # avoids a copy
        return Upright(image, orientation)
    try:
        upright = ImageOps.exif_transpose(image)
        upright.format = image.format  # lost in the copy, and needed to know the bit depth of gray images
        return Upright(upright, orientation)
    except MemoryError as error:
        raise _too_large(name, image) from error
    except Exception:  # noqa: BLE001  an image with damaged EXIF data is still an image
        return Upright(image, None)


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Rotate an image according to its EXIF orientation."""
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(image)


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Return the given files, with every folder replaced by the sorted images directly inside it, without duplicates.

    Files are kept whatever their suffix; reading them reports what is wrong.

    Raises:
        ImageError: A folder cannot be listed or contains no image.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        found += _images_in(path) if _is_folder(path) else [path]
    return list(dict.fromkeys(found))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # not a valid file name
        return False


def _images_in(folder: Path) -> list[Path]:
    try:
        files = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file()]
    except OSError as error:
        raise ImageError(f"{folder}: the folder cannot be read ({error.strerror})") from error
    images = sorted(file for file in files if not file.name.startswith("."))
    if not images:
        raise ImageError(f"{folder}: the folder holds no images")
    return images


def _name(source: Source) -> str:
    if isinstance(source, str | Path):
        return str(source)
    given = getattr(source, "filename", None) or getattr(source, "name", None)
    return str(given) if given else "the image"


def _image(source: Source, name: str) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_pixels(source)
    if isinstance(source, str | Path) or hasattr(source, "read"):
        return _open(_content(source, name), name)
    raise InputError(
        f"an image is a path, a binary file, a Pillow image or an array of uint8 pixels, not {type(source).__name__}"
    )


def _from_pixels(pixels: NDArray[Any]) -> Image.Image:
    """Convert an array to an image; only uint8, whose range from black to white is known."""
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (2, 3, 4))):
        raise InputError(
            "an array as an image holds uint8 pixels (height, width) or (height, width, 3), "
            f"not {pixels.dtype} {pixels.shape}"
        )
    if pixels.size == 0:
        raise InputError(f"an array of shape {pixels.shape} has no pixels")
    return Image.fromarray(pixels)


def _content(source: str | Path | IO[bytes], name: str) -> bytes:
    """Read a file up to the size limit."""
    try:
        if isinstance(source, str | Path):
            _check_file(Path(source), name)
            with Path(source).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        else:
            content = source.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ImageError(f"{name}: there is no such file") from error
    except PermissionError as error:
        raise ImageError(f"{name}: no permission to read this file") from error
    except ImageError:
        raise
    except (OSError, ValueError) as error:
        raise ImageError(f"{name}: the file cannot be read ({error_message(error)})") from error
    if not isinstance(content, bytes):
        raise ImageError(f"{name}: the file must be opened in binary mode")
    if not content:
        raise ImageError(f"{name}: the file is empty")
    if len(content) > MAX_BYTES:
        raise ImageError(f"{name}: the file is larger than {MAX_BYTES // 2**20} MiB")
    return content


def _check_file(path: Path, name: str) -> None:
    """Refuse what is not a regular file: opening a pipe would block."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ImageError(f"{name}: this is a folder, not an image")
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{name}: this is not a regular file")


def _open(content: bytes, name: str) -> Image.Image:
    """Read the header only."""
    Image.init()
    known = [format_ for format_ in _FORMATS if format_ in Image.OPEN]
    try:
        return Image.open(io.BytesIO(content), formats=known)
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: this is not an image in a supported format") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: more than {MAX_PIXELS:,} pixels, refused") from error
    except Exception as error:  # decoders can raise any exception on damaged bytes
        raise ImageError(f"{name}: the image is damaged or cut off ({error_message(error)})") from error


def _check_size(image: Image.Image, name: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"{name}: {image.width} x {image.height} is more than {MAX_PIXELS:,} pixels, refused")
    if min(image.size) < 1:
        raise ImageError(f"{name}: an image of {image.width} x {image.height} pixels has no content")


def _orientation(image: Image.Image) -> int | None:
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001  an image with damaged EXIF data is still an image
        return None
    return found if found in range(1, 9) else None


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_gray(image).convert("RGB")
    if image.mode == "La":  # Pillow converts premultiplied gray to nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    if image.mode == "LAB":
        raise ImageError("images in the Lab colour space are not supported")
    return image.convert("RGB")


def _deep_gray(image: Image.Image) -> Image.Image:
    """Scale 16-bit, 32-bit or floating-point gray to 8 bits, in bands of rows to bound memory."""
    low, high = math.inf, -math.inf
    for _, values in _bands(image):
        if not np.isfinite(values).all():
            raise ImageError("the image has pixels that are not finite numbers")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    black, white = (0.0, 65535.0) if sixteen_bits else _range(low, high, image.mode)
    gray = np.empty((image.height, image.width), dtype=np.uint8)
    for top, values in _bands(image):
        scaled = (values - black) * (255 / (white - black))
        gray[top : top + len(values)] = scaled.round().clip(0, 255)
    return Image.fromarray(gray)


def _bands(image: Image.Image) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield bands of rows in float64, each with the index of its first row."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        yield top, np.asarray(band).astype(np.float64)


def _range(low: float, high: float, mode: str) -> tuple[float, float]:
    """Return the values of black and white: the narrowest usual range, otherwise the minimum and maximum."""
    usual = (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
    for white in usual:
        if low >= 0 and high <= white:
            return 0.0, white
    return low, high if high > low else low + 1


def _too_large(name: str, image: Image.Image) -> ImageError:
    return ImageError(f"{name}: there is not enough memory for an image of {image.width} x {image.height} pixels")
