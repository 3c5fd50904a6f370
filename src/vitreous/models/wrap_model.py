"""Models passed by the caller: infer their preprocessing and class names.

``TwoSided`` turns a binary classifier with one output into one with two classes, so that both can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.messages import errors_as, short_repr
from vitreous.errors import InputError, ModelError, UnsupportedModelError
from vitreous.models.hf_models import class_names_of, image_size_of
from vitreous.models.loaded import LoadedModel
from vitreous.models.preprocessing import Preprocessing, from_processor, from_torchvision, from_video_processor

Pair = tuple[nn.Module, Any]

_TORCHVISION_SETTINGS = ("crop_size", "resize_size", "mean", "std", "interpolation")


def infer_preprocessing(model: nn.Module | Pair) -> LoadedModel | None:
    """Wrap a network with its preprocessing; None if the preprocessing is unknown.

    Args:
        model: A network with an attribute ``preprocessing`` or with timm's configuration, or a pair of a network and
            its preprocessing: a ``Preprocessing``, an image processor of transformers, torchvision weights or their
            ``transforms()``.

    Raises:
        InputError: The pair contains something else.
        ModelError: The preprocessing is not valid.
    """
    if isinstance(model, tuple):
        return model_with_processor(model)
    with errors_as(ModelError, f"the preprocessing of {type(model).__name__} cannot be read"):
        return _self_described(model)


def _self_described(model: nn.Module) -> LoadedModel | None:
    own = getattr(model, "preprocessing", None)
    if isinstance(own, Preprocessing):
        return LoadedModel(type(model).__name__, model, own, own_class_names(model))
    if hasattr(model, "pretrained_cfg"):
        from vitreous.models.timm_models import described_timm  # noqa: PLC0415  (timm takes a second to import)

        return described_timm(type(model).__name__, model)
    return None


def own_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names from the attribute ``class_names`` or from the configuration of transformers."""
    names: Any = getattr(model, "class_names", None)
    return tuple(map(str, names)) if isinstance(names, Iterable) else class_names_of(model)


def known_class_names(model: LoadedModel | nn.Module) -> tuple[str, ...] | None:
    """Return the class names of a loaded model or of a network, from its attribute or configuration."""
    if isinstance(model, LoadedModel):
        return model.class_names
    names = own_class_names(model)
    if names is None and (found := infer_preprocessing(model)) is not None:
        return found.class_names
    return names


class CalledModel(nn.Module):
    """A model with a custom call, for models that take more than images."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call
        self.train(model.training)

    def forward(self, images: Tensor) -> Any:
        """What the function returns."""
        return self.call(self.model, images)


def called_by(model: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> nn.Module:
    """The model as a module that is called by a function ``call(model, images)``.

    Raises:
        InputError: it is no function.
    """
    if not callable(call):
        raise InputError(f"call must be a function of the model and its images, not {short_repr(call)}")
    return CalledModel(model, call)


def model_with_processor(pair: Pair) -> LoadedModel:
    """Wrap a pair of a network and its preprocessing, see ``infer_preprocessing``.

    Raises:
        InputError: The pair contains something else.
        ModelError: The preprocessing is not valid.
    """
    if len(pair) != 2 or not isinstance(pair[0], nn.Module):
        raise InputError("a pair must be a model and its preprocessing, such as (model, image_processor)")
    with errors_as(ModelError, f"the preprocessing of {type(pair[0]).__name__} cannot be read"):
        return _joined(*pair)


def _joined(network: nn.Module, source: Any) -> LoadedModel:
    class_names = own_class_names(network)
    if hasattr(source, "transforms") and hasattr(source, "meta"):  # torchvision's weights
        class_names = tuple(source.meta.get("categories") or ()) or class_names
        source = source.transforms()
    return LoadedModel(type(network).__name__, network, preprocessing_of(network, source), class_names)


def preprocessing_of(network: nn.Module, source: Any) -> Preprocessing:
    """Return the preprocessing of a network, read from another object.

    Raises:
        InputError: The object does not define a preprocessing.
    """
    if isinstance(source, Preprocessing):
        return source
    processor = getattr(source, "image_processor", source)  # a multimodal processor contains an image processor
    settings = processor.to_dict() if hasattr(processor, "to_dict") else {}
    if "image_mean" in settings and type(network).__name__.endswith("ForVideoClassification"):
        return from_video_processor(settings, getattr(network, "config", None))
    if {"image_mean", "data_config"} & settings.keys():
        return from_processor(settings, image_size_of(getattr(network, "config", None)))
    if all(hasattr(source, name) for name in _TORCHVISION_SETTINGS):
        return from_torchvision(source)
    steps = {type(step).__name__: step for step in getattr(source, "transforms", ())}
    if {"Resize", "Normalize"} <= steps.keys():  # a Compose, as open_clip and OpenAI's clip give it
        return from_torchvision(_as_preset(steps))
    raise InputError(
        "the preprocessing of a model is a vitreous.models.Preprocessing, an image processor of transformers, or "
        f"torchvision weights or their transforms(), not {type(source).__name__}"
    )


def _as_preset(steps: Mapping[str, Any]) -> SimpleNamespace:
    """What torchvision's Resize, CenterCrop and Normalize say together, named as in its own presets."""
    resize, normalize = steps["Resize"], steps["Normalize"]
    return SimpleNamespace(
        crop_size=getattr(steps.get("CenterCrop"), "size", resize.size),
        resize_size=resize.size,
        interpolation=resize.interpolation,
        mean=normalize.mean,
        std=normalize.std,
    )


class TwoSided(nn.Module):
    """Outputs [-z, z] for a wrapped model with the single logit z: two classes, each with its sigmoid as probability.

    The probabilities are unchanged and sum to 1. Explaining class 1 explains z, explaining class 0 explains -z, both at
    full scale: methods that add the gradient to an identity (gae, transattr, iia) would give another map for a scaled
    z. Methods that separate positive and negative parts of every layer (transattr, plrp, lrp_rollout, abslrp) see the
    sign as one more layer; for the class that the model rejects they give zeros or another map.

    If the wrapped model outputs a probability p (``probability``), the output is [1 - p, p].
    """

    sides: Tensor

    def __init__(self, model: nn.Module, *, probability: bool = False) -> None:
        super().__init__()
        self.model, self.probability = model, probability
        # Overrides the configuration of the wrapped model: each of the two outputs is a sigmoid logit.
        problem = None if probability else "multi_label_classification"
        self.config = SimpleNamespace(problem_type=problem)
        # Not persistent, so that checkpoints of the wrapped model still load.
        self.register_buffer("sides", torch.tensor([[-1.0], [1.0]]), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the two scores, (batch, 2)."""
        logit: Tensor = self.model(images)
        logit = logit.unsqueeze(-1) if logit.ndim == 1 else logit
        if logit.ndim != 2 or logit.shape[1] != 1:
            raise UnsupportedModelError(f"the model has {tuple(logit.shape)[1:]} outputs where one logit is needed")
        sides = self.sides.to(logit)
        # 1 - p for "no": half of 1 - (-1) and of 1 - 1.
        return functional.linear(logit, sides, (1 - sides[:, 0]) / 2 if self.probability else None)
