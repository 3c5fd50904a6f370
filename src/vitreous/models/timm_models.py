"""Load timm models by name, with weights from the hub, from a local file or folder, or random."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.models import model_entrypoint, split_model_name_tag
from torch import nn

from vitreous._utils.messages import close_match, error_message
from vitreous._utils.storage import expanded
from vitreous.errors import ModelError
from vitreous.models import checkpoints as hub
from vitreous.models.checkpoints import MOST_CLASSES, check_folder, load_strictly, read_checkpoint, without_prefixes
from vitreous.models.loaded import LoadedModel
from vitreous.models.preprocessing import check_patches, from_timm

if TYPE_CHECKING:
    from vitreous.models.checkpoints import State

_RANDOM_SEED = 0
_OWN_HEADS = (nn.Linear, nn.Sequential)
_ELSEWHERE = ("local-dir:", "hf-hub:")
_HUB_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")


def load_timm(identifier: str, image_size: tuple[int, int] | None) -> LoadedModel:
    """Load ``NAME``, ``NAME@FILE``, ``NAME@random``, ``local-dir:FOLDER`` or ``hf-hub:ID``."""
    name = f"timm/{identifier}"
    if identifier.startswith(_ELSEWHERE):
        return _loaded(name, _from_elsewhere(identifier, image_size), image_size)
    architecture, at, source = identifier.partition("@")
    check_known(architecture)
    if at and not source:
        raise ModelError(f"{name}: after @ comes a weights file or the word random")
    if source == "random":
        # Random outputs have no class names, even if their number matches ImageNet.
        return _loaded(name, _random(architecture, image_size), image_size, named=False)
    if source:
        return _loaded(name, _from_file(architecture, Path(source), image_size), image_size)
    return _loaded(name, _from_hub(architecture, image_size), image_size)


def check_known(architecture: str) -> None:
    """Raise, with close matches, if timm does not have the architecture or its tag."""
    base, tag = split_model_name_tag(architecture)
    if not timm.is_model(base):
        raise ModelError(f"timm has no model {base!r}{close_match(base, timm.list_models())}")
    if tag and not timm.models.is_model_pretrained(architecture):
        tagged = [known for known in timm.list_pretrained() if known.startswith(f"{base}.")]
        raise ModelError(f"timm has no weights {architecture!r}{close_match(architecture, tagged)}")


def _loaded(name: str, model: nn.Module, image_size: tuple[int, int] | None, *, named: bool = True) -> LoadedModel:
    """Switch a timm classifier to eval mode and wrap it with ``described_timm``.

    Raises:
        ModelError: It is not a classifier.
    """
    check_classifier(name, model)
    return described_timm(name, model.eval(), image_size, named=named)


def check_classifier(name: str, model: nn.Module) -> None:
    """Raise if a timm model has no classifier."""
    # Assigning a head later leaves num_classes at 0.
    if getattr(model, "num_classes", None) == 0 and not isinstance(getattr(model, "head", None), _OWN_HEADS):
        raise ModelError(
            f"{name}: this is a backbone without a classifier: its outputs are features, not classes; train a head "
            "on it, or use weights that include one"
        )


def described_timm(
    name: str, model: nn.Module, image_size: tuple[int, int] | None = None, *, named: bool = True
) -> LoadedModel:
    """Wrap a timm model with the preprocessing and class names of its configuration.

    Args:
        name: The name of the model.
        model: A timm model.
        image_size: The requested image size; by default the one that it was built for.
        named: Whether the class names of its configuration, or ImageNet's, apply to its outputs.
    """
    class_names = _class_names(model) if named else None
    return LoadedModel(name, model, from_timm(model, image_size or _built_for(model)), class_names)


def _built_for(model: nn.Module) -> tuple[int, int] | None:
    """Return the image size of the patch embedding if it is fixed; a configuration in a folder may differ."""
    embedding = getattr(model, "patch_embed", None)
    size = getattr(embedding, "img_size", None)
    return (size[0], size[1]) if size and getattr(embedding, "strict_img_size", True) else None


def _create(architecture: str, image_size: tuple[int, int] | None, **options: Any) -> nn.Module:
    """Build a timm model."""
    if image_size:
        options["img_size"] = image_size
    try:
        model: nn.Module = timm.create_model(architecture, **options)
    except TypeError as error:
        if image_size and "img_size" in str(error):
            raise ModelError(f"timm/{architecture}: this model cannot be built for another image size") from error
        raise
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if image_size and patch:
        check_patches(f"timm/{architecture}", image_size, patch)
    return model


def _random(architecture: str, image_size: tuple[int, int] | None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_RANDOM_SEED)
        return _create(architecture, image_size)


def _from_file(architecture: str, file: Path, image_size: tuple[int, int] | None) -> nn.Module:
    state = without_prefixes(read_checkpoint(file))
    options = {} if (classes := _classes_in(state, architecture)) is None else {"num_classes": classes}
    model = _create(architecture, image_size, **options)
    creator = model_entrypoint(split_model_name_tag(architecture)[0])
    load_strictly(model, state, source=str(file), creator=creator)
    return model


def _classes_in(state: State, architecture: str) -> int | None:
    """Return the number of classes of the head in a state dict; None without a head."""
    config = timm.models.get_pretrained_cfg(architecture)
    classifier = getattr(config, "classifier", None) or "head"
    first = classifier if isinstance(classifier, str) else classifier[0]
    weight = state.get(f"{first}.weight")
    if weight is None or not weight.dim():
        return None
    if weight.shape[0] > MOST_CLASSES:
        raise ModelError(f"the head of the weights has {weight.shape[0]:,} classes, more than {MOST_CLASSES:,}")
    return weight.shape[0]


def _from_hub(architecture: str, image_size: tuple[int, int] | None) -> nn.Module:
    name = f"timm/{architecture}"
    config = timm.models.get_pretrained_cfg(architecture)
    if config is None or not config.has_weights:
        raise ModelError(f"{name}: no weights are published for this model; use {name}@FILE or {name}@random")
    if not hub.is_reachable():
        names = (config.hf_hub_filename, *_HUB_FILES) if config.hf_hub_filename else _HUB_FILES
        cached = hub.cached_file(config.hf_hub_id, names) if config.hf_hub_id else None
        if cached is None:
            raise hub.unreachable(name, f"{name}@FILE, {name}@random or demo")
        return _from_file(architecture, cached, image_size)
    return _published(architecture, image_size)


def _from_elsewhere(identifier: str, image_size: tuple[int, int] | None) -> nn.Module:
    kind, _, place = identifier.partition(":")
    if kind == "local-dir":
        folder = expanded(place)
        check_folder(f"timm/{identifier}", folder)
        return _published(f"local-dir:{folder}", image_size)
    if kind == "hf-hub" and not hub.is_reachable():
        config = hub.cached_file(place, ["config.json"])
        if config is None:
            raise hub.unreachable(f"timm/{identifier}", "timm/local-dir:FOLDER or demo")
        check_folder(f"timm/{identifier}", config.parent)
        return _published(f"local-dir:{config.parent}", image_size)
    return _published(identifier, image_size)


def _published(identifier: str, image_size: tuple[int, int] | None) -> nn.Module:
    try:
        return _create(identifier, image_size, pretrained=True)
    except ModelError:
        raise
    except Exception as error:  # downloads, parsing and strict loading raise many types
        raise ModelError(f"timm/{identifier}: the model cannot be loaded ({error_message(error)})") from error


def _class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names of the configuration, or ImageNet's if their number matches."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    count = getattr(model, "num_classes", 0)
    names = config.get("label_names")
    if isinstance(names, dict):
        by_index = {int(index): name for index, name in names.items()}
        names = [by_index[index] for index in sorted(by_index)]
    if names and len(names) == count:
        descriptions = config.get("label_descriptions") or {}
        return tuple(str(descriptions.get(name, name)) for name in names)
    subset = infer_imagenet_subset({"num_classes": count})
    return tuple(ImageNetInfo(subset).label_descriptions()) if subset else None
