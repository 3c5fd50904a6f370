"""Models by name: the one function that turns ``demo``, ``timm/...`` or the like into a model ready for photos."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vitreous._utils.error_boundary import errors_as
from vitreous.errors import ModelError
from vitreous.models.loaded import LoadedModel, put_on
from vitreous.models.preprocessing import as_image_size

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LoadedModel", "list_models", "load_model"]

_KINDS = {
    "demo": "the demo model: tells 37 breeds of cats and dogs apart, works offline (extra vitreous[demo])",
    "timm/NAME": "any timm model with its published weights, for example timm/vit_base_patch16_224.augreg_in1k",
    "timm/NAME@FILE": "a timm model with weights from a local safetensors file or weights-only checkpoint",
    "timm/NAME@random": "a timm model with random weights, the same ones every time",
    "timm/local-dir:FOLDER": "a folder in timm's own format: config.json and weights",
    "py/FILE.py:FUNCTION": "your own nn.Module: the file is run, and the function (no arguments) returns the model",
    "py/FILE.py:FUNCTION@WEIGHTS": "the same with weights from a local safetensors file or weights-only checkpoint",
    "hf/ID": "an image classifier or CLIP-like image tower of the Hugging Face hub (extra vitreous[hf])",
    "hf/FOLDER": "the same from a local folder written by save_pretrained (extra vitreous[hf])",
    "hf/ID, hf/FOLDER": "for explain-text: a text classifier with its tokenizer (extra vitreous[hf])",
}
_VIT_LIKE = ("vit_*", "deit*", "eva*", "beit*", "cait*", "flexivit*", "samvit*", "naflexvit*")


def load_model(
    name: str,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    image_size: int | Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Load a model by name, in eval mode, with its preprocessing and class names.

    Args:
        name: One of the kinds of names that ``list_models`` describes.
        mean: Replaces the mean of the model's own preprocessing; one number or three.
        std: Replaces the standard deviation; one number or three.
        image_size: Builds the model for another image size; one number, or height and width.
        device: Where the model is put.

    Raises:
        ModelError: The name is not understood, or the model cannot be found or loaded.
        MissingDependencyError: The model needs an extra that is not installed.

    Examples:
        >>> import vitreous
        >>> model = vitreous.load_model("timm/test_vit@random")
        >>> model.preprocessing.image_size
        (160, 160)
    """
    if not isinstance(name, str):  # a path neither: it would lose the second of two slashes in hf//FOLDER
        raise ModelError(f"a model is named by a text such as demo or hf/FOLDER, not by {type(name).__name__}")
    with errors_as(ModelError, f"{name}: the model cannot be loaded"):
        size = None if image_size is None else as_image_size(image_size)
        # Building a network draws its first weights from the caller's generator.
        with torch.random.fork_rng(devices=[]):
            loaded = _load(name, size, mean, std)
        preprocessing = loaded.preprocessing.override(mean=mean, std=std)
        return replace(loaded, name=name, model=put_on(device, loaded.model), preprocessing=preprocessing)


def list_models() -> dict[str, object]:
    """Return the kinds of model names with a line of help each, and how many ViT-like names timm knows."""
    import timm  # noqa: PLC0415  (timm takes a second to import)

    return {
        "names": [{"name": name, "help": text} for name, text in _KINDS.items()],
        "timm_vision_transformers": len(timm.list_models(list(_VIT_LIKE))),
    }


def _load(
    name: str,
    size: tuple[int, int] | None,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> LoadedModel:
    """Hand the name to the family it belongs to; families are imported when they are asked for.

    Mean and standard deviation are for models that have none of their own.
    """
    family, _, identifier = name.partition("/")
    if name == "demo":
        from vitreous.models.demo import load_demo  # noqa: PLC0415

        return load_demo(size)
    if family == "timm" and identifier:
        from vitreous.models.timm_models import load_timm  # noqa: PLC0415

        return load_timm(identifier, size)
    if family == "hf" and identifier:
        from vitreous.models.hf_models import load_hf  # noqa: PLC0415

        return load_hf(identifier, size)
    if family == "py" and identifier:
        from vitreous.models.own_models import load_own  # noqa: PLC0415

        return load_own(identifier, size, mean, std)
    import timm  # noqa: PLC0415

    if timm.is_model(name.partition("@")[0]):
        raise ModelError(f"the model name {name!r} lacks its family; did you mean timm/{name}?")
    raise ModelError(f"the model name {name!r} is not understood; names look like {', '.join(_KINDS)}")
