"""Load image, video and text classifiers and CLIP-like image towers of transformers, without running remote code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._utils.messages import error_message, errors_as, warn_caller
from vitreous._utils.storage import expanded
from vitreous.errors import MissingDependencyError, ModelError
from vitreous.inputs.model_io import Texts
from vitreous.inputs.texts import Reader, knows_no_words
from vitreous.models import checkpoints as hub
from vitreous.models.checkpoints import check_folder, check_sizes
from vitreous.models.demo import TEXT_FOLDER
from vitreous.models.loaded import LoadedModel, cached_fingerprint_of, put_on
from vitreous.models.preprocessing import (
    Preprocessing,
    VolumePreprocessing,
    as_image_size,
    check_patches,
    from_processor,
    from_video_processor,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitreous.inputs.model_io import OutputActivation


# The image tower to load from a vision-language model.
_IMAGE_TOWERS = {
    "clip": "CLIPVisionModelWithProjection",
    "clip_vision_model": "CLIPVisionModelWithProjection",
    "siglip": "SiglipVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
}
_TOWER_CLASSES = frozenset({*_IMAGE_TOWERS.values(), "CLIPVisionModel"})
# These interpolate their position embedding in every forward pass.
_ANY_SIZE = frozenset({"dinov2", "dinov2_with_registers"})
_TIMM = "timm_wrapper"  # a timm model inside transformers
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_INSTEAD = "hf/FOLDER or demo"


def load_hf(identifier: str, image_size: tuple[int, int] | None) -> LoadedModel:
    """Load a folder written by ``save_pretrained``, or a repository of the hub."""
    name = f"hf/{identifier}"
    transformers = transformers_library()
    place, options = place_of(name, identifier)
    config, model = load_network(name, place, options, lambda config: _class_for(transformers, name, config), _INSTEAD)
    preprocessing = load_preprocessing(transformers, name, place, config, options)
    if isinstance(preprocessing, VolumePreprocessing):
        if image_size not in {None, preprocessing.image_size}:
            raise ModelError(f"{name}: this model takes clips of one size only: leave out the image size")
        return LoadedModel(name, model, preprocessing, class_names_of(model))
    # The configuration of a timm model has no image size.
    native = preprocessing.image_size if config.model_type == _TIMM else image_size_of(config)
    if image_size and image_size != native:
        if config.model_type not in _ANY_SIZE:
            raise ModelError(f"{name}: this model takes images of {native[0]} x {native[1]} pixels only")
        check_patches(name, image_size, as_image_size(config.patch_size))
    return LoadedModel(name, model, preprocessing.override(image_size=image_size), class_names_of(model))


def transformers_library() -> Any:
    """Import transformers, or raise an error that names the extra."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError('hf/ models need the transformers library: pip install "vitreous[hf]"') from error


def place_of(name: str, identifier: str) -> tuple[str, dict[str, Any]]:
    """Return the folder or repository to load from, and the options for ``from_pretrained``."""
    folder = expanded(identifier)
    local = folder.is_dir()
    if not local and (identifier.startswith((".", "/", "~")) or identifier.count("/") > 1):
        raise ModelError(f"{name}: there is no folder {folder}")
    if local:
        check_folder(name, folder)
    options = {"trust_remote_code": False, "local_files_only": local or not hub.is_reachable()}
    return str(folder) if local else identifier, options


def load_network(
    name: str, place: str, options: dict[str, Any], class_for: Callable[[Any], Any], instead: str
) -> tuple[Any, nn.Module]:
    """Load a configuration and its network, in eval mode.

    Args:
        name: The name of the model, for error messages.
        place: A folder or a repository of the hub.
        options: The options from ``place_of``.
        class_for: Returns the class for a configuration, or raises ``ModelError``.
        instead: What to suggest if the hub cannot be reached.

    Raises:
        ModelError: The model cannot be found or loaded, or lacks weights.
    """
    try:
        transformers = transformers_library()
        check_sizes(name, transformers.PretrainedConfig.get_config_dict(place, **options)[0])
        config = transformers.AutoConfig.from_pretrained(place, **options)
        model, report = class_for(config).from_pretrained(place, output_loading_info=True, **options)
    except ModelError:
        raise
    except Exception as error:  # configuration, download and weights raise many types
        if options["local_files_only"] and not Path(place).is_dir():
            raise hub.unreachable(name, instead) from error
        raise ModelError(f"{name}: the model cannot be loaded ({error_message(error)})") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would initialise these randomly
        raise ModelError(f"{name}: the weights lack {', '.join(missing[:3])}; is this an encoder without a classifier?")
    return config, model.eval()


def architecture_of(config: Any) -> str:
    """Return the class name that the configuration records; empty if there is none."""
    return str((config.architectures or [""])[0])


def _class_for(transformers: Any, name: str, config: Any) -> Any:
    architecture = architecture_of(config)
    if "ForSequenceClassification" in architecture:
        raise ModelError(
            f"{name} reads texts ({architecture}): vitreous.explain_text and `vitreous explain-text` explain it"
        )
    tower = architecture if architecture in _TOWER_CLASSES else _IMAGE_TOWERS.get(config.model_type)
    if "ForVideoClassification" in architecture:
        return transformers.AutoModelForVideoClassification
    classifier = "ForImageClassification" in architecture or tower is None
    return transformers.AutoModelForImageClassification if classifier else getattr(transformers, tower or "")


def image_size_of(config: Any) -> tuple[int, int]:
    """Return the image size of a configuration, 224 by default."""
    vision = getattr(config, "vision_config", config)
    return as_image_size(getattr(vision, "image_size", 224))


def load_preprocessing(transformers: Any, name: str, place: str, config: Any, options: dict[str, Any]) -> Preprocessing:
    """Return the preprocessing of a stored model; a guess, with a warning, if none is stored."""
    size, offline = image_size_of(config), options["local_files_only"]
    clips = "ForVideoClassification" in architecture_of(config)
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(place, **options)
    except Exception as error:  # a missing or unreadable file raises many types
        # The settings of a timm model are part of its configuration.
        stored = config.model_type == _TIMM or _stores_processor(place, offline=offline)
        if stored is None and offline:
            raise hub.unreachable(name, _INSTEAD, "its image processor is") from error
        if stored is not False:  # a default normalisation would give wrong results
            raise ModelError(f"{name}: its image processor cannot be loaded ({error_message(error)})") from error
        warn_caller(
            f"{name}: no image processor is stored with this model; assuming mean = std = 0.5 at"
            f" {size[0]} x {size[1]} pixels"
        )
        half = (0.5, 0.5, 0.5)
        if not clips:
            return Preprocessing(size, half, half, resize="squash")
        edges = {"height": size[0], "width": size[1]}
        return from_video_processor({"size": edges, "image_mean": half, "image_std": half, "resample": 3}, config)
    settings = processor.to_dict()
    return from_video_processor(settings, config) if clips else from_processor(settings, size)


def _stores_processor(place: str, *, offline: bool) -> bool | None:
    """Return whether an image processor is stored with a model; None if unknown."""
    folder = Path(place)
    if folder.is_dir():
        return any((folder / name).exists() for name in _PROCESSOR_FILES)
    known = [hub.has_file(place, name, offline=offline) for name in _PROCESSOR_FILES]
    return True if any(known) else None if None in known else False


def class_names_of(model: Any) -> tuple[str, ...] | None:
    """Return the class names of the configuration; None without names or with placeholders (LABEL_0, LABEL_1)."""
    labels = getattr(getattr(model, "config", None), "id2label", None)
    if isinstance(labels, Mapping) and not type(model).__name__.startswith(("CLIPVision", "SiglipVision")):
        names = {int(index): str(label) for index, label in labels.items()}
        if any(label != f"LABEL_{index}" for index, label in names.items()):
            return tuple(names[index] for index in sorted(names))
    return None


DEMO_TEXT = "demo-text"  # the classifier that is shipped


@dataclass(frozen=True)
class LoadedTextModel:
    """A text classifier in eval mode with its own tokenizer.

    Attributes:
        name: The name it was loaded by; ``None`` for a model passed by the caller.
        model: The network.
        tokenizer: The tokenizer.
        class_names: The class names in index order; ``None`` if unknown.
        outputs: What its outputs are; ``None`` to read the configuration or detect it.
    """

    name: str | None
    model: nn.Module
    tokenizer: Any
    class_names: tuple[str, ...] | None
    outputs: OutputActivation | None = None

    def example_input(self) -> Texts:
        """Return a short text as model input, for tracing the architecture."""
        return self.reader.inputs([self.reader.read("a", "a text").numbers])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its modules, their settings and all weights; computed again when a weight changes."""
        return cached_fingerprint_of(self.model)

    @cached_property
    def reader(self) -> Reader:
        """Converts texts to the model's input and maps word pieces to positions in the text.

        Raises:
            InputError: the tokenizer is not one of the transformers library.
            UnsupportedModelError: the model does not take texts.
        """
        return Reader(self.model, self.tokenizer)


def load_text_model(name: str, *, device: str | torch.device = "cpu") -> LoadedTextModel:
    """Load a text classifier and its tokenizer by name: ``demo-text``, ``hf/ID`` of the hub, or ``hf/FOLDER``.

    ``demo-text`` is shipped: a BERT of three narrow layers that tells praise of films from blame, see its card.

    Raises:
        ModelError: the name is not valid, or the model or tokenizer cannot be found or loaded.
        MissingDependencyError: the transformers library is not installed.

    Examples:
        >>> import vitreous
        >>> text_model = vitreous.load_text_model("hf/text-model")
        >>> len(text_model.class_names)
        3
    """
    family, _, identifier = name.partition("/") if isinstance(name, str) else ("", "", "")
    if name == DEMO_TEXT:
        identifier = str(TEXT_FOLDER)
    elif family != "hf" or not identifier:
        raise ModelError(f"text models are named {DEMO_TEXT}, hf/ID or hf/FOLDER, not {name!r}")
    transformers = transformers_library()
    with errors_as(ModelError, f"{name}: the model cannot be loaded"):
        place, options = place_of(name, identifier)
        _, model = load_network(
            name, place, options, lambda config: _text_class_for(transformers, name, config), "hf/FOLDER"
        )
        tokenizer = load_tokenizer(transformers, name, place, options)
        model = put_on(device, model)
        return LoadedTextModel(name, model, tokenizer, class_names_of(model))


def _text_class_for(transformers: Any, name: str, config: Any) -> Any:
    architecture = architecture_of(config)
    if "ForImageClassification" in architecture:
        raise ModelError(f"{name} reads images ({architecture}): vitreous.explain and `vitreous explain` explain it")
    return transformers.AutoModelForSequenceClassification


def load_tokenizer(transformers: Any, name: str, place: str, options: dict[str, Any]) -> Any:
    """Return the tokenizer that is stored beside a model.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # missing or unreadable files raise many types
        raise ModelError(f"{name}: its tokenizer cannot be loaded ({error_message(error)})") from error
    # Without tokenizer files, transformers returns an empty tokenizer.
    if knows_no_words(tokenizer):
        raise ModelError(
            f"{name}: there is no tokenizer beside the weights, or an empty one; "
            "save it to the same folder with tokenizer.save_pretrained"
        )
    return tokenizer
