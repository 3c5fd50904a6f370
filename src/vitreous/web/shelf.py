"""Which models visitors may ask for, and the few that are kept in memory."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from vitreous.errors import ModelError
from vitreous.models import LoadedModel, load_model
from vitreous.models.text_models import LoadedTextModel, load_text_model

_KEPT = 2
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
Model = TypeVar("Model", LoadedModel, LoadedTextModel)


class ModelShelf(ABC, Generic[Model]):
    """Models by name. Only one thread may take from it at a time.

    Args:
        first: The model that the server was started with: any name, also one that visitors may not ask for, such as a
            program of one's own.
        folders: Where checkpoints may be read.

    Attributes:
        suggested: Well-known models.
        reads_text: Whether these are text classifiers.
    """

    suggested: tuple[str, ...]
    reads_text: bool

    def __init__(self, first: str, folders: Sequence[Path] = ()) -> None:
        self.first = first
        self.folders = tuple(folder.resolve() for folder in folders)
        self._models: OrderedDict[str, Model] = OrderedDict()

    def take(self, name: str) -> Model:
        """Give a model, loaded now or before.

        Raises:
            ModelError: visitors may not ask for it, or it cannot be loaded.
        """
        name = (name or "").strip()  # a page may send nothing
        if not name:
            raise ModelError("Choose a model.")
        if name not in self._models:
            self.check(name)
            loaded = self._load(name)
            _ = loaded.fingerprint  # worked out now, so that no explanation waits for it
            self._models[name] = loaded
        self._models.move_to_end(name)
        for other in [other for other in self._models if other not in (name, self.first)][:-_KEPT]:
            del self._models[other]
        return self._models[name]

    def check(self, name: str) -> None:
        """Refuse a name that would run code or read a file outside the folders that may be read.

        Raises:
            ModelError: it would.
        """
        if name in (self.first, "demo"):
            return
        family, _, identifier = name.partition("/")
        if family == "py":
            raise ModelError("Models that are programs can only be chosen by whoever starts the server, with --model.")
        place = _local_place(family, identifier)
        if place is not None and not self._may_read(place):
            raise ModelError(
                "This server does not read checkpoints from that place; "
                "whoever starts it can allow a folder with --allow-folder."
            )

    def names(self) -> list[str]:
        """Suggest models: the first one, well-known ones, and checkpoints in the folders that may be read."""
        return list(dict.fromkeys((self.first, *checkpoints(self.folders, text=self.reads_text), *self.suggested)))

    @abstractmethod
    def _load(self, name: str) -> Model: ...

    def _may_read(self, place: Path) -> bool:
        try:
            resolved = place.expanduser().resolve()  # also where links lead
        except (OSError, RuntimeError, ValueError):
            return False
        return any(resolved.is_relative_to(folder) for folder in self.folders)


class Shelf(ModelShelf[LoadedModel]):
    """Models that see pictures."""

    suggested = (
        "demo",
        "timm/vit_base_patch16_224.augreg_in1k",
        "timm/deit3_small_patch16_224.fb_in22k_ft_in1k",
        "timm/vit_small_patch14_reg4_dinov2.lvd142m",
        "hf/google/vit-base-patch16-224",
    )
    reads_text = False

    def _load(self, name: str) -> LoadedModel:
        return load_model(name)


class TextShelf(ModelShelf[LoadedTextModel]):
    """Text classifiers with their tokenizers."""

    suggested = (
        "hf/distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        "hf/textattack/bert-base-uncased-imdb",
    )
    reads_text = True

    def _load(self, name: str) -> LoadedTextModel:
        return load_text_model(name)


def checkpoints(folders: Sequence[Path], *, text: bool) -> list[str]:
    """Name the checkpoints in folders that are text classifiers, or those that are not."""
    return [name for folder in folders for name in _checkpoints(folder, text=text)]


def _local_place(family: str, identifier: str) -> Path | None:
    """Give the file or folder that a name would make the server read; ``None`` where it is a name on the hub."""
    if family == "timm":
        if identifier.startswith("local-dir:"):
            return Path(identifier.removeprefix("local-dir:"))
        _, at, source = identifier.partition("@")
        return Path(source) if at and source != "random" else None
    # os.path says of a name that is too long for a file that there is none, where pathlib raises.
    is_there = os.path.exists(identifier)  # noqa: PTH110
    if family == "hf" and (not _HUB_NAME.fullmatch(identifier) or ".." in identifier or is_there):
        return Path(identifier)
    return None


def _checkpoints(folder: Path, *, text: bool) -> list[str]:
    """Name the checkpoints that are a folder, or lie directly in it."""
    places = [folder, *sorted(place for place in folder.glob("*") if place.is_dir())]
    return [name for place in places if (name := _checkpoint(place, text=text)) is not None]


def _checkpoint(place: Path, *, text: bool) -> str | None:
    try:
        file = place / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or text != _reads_text(config):
        return None
    return f"timm/local-dir:{place}" if "architecture" in config else f"hf/{place}"


def _reads_text(config: dict[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForSequenceClassification") for name in named)
