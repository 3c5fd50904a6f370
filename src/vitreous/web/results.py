"""What the page keeps: uploaded images, and what was computed for an image or text with a model, in bounded size."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

import torch
from PIL import Image
from torch import Tensor

from vitreous.errors import ImageError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.prediction import Predicted
from vitreous.inputs.images import find_images, read_image
from vitreous.models import LoadedModel, demo
from vitreous.models.pixels import find_pixels
from vitreous.pictures.curves import Curves
from vitreous.text.explanation import TextExplanation

DISPLAY_SIZE = 1024  # pixels of the longer side of the copy kept for drawing; the model gets the full image
_MAX_EXAMPLES = 12
_THUMBNAIL_SIZE = 160


@dataclass(frozen=True)
class Upload:
    """An uploaded file.

    Attributes:
        path: The file.
        name: The user's name for it.
        digest: SHA-256 of its content.
    """

    path: Path
    name: str
    digest: str


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image, preprocessed for one model.

    Attributes:
        name: The user's name for it.
        picture: The image for drawing, no side longer than ``DISPLAY_SIZE``.
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


def load_image(upload: Upload, model: LoadedModel, limit: int) -> DecodedImage:
    """Decode an image within the limits of ``read_image`` and preprocess it for a model.

    Raises:
        ImageError: the file is not an image that can be read safely.
    """
    stream = io.BytesIO(_read(upload.path, upload.name, limit))
    stream.name = upload.name  # errors name the file as the user knows it, not its path on the server
    image = read_image(stream)
    pixels, pictures = find_pixels(model, model.model, image)
    assert pictures is not None
    picture = image.copy() if max(image.size) <= DISPLAY_SIZE else image
    picture.thumbnail((DISPLAY_SIZE, DISPLAY_SIZE), Image.Resampling.LANCZOS)
    return DecodedImage(upload.name, picture, pictures[0], pixels)


def example_images(folders: Sequence[Path]) -> list[Path]:
    """List the shipped image and images in the allowed folders."""
    found = [demo.PHOTO]
    for folder in folders:
        try:
            found += find_images([folder])
        except ImageError:  # a folder of checkpoints without images
            continue
    return found[:_MAX_EXAMPLES]


def write_thumbnails(photos: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Write a small JPEG of each image, so that the page loads quickly; unreadable images are skipped."""
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


_BYTES_PER_TOKEN = 400  # a token and its word as Python objects


class Sized(Protocol):
    """An object that knows its size in memory; the size may grow."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""


Value = TypeVar("Value", bound=Sized)


class BoundedCache(Generic[Value]):
    """A thread-safe LRU cache bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Memory of all values in bytes."""
        with self._lock:
            return sum(value.nbytes for value in self._values.values())

    def get(self, key: Hashable) -> Value | None:
        """Return a value and mark it as recently used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value, or account for its growth, and evict others. A value above the limit is not stored."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            total = sum(each.nbytes for each in self._values.values())
            while total > self.limit and self._values:
                _, dropped = self._values.popitem(last=False)
                total -= dropped.nbytes


@lru_cache(maxsize=4)
def _choices(names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, number) for number, name in enumerate(names))


Made = TypeVar("Made", bound=Predicted)


@dataclass(kw_only=True)
class ResultCache(Generic[Made]):
    """The prediction for one input and the scores of every method and class computed so far.

    Attributes:
        sample: The first explanation; its logits, class names and versions hold for all scores.
        scores: Raw scores by method and class, of patches or tokens.
        signed: By method, whether the sign of its scores has a meaning.
        failed: By method, why it cannot explain this model or input.
    """

    sample: Made | None = None
    scores: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    signed: dict[str, bool] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def predicted(self) -> int:
        """The most probable class."""
        assert self.sample is not None
        return int(self.sample.logits[0].argmax())

    def caption(self, class_index: int) -> str:
        """Return the name of a class and its probability."""
        assert self.sample is not None
        return f"{self.class_names()[class_index]} · {self.sample.format_output(class_index)}"

    def class_names(self) -> list[str]:
        """Return readable names of all classes."""
        assert self.sample is not None
        names = self.sample.class_names or [f"class {number}" for number in range(self.sample.logits.shape[1])]
        return [name.replace("_", " ") for name in names]

    def class_choices(self) -> list[tuple[str, int]]:
        """Return names and indices of all classes. Sessions share the tuples, because Gradio stores them."""
        return list(_choices(tuple(self.class_names())))

    def missing(self, methods: Iterable[str], classes: Iterable[int]) -> list[str]:
        """Return the methods without scores for some of the classes, except those that failed."""
        required = list(classes)
        return [
            method
            for method in dict.fromkeys(methods)
            if method not in self.failed and any((method, one) not in self.scores for one in required)
        ]


@dataclass(frozen=True)
class BlockRows:
    """Attention between the patches of one block.

    Attributes:
        block: The block's index.
        grid: Rows and columns of patches.
        attention: Attention averaged over heads, (patches, patches); a row sums to less than 1 where class or register
            tokens are attended to.
        contribution: Norms of the vectors that attention writes (``attin``), (patches, patches); ``None`` where the
            attention output does not reach the residual stream through a linear projection.
    """

    block: int
    grid: tuple[int, int]
    attention: Tensor
    contribution: Tensor | None

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.attention.nbytes + (0 if self.contribution is None else self.contribution.nbytes)


@dataclass
class ImageResults(ResultCache[Explanation]):
    """Maps, attention rows and curves of one image with one model.

    Attributes:
        photo: The image.
        depth: The number of blocks of the model.
        rows: Attention rows by block.
        curves: Deletion and insertion curves by method and class.
        by: Whether curves remove patches or pixels.
    """

    photo: DecodedImage
    depth: int
    rows: dict[int, BlockRows] = field(default_factory=dict)
    curves: dict[tuple[str, int], Curves] = field(default_factory=dict)
    by: str = "patches"

    @property
    def has_curves(self) -> bool:
        """Whether the outputs are probabilities; curves of regression values are not defined."""
        return self.sample is None or self.sample.scale != "value"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        maps = sum(scores.nbytes for scores in list(self.scores.values()))
        logits = 0 if self.sample is None else self.sample.logits.nbytes
        return self.photo.nbytes + maps + logits + sum(rows.nbytes for rows in list(self.rows.values()))

    def add(self, explanation: Explanation) -> None:
        """Store the maps of an explanation of this image."""
        if self.sample is None:
            # Clone: a view would keep the memory of the whole run alive.
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu(), images=(self.photo.seen,))
        for method in explanation.methods:
            self.signed[method] = explanation.signed[method]
            for number in range(explanation.classes_per_image):
                scores = explanation.scores_of(method, 0, number).clone().cpu()
                self.scores[method, explanation.class_index(0, number)] = scores

    def explanation(self, methods: Sequence[str], classes: Sequence[int]) -> Explanation:
        """Combine stored maps into one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: torch.stack([self.scores[method, one] for one in classes])[None] for method in methods},
            signed={method: self.signed[method] for method in methods},
            target=torch.tensor([list(classes)]),
            provenance={**self.sample.provenance, "methods": list(methods)},
        )


@dataclass
class TextResults(ResultCache[TextExplanation]):
    """Token scores of one text with one model.

    Attributes:
        text: The text.
        tokens: The number of its tokens.
        used_tokens: How many of them the model reads; fewer where the text was truncated.
    """

    text: str
    tokens: int
    used_tokens: int

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        scores = sum(scores.nbytes for scores in list(self.scores.values()))
        return 4 * len(self.text) + _BYTES_PER_TOKEN * self.tokens + scores

    def add(self, explanation: TextExplanation) -> None:
        """Store the scores of an explanation of this text."""
        if self.sample is None:
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu())
        for method in explanation.methods:
            self.signed[method] = explanation.signed[method]
            for number in range(explanation.classes_per_image):
                scores = explanation.piece_scores(method, 0, number).clone().cpu()
                self.scores[method, explanation.class_index(0, number)] = scores

    def explanation(self, methods: Sequence[str], classes: Sequence[int]) -> TextExplanation:
        """Combine stored scores into one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: (torch.stack([self.scores[method, one] for one in classes]),) for method in methods},
            signed={method: self.signed[method] for method in methods},
            target=torch.tensor([list(classes)]),
            provenance={**self.sample.provenance, "methods": list(methods)},
        )
