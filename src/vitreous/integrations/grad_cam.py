"""Methods as CAM objects of pytorch-grad-cam: existing scripts change only the line that creates the object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitreous._utils.messages import short_repr, warn_caller
from vitreous.api.explain import explain, find_recipes
from vitreous.errors import InputError, MethodError, TargetError
from vitreous.inputs.model_io import class_scores
from vitreous.inputs.target import Target
from vitreous.inputs.target_objects import Output
from vitreous.integrations.maps import unit_maps
from vitreous.models import LoadedModel

__all__ = ["VitreousCAM", "cam_class"]

_BRIGHTNESS = (0.9, 1.0, 1.1)  # with and without a flip, what pytorch-grad-cam averages for aug_smooth


class VitreousCAM:
    """A method with the call interface of pytorch-grad-cam.

    Each map is scaled to [0, 1] and interpolated between patch centres; negative scores of signed methods are clamped.
    The model is explained in evaluation mode; its own mode does not change.

    Args:
        model: an ``nn.Module`` that contains a Vision Transformer, or a ``LoadedModel``.
        target_layers: accepted but ignored, with a warning; a spelling such as ``gradcam:layer=-2`` selects the layer.
        reshape_transform: accepted but ignored, with a warning: the patch grid is found in the model.
        method: spelling of the method.
        **options: options of ``vitreous.explain``, such as ``outputs``, ``output`` or ``stage``.

    Attributes:
        outputs: the model's outputs of the last call.

    Examples:
        >>> from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
        >>> from vitreous.integrations.grad_cam import VitreousCAM
        >>> with VitreousCAM(model=model, method="gae") as cam:
        ...     grayscale_cam = cam(input_tensor=images, targets=[ClassifierOutputTarget(3)])
        >>> grayscale_cam.shape, float(grayscale_cam.max())
        ((1, 32, 32), 1.0)
    """

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        target_layers: Sequence[nn.Module] | None = None,
        reshape_transform: Callable[[Tensor], Tensor] | None = None,
        *,
        method: str = "tokentm",
        **options: Any,
    ) -> None:
        (recipe,) = find_recipes(method)
        self.model, self.method, self.options = model, recipe.spelling, options
        self.target_layers, self.reshape_transform = target_layers, reshape_transform
        self.outputs: Tensor | None = None
        given = {"target_layers": target_layers, "reshape_transform": reshape_transform}
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            warn_caller(
                f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used: {self.method} finds the "
                "blocks and the patch grid in the model"
            )

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Sequence[Any] | None = None,
        aug_smooth: bool = False,  # noqa: FBT001, FBT002 - the signature of the other library
        eigen_smooth: bool = False,  # noqa: FBT001, FBT002
    ) -> NDArray[np.float32]:
        """Explain images.

        Args:
            input_tensor: images (batch, channel, height, width), preprocessed.
            targets: one per image: a target of pytorch-grad-cam or any function of the output of one image, a class, or
                a target of ``vitreous.targets``; ``None`` for the predicted classes.
            aug_smooth: average the maps of six versions of each image: with and without a flip, at three brightnesses.
            eigen_smooth: not supported: it needs the activations of one layer.

        Returns:
            Maps (batch, height, width) in [0, 1].
        """
        if eigen_smooth:
            raise MethodError("eigen_smooth needs the activations of one layer: omit it, or use method='eigencam'")
        if not isinstance(input_tensor, Tensor):
            raise InputError(f"input_tensor must be a tensor of images, not {short_repr(input_tensor)}")
        wanted = None if targets is None else [find_target(target) for target in targets]
        if not aug_smooth:
            return self._maps(input_tensor, wanted)
        found = [
            np.flip(self._maps(input_tensor.flip(-1) * factor, wanted), axis=-1)
            if flipped
            else self._maps(input_tensor * factor, wanted)
            for flipped in (False, True)
            for factor in _BRIGHTNESS
        ]
        mean: NDArray[np.float32] = np.mean(found, axis=0, dtype=np.float32)
        return mean

    def _maps(self, images: Tensor, targets: list[int | Target] | None) -> NDArray[np.float32]:
        explanation = explain(self.model, images.detach(), self.method, targets, **self.options)
        self.outputs = explanation.logits
        maps: NDArray[np.float32] = unit_maps(explanation, self.method).float().cpu().numpy()
        return maps

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no hooks were registered."""


def cam_class(method: str, **options: Any) -> Callable[..., VitreousCAM]:
    """Return a callable that creates the object from a model, to replace a class in a table of methods.

    Args:
        method: spelling of the method.
        **options: see ``VitreousCAM``.

    Examples:
        >>> from pytorch_grad_cam import GradCAM
        >>> from vitreous.integrations.grad_cam import cam_class
        >>> methods = {"gradcam": GradCAM, "tokentm": cam_class("tokentm")}
        >>> cam = methods["tokentm"](model=model)
    """
    (recipe,) = find_recipes(method)
    return partial(VitreousCAM, method=recipe.spelling, **options)


def find_target(target: Any) -> int | Target:
    """Convert a target of pytorch-grad-cam to a target of ``explain``; classes stay classes."""
    if isinstance(target, Target) or (isinstance(target, int) and not isinstance(target, bool)):
        return target
    name = type(target).__name__
    if name == "ClassifierOutputTarget":
        return int(target.category)
    if not callable(target):
        raise TargetError(f"a target is a class or a function of the output of one image, not {short_repr(target)}")
    label = getattr(target, "__name__", name)
    category = getattr(target, "category", None)
    return Output(partial(_of_every_image, target), label if category is None else f"{label}({category})")


def _of_every_image(target: Callable[[Any], Tensor], output: Any) -> Tensor:
    """Apply the target to the output of each image."""
    found = [target(one) for one in (output if isinstance(output, Tensor | list | tuple) else class_scores(output))]
    if any(not isinstance(one, Tensor) or one.numel() != 1 for one in found):
        raise TargetError("a target must return one number for the output of an image")
    return torch.stack([one.reshape(()) for one in found])
