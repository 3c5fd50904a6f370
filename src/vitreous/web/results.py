"""What the page keeps: uploaded images, and what was computed for an image or text with a model, in bounded size."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
from PIL import Image
from torch import Tensor

from vitreous.errors import ImageError, InputError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.prediction import Predicted
from vitreous.explanation.trust import Trust
from vitreous.inputs.images import find_images, read_image
from vitreous.models import LoadedModel
from vitreous.models.pixels import find_pixels
from vitreous.pictures.curves import Curves
from vitreous.targets import Contrast, Target
from vitreous.text.explanation import TextExplanation

DISPLAY_SIZE = 1024  # pixels of the longer side of the copy kept for drawing; the model gets the full image
_MAX_EXAMPLES = 16
_NO_SECOND = "Choose the second photo again: it is no longer there."
_MAX_PROMPT = 300  # characters
_THUMBNAIL_SIZE = 160
EXAMPLES = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Upload:
    """An uploaded file.

    Attributes:
        path: The file.
        name: The user's name for it.
        digest: SHA-256 of its content.
    """

    path: Path = field(compare=False)
    name: str = field(compare=False)
    digest: str


@dataclass(frozen=True)
class PromptTarget:
    """A text that an image is compared with."""

    text: str


@dataclass(frozen=True)
class SimilarTarget:
    """Another image that an image is compared with; two files of the same content are one target."""

    upload: Upload


TargetKey = int | Contrast | PromptTarget | SimilarTarget  # what a map is stored by; a number is a class


def kind_of(target: TargetKey) -> str:
    """Return the kind of a target: ``class`` (contrasts are of classes), ``prompt`` or ``similar``."""
    return {PromptTarget: "prompt", SimilarTarget: "similar"}.get(type(target), "class")


def read_target(value: Any, second: Upload | None = None) -> TargetKey:
    """Parse a target as ``views.target_json`` spells it.

    Raises:
        InputError: it is none, or it names a second photo and there is none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "contrast":
        return Contrast(int(value["a"]), int(value["b"]))
    if kind == "prompt":
        text = " ".join(str(value["text"]).split())
        if not 0 < len(text) <= _MAX_PROMPT:
            raise InputError(f"A prompt is a text of up to {_MAX_PROMPT} characters.")
        return PromptTarget(text)
    if kind == "similar":
        if second is None:
            raise InputError(_NO_SECOND)
        return SimilarTarget(second)
    raise InputError("A question is a class, a contrast of two classes, a prompt or a second photo.")


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


@dataclass(frozen=True)
class Example:
    """An example photo.

    Attributes:
        path: The file.
        title: What it shows.
        credit: Author and licence, of the photos that are shipped.
    """

    path: Path
    title: str
    credit: str = ""


def readable_examples(folders: Sequence[Path]) -> list[Example]:
    """List the shipped photos and images in the allowed folders, without those that cannot be read."""
    listed = json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8"))
    found = [Example(EXAMPLES / one["file"], one["title"], one["credit"]) for one in listed]
    for folder in folders:
        try:
            found += [Example(path, path.name) for path in find_images([folder])]
        except ImageError:  # a folder of checkpoints without images
            continue
    return [one for one in found[:_MAX_EXAMPLES] if thumbnail(one.path) is not None]


@lru_cache(maxsize=64)
def thumbnail(photo: Path) -> str | None:
    """Return a small JPEG of an image as a data URL, so that the page loads quickly; ``None`` for unreadable images."""
    try:
        small = read_image(photo)
    except ImageError:
        return None
    small.thumbnail((_THUMBNAIL_SIZE, _THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
    return jpeg_url(small)


def jpeg_url(image: Image.Image, quality: int = 85) -> str:
    """Return an image as a data URL."""
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


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
        scores: Raw scores by method and target, of patches or tokens.
        signed: By method, whether the sign of its scores has a meaning.
        failed: By method and kind of target, why it cannot explain this model or input.
        objects: Targets that are no classes, with their numbers.
        grid: The patch grid, where it is known before the model runs; for the expected number of forward passes.
    """

    sample: Made | None = None
    grid: tuple[int, ...] | None = None
    scores: dict[tuple[str, TargetKey], Tensor] = field(default_factory=dict)
    signed: dict[str, bool] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    objects: dict[TargetKey, tuple[Target, float]] = field(default_factory=dict)

    @property
    def predicted(self) -> int:
        """The most probable class."""
        assert self.sample is not None
        return int(self.sample.logits[0].argmax())

    def label(self, target: TargetKey) -> str:
        """Return what a target is called."""
        if isinstance(target, int):
            return self.class_names()[target]
        return self.objects[target][0].label(tuple(self.class_names()))

    def value(self, target: TargetKey) -> str:
        """Return the probability of a class, or the number that is explained."""
        assert self.sample is not None
        return self.sample.format_output(target) if isinstance(target, int) else f"{self.objects[target][1]:.3g}"

    def caption(self, target: TargetKey) -> str:
        """Return the name of a target and its probability or number."""
        return f"{self.label(target)} · {self.value(target)}"

    def class_names(self) -> list[str]:
        """Return readable names of all classes."""
        assert self.sample is not None
        names = self.sample.class_names or [f"class {number}" for number in range(self.sample.logits.shape[1])]
        return [name.replace("_", " ") for name in names]

    def class_choices(self) -> list[tuple[str, int]]:
        """Return names and indices of all classes. Sessions share the tuples, because Gradio stores them."""
        return list(_choices(tuple(self.class_names())))

    def reason(self, method: str, target: TargetKey) -> str | None:
        """Return why a method has no scores for a target; ``None`` if it has, or was not run."""
        return self.failed.get((method, kind_of(target)))

    def missing(self, methods: Iterable[str], targets: Iterable[TargetKey]) -> list[str]:
        """Return the methods without scores for some of the targets, except those that failed."""
        required = list(targets)
        return [
            method
            for method in dict.fromkeys(methods)
            if any((method, one) not in self.scores and self.reason(method, one) is None for one in required)
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
        trust: How reliable maps are, by methods and class.
        by: Whether curves remove patches or pixels.
    """

    photo: DecodedImage
    depth: int
    rows: dict[int, BlockRows] = field(default_factory=dict)
    curves: dict[tuple[str, int], Curves] = field(default_factory=dict)
    by: str = "patches"
    trust: dict[tuple[tuple[str, ...], int], Trust] = field(default_factory=dict)

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

    def add(self, explanation: Explanation, targets: Sequence[TargetKey] = ()) -> None:
        """Store the maps of an explanation of this image; without ``targets``, those of classes."""
        if self.sample is None:
            # Clone: a view would keep the memory of the whole run alive.
            self.sample = replace(explanation, logits=explanation.logits.clone().cpu(), images=(self.photo.seen,))
        classes = explanation.logits.shape[1]
        for place in range(explanation.classes_per_image):
            number = explanation.class_index(0, place)
            key = targets[place] if targets else number
            if not isinstance(key, int):
                self.objects[key] = explanation.targets[number - classes], explanation.value(number)
            for method in explanation.methods:
                self.scores[method, key] = explanation.scores_of(method, 0, place).clone().cpu()
        self.signed |= {method: explanation.signed[method] for method in explanation.methods}

    def explanation(self, methods: Sequence[str], targets: Sequence[TargetKey]) -> Explanation:
        """Combine stored maps into one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: torch.stack([self.scores[method, one] for one in targets])[None] for method in methods},
            signed={method: self.signed[method] for method in methods},
            provenance={**self.sample.provenance, "methods": list(methods)},
            **self._numbers(targets),
        )

    def _numbers(self, targets: Sequence[TargetKey]) -> dict[str, Any]:
        """Return the fields of an explanation that say what is explained."""
        assert self.sample is not None
        classes = self.sample.logits.shape[1]
        others = [target for target in targets if not isinstance(target, int)]
        numbers = [target if isinstance(target, int) else classes + others.index(target) for target in targets]
        fields: dict[str, Any] = {"target": torch.tensor([numbers]), "targets": (), "target_values": None}
        if others:
            logits = self.sample.logits[0]
            values = [float(logits[one]) if isinstance(one, int) else self.objects[one][1] for one in targets]
            fields["targets"] = tuple(self.objects[one][0] for one in others)
            fields["target_values"] = torch.tensor([values], dtype=logits.dtype)
        return fields


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

    def explanation(self, methods: Sequence[str], targets: Sequence[TargetKey]) -> TextExplanation:
        """Combine stored scores into one explanation."""
        assert self.sample is not None
        return replace(
            self.sample,
            scores={method: (torch.stack([self.scores[method, one] for one in targets]),) for method in methods},
            signed={method: self.signed[method] for method in methods},
            provenance={**self.sample.provenance, "methods": list(methods)},
            target=torch.tensor([list(targets)]),
        )
