"""The models that users may choose, and a small cache of those that are loaded."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from vitreous.api.explain import network_of
from vitreous.api.similarity import embedding_tower
from vitreous.errors import ModelError, VitreousError
from vitreous.inputs.model_io import encoding_methods
from vitreous.models import LoadedModel, load_model
from vitreous.models.dual_encoder import DualEncoder, load_dual_encoder, zero_shot
from vitreous.models.hf_models import DEMO_TEXT, LoadedTextModel, load_text_model

_MAX_LOADED = 2  # besides the default model
PROMPT_MODEL = "demo-clip"  # the model of images and texts that works offline
# The first prompts of a model of images and texts; users can write any other.
COMMON_NAMES = (
    "cat", "dog", "bird", "horse", "fish", "bear", "butterfly", "person", "flower", "tree", "cup of coffee", "pizza",
    "car", "bus", "bicycle", "boat", "airplane", "rocket", "building", "chair", "computer", "book", "mountain", "beach",
)  # fmt: skip
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
Model = TypeVar("Model", LoadedModel, LoadedTextModel)


class BaseModelCache(ABC, Generic[Model]):
    """Loads models by name and keeps the most recently used ones. Not thread-safe: call ``get`` from one thread.

    Args:
        default: The model the server was started with. It may have any name, also one that users may not choose,
            such as a Python file.
        folders: Folders from which checkpoints may be loaded.

    Attributes:
        suggested: Well-known models that the page offers.
        reads_text: Whether these are text classifiers.
    """

    suggested: tuple[str, ...]
    reads_text: bool

    def __init__(self, default: str, folders: Sequence[Path] = ()) -> None:
        self.default = default
        self.folders = tuple(folder.resolve() for folder in folders)
        self._models: OrderedDict[str, Model] = OrderedDict()

    def get(self, name: str) -> Model:
        """Return a model, loading it if necessary.

        Raises:
            ModelError: the model may not be chosen by users, or cannot be loaded.
        """
        name = (name or "").strip()  # the page may send None
        if not name:
            raise ModelError("Choose a model.")
        if name not in self._models:
            self.check(name)
            loaded = self._load(name)
            _ = loaded.fingerprint  # computed now, so that the first explanation does not wait for it
            self._models[name] = loaded
        self._models.move_to_end(name)
        for other in [other for other in self._models if other not in (name, self.default)][:-_MAX_LOADED]:
            self._forget(other)
        return self._models[name]

    def _forget(self, name: str) -> None:
        del self._models[name]

    def check(self, name: str) -> None:
        """Refuse names that would run code or read a file outside the allowed folders.

        Raises:
            ModelError: the name is refused.
        """
        if name in (self.default, "demo", PROMPT_MODEL, DEMO_TEXT):
            return
        family, _, identifier = name.partition("/")
        if family == "py":
            raise ModelError("Python files can only be chosen by whoever starts the server, with --model.")
        path = _local_path(family, identifier)
        if path is not None and not self._is_allowed(path):
            raise ModelError(
                "This server does not load checkpoints from that path; start it with --allow-folder to allow a folder."
            )

    def names(self) -> list[str]:
        """List the models to offer: the default, checkpoints in the allowed folders, well-known models."""
        return list(
            dict.fromkeys((self.default, *find_checkpoints(self.folders, text=self.reads_text), *self.suggested))
        )

    @abstractmethod
    def _load(self, name: str) -> Model: ...

    def _is_allowed(self, path: Path) -> bool:
        try:
            resolved = path.expanduser().resolve()  # follows symbolic links
        except (OSError, RuntimeError, ValueError):
            return False
        return any(resolved.is_relative_to(folder) for folder in self.folders)


class ModelCache(BaseModelCache[LoadedModel]):
    """Image models."""

    suggested = (
        "demo",
        PROMPT_MODEL,
        "timm/vit_base_patch16_224.augreg_in1k",
        "timm/deit3_small_patch16_224.fb_in22k_ft_in1k",
        "timm/vit_small_patch14_reg4_dinov2.lvd142m",
        "hf/google/vit-base-patch16-224",
    )
    reads_text = False

    def __init__(self, default: str, folders: Sequence[Path] = ()) -> None:
        super().__init__(default, folders)
        self._duals: dict[str, DualEncoder] = {}
        self._towers: dict[str, nn.Module] = {}

    def dual_encoder(self, name: str) -> DualEncoder | None:
        """Return a loaded model with its text tower; ``None`` if it has none."""
        self.get(name)
        return self._duals.get(name)

    def reads_prompts(self, name: str) -> bool:
        """Whether a loaded model has a text tower."""
        return name in self._duals

    def embedding_tower(self, name: str) -> nn.Module:
        """Return the part of a model that embeds images."""
        model = self.get(name)
        if name not in self._towers:  # kept, because what is known of an architecture is cached by its module
            dual = self._duals.get(name)
            self._towers[name] = embedding_tower(network_of(model) if dual is None else dual.model)
        return self._towers[name]

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._duals.pop(name, None)
        self._towers.pop(name, None)

    def _load(self, name: str) -> LoadedModel:
        try:
            loaded = load_model(name)
            if encoding_methods(loaded.model) is None:
                return loaded
            dual = load_dual_encoder(name)
        except VitreousError as error:  # by its name it may be a classifier, or a model of images and texts
            try:
                dual = load_dual_encoder(name)
            except VitreousError:
                raise error from None
        self._duals[name] = dual
        classifier = zero_shot(dual, COMMON_NAMES)
        if not isinstance(classifier, LoadedModel):
            raise ModelError(f"{name}: how images become its input is not known.")
        return classifier


class TextModelCache(BaseModelCache[LoadedTextModel]):
    """Text classifiers with their tokenizers."""

    suggested = (
        DEMO_TEXT,
        "hf/distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        "hf/textattack/bert-base-uncased-imdb",
    )
    reads_text = True

    def _load(self, name: str) -> LoadedTextModel:
        return load_text_model(name)


def find_checkpoints(folders: Sequence[Path], *, text: bool) -> list[str]:
    """List the text classifiers, or the image models, that are in the folders or directly below them."""
    return [
        name
        for folder in folders
        for path in [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
        if (name := _checkpoint_name(path, text=text)) is not None
    ]


def _local_path(family: str, identifier: str) -> Path | None:
    """Return the path that a model name makes the server read; ``None`` for names on the hub."""
    if family == "timm":
        if identifier.startswith("local-dir:"):
            return Path(identifier.removeprefix("local-dir:"))
        _, at, source = identifier.partition("@")
        return Path(source) if at and source != "random" else None
    # os.path returns False for a name that is too long for a file, where pathlib raises.
    exists = os.path.exists(identifier)  # noqa: PTH110
    if family == "hf" and (not _HUB_NAME.fullmatch(identifier) or ".." in identifier or exists):
        return Path(identifier)
    return None


def _checkpoint_name(folder: Path, *, text: bool) -> str | None:
    try:
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None  # reading a pipe would block
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or text != _is_text_classifier(config):
        return None
    return f"timm/local-dir:{folder}" if "architecture" in config else f"hf/{folder}"


def _is_text_classifier(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(
        str(name).endswith("ForSequenceClassification") for name in architectures
    )
