"""A network that a caller brings, with what is known of how photos become its input.

``binary`` makes a model with one output for "yes" a model of two classes, so that either answer can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.messages import errors_as, shown
from vitreous.errors import InputError, ModelError, UnsupportedModelError
from vitreous.models.hf_models import class_names_of, image_size_of
from vitreous.models.loaded import LoadedModel
from vitreous.models.preprocessing import Preprocessing, from_processor, from_torchvision

Pair = tuple[nn.Module, Any]

_TORCHVISION_SETTINGS = ("crop_size", "resize_size", "mean", "std", "interpolation")


def infer_preprocessing(model: nn.Module | Pair) -> LoadedModel | None:
    """Give a network as it is, with its preprocessing, or None where nobody says how photos become its input.

    Args:
        model: A network that says it by itself, in an attribute ``preprocessing`` or in timm's configuration, or a pair
            of a network and what says it: a ``Preprocessing``, an image processor of transformers, the weights of
            torchvision or their ``transforms()``.

    Raises:
        InputError: The pair is of other things.
        ModelError: What says it is not valid.
    """
    if isinstance(model, tuple):
        return model_with_processor(model)
    with errors_as(ModelError, f"how photos become the input of {type(model).__name__} cannot be read"):
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
    """Return what a network calls its classes: in an attribute of this name, or in transformers' configuration."""
    names: Any = getattr(model, "class_names", None)
    return tuple(map(str, names)) if isinstance(names, Iterable) else class_names_of(model)


def known_class_names(model: LoadedModel | nn.Module) -> tuple[str, ...] | None:
    """Return the class names of a loaded model, or those that a network says or that come with its configuration."""
    if isinstance(model, LoadedModel):
        return model.class_names
    names = own_class_names(model)
    if names is None and (found := infer_preprocessing(model)) is not None:
        return found.class_names
    return names


class CalledModel(nn.Module):
    """A model that is called by a function, for one that takes more than images."""

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
        raise InputError(f"call must be a function of the model and its images, not {shown(call)}")
    return CalledModel(model, call)


def model_with_processor(pair: Pair) -> LoadedModel:
    """Give the network of a pair as it is, with the preprocessing that the other one says.

    Raises:
        InputError: The pair is of other things.
        ModelError: What says it is not valid.
    """
    if len(pair) != 2 or not isinstance(pair[0], nn.Module):
        raise InputError("a pair is a model and what tells how photos become its input, such as its image processor")
    with errors_as(ModelError, f"how photos become the input of {type(pair[0]).__name__} cannot be read"):
        return _joined(*pair)


def _joined(network: nn.Module, source: Any) -> LoadedModel:
    class_names = own_class_names(network)
    if hasattr(source, "transforms") and hasattr(source, "meta"):  # torchvision's weights
        class_names = tuple(source.meta.get("categories") or ()) or class_names
        source = source.transforms()
    return LoadedModel(type(network).__name__, network, preprocessing_of(network, source), class_names)


def preprocessing_of(network: nn.Module, source: Any) -> Preprocessing:
    """Return how photos become a network's input, as another object says it.

    Raises:
        InputError: It does not say it.
    """
    if isinstance(source, Preprocessing):
        return source
    processor = getattr(source, "image_processor", source)  # one for pictures and texts holds one for pictures
    settings = processor.to_dict() if hasattr(processor, "to_dict") else {}
    if {"image_mean", "data_config"} & settings.keys():
        return from_processor(settings, image_size_of(getattr(network, "config", None)))
    if all(hasattr(source, name) for name in _TORCHVISION_SETTINGS):
        return from_torchvision(source)
    steps = {type(step).__name__: step for step in getattr(source, "transforms", ())}
    if {"Resize", "Normalize"} <= steps.keys():  # a Compose, as open_clip and OpenAI's clip give it
        return from_torchvision(_as_preset(steps))
    raise InputError(
        "how photos become a model's input is told by vitreous.models.Preprocessing, by an image processor of "
        f"transformers, or by torchvision's weights or their transforms(), not by {type(source).__name__}"
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
    """Answers [-z, z] where the model inside answers z, two classes of which each has its sigmoid as probability.

    So probabilities stay what they were and add up to 1, and explaining class 1 is explaining z, explaining class 0 is
    explaining -z, at their own size: methods that add the gradient to an identity (gae, transattr, iia) would give
    another map for a part of z. Methods that treat positive and negative parts of every layer apart (transattr, plrp,
    lrp_rollout, abslrp) see the sign as one more layer, and give nothing or something else for the side that the model
    is against.

    Where the model inside answers a probability p (``probability``), the answer is [1 - p, p].
    """

    sides: Tensor

    def __init__(self, model: nn.Module, *, probability: bool = False) -> None:
        super().__init__()
        self.model, self.probability = model, probability
        # Whatever the model inside says of its one output: a sigmoid makes a probability of each of these.
        problem = None if probability else "multi_label_classification"
        self.config = SimpleNamespace(problem_type=problem)
        # Not part of the weights: a checkpoint of the model inside stays one.
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
