"""Methods as subclasses of captum's ``Attribution``, for captum's metrics, noise tunnel and figures.

Methods score patches; captum expects one value per input element. By default (``spread="share"``) the score of a patch
is divided equally among its pixels and channels, so that the attributions sum to the sum of the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from vitreous._utils.messages import short_repr
from vitreous.api.explain import explain, find_recipes
from vitreous.errors import InputError, MissingDependencyError, TargetError
from vitreous.inputs.target_objects import Output
from vitreous.integrations.maps import Spread, pixel_maps
from vitreous.models import LoadedModel

try:
    from captum.attr import Attribution
    from captum.log import log_usage
except ImportError as error:
    raise MissingDependencyError('vitreous.integrations.captum needs captum: pip install "captum>=0.8"') from error

__all__ = ["VitreousAttribution", "attribution_class"]


class VitreousAttribution(Attribution):  # type: ignore[misc]  # captum's classes are not typed here
    """A method with the interface of ``captum.attr.Attribution``.

    Args:
        model: an ``nn.Module`` that contains a Vision Transformer, or a ``LoadedModel``.
        method: spelling of the method.
        spread: how scores of patches become scores of pixels, see ``pixel_maps``. ``share`` divides a score by the
            number of pixels and channels; ``value`` and ``smooth`` repeat the pixel's value for every channel.
        **options: options of ``vitreous.explain``, such as ``outputs``, ``output`` or ``stage``.

    Examples:
        >>> import torch
        >>> from captum.metrics import sensitivity_max
        >>> from vitreous.integrations.captum import VitreousAttribution
        >>> attribution = VitreousAttribution(model, "gae")
        >>> attribution.attribute(images, target=3).shape == images.shape
        True
        >>> sensitivity_max(attribution.attribute, images, target=3, n_perturb_samples=2).shape
        torch.Size([1])
    """

    def __init__(
        self, model: nn.Module | LoadedModel, method: str = "tokentm", *, spread: Spread = "share", **options: Any
    ) -> None:
        network = model.model if isinstance(model, LoadedModel) else model
        if not isinstance(network, nn.Module):
            raise InputError(f"model must be an nn.Module, not {short_repr(model)}")
        super().__init__(network)
        (recipe,) = find_recipes(method)
        self.model, self.method, self.spread, self.options = model, recipe.spelling, spread, options

    @log_usage(part_of_slo=True)  # type: ignore[untyped-decorator]  # captum's noise tunnel calls what it wraps
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        patches: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attribute the output to the input.

        Args:
            inputs: images (batch, channel, height, width), or a tuple with that tensor alone.
            target: as in captum: a class, a tensor or a list with one per image, or a tuple of indices into an output
                with more axes. ``None`` for the predicted class of each image.
            additional_forward_args: further arguments of the model after the images.
            patches: return the scores of the patch grid, (batch, rows, columns), instead of pixels.

        Returns:
            Attributions in the shape of the inputs; a tuple if the inputs are one.
        """
        images = _only(inputs)
        options = dict(self.options)
        if additional_forward_args is not None:
            more = additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
            options["call"] = lambda network, pixels: network(pixels, *_for_batch(more, len(images), len(pixels)))
        wanted = find_target(target, len(images))
        explanation = explain(self.model, images.detach(), self.method, wanted, **options)
        if patches:
            scores = explanation.scores[self.method]
            found = scores.reshape(len(images), *explanation.grid_of(self.method))
        else:
            found = pixel_maps(explanation, self.method, self.spread)[:, None].expand(images.shape)
            found = (found / images.shape[1] if self.spread == "share" else found).contiguous()
        found = found.to(images.dtype)
        return (found,) if isinstance(inputs, tuple) else found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.forward_func).__name__}, {self.method!r}, spread={self.spread!r})"


def attribution_class(method: str, **options: Any) -> type[VitreousAttribution]:
    """Return the subclass for one method, for code that calls captum's classes with the model alone.

    Args:
        method: spelling of the method.
        **options: see ``VitreousAttribution``.

    Examples:
        >>> from captum.attr import Saliency
        >>> from vitreous.integrations.captum import attribution_class
        >>> for kind in (Saliency, attribution_class("tokentm")):
        ...     attributions = kind(model).attribute(images, target=3)
    """
    (recipe,) = find_recipes(method)

    def __init__(self: VitreousAttribution, model: nn.Module | LoadedModel, **more: Any) -> None:  # noqa: N807
        VitreousAttribution.__init__(self, model, recipe.spelling, **{**options, **more})

    name = "".join(part.capitalize() for part in recipe.info.name.split("_"))
    return type(name, (VitreousAttribution,), {"__init__": __init__, "__doc__": recipe.info.summary})


def _only(inputs: Any) -> Tensor:
    if isinstance(inputs, tuple) and len(inputs) == 1:
        inputs = inputs[0]
    if not isinstance(inputs, Tensor):
        raise InputError(
            "inputs must be one tensor of images; pass further arguments of the model as additional_forward_args"
        )
    return inputs


def _for_batch(given: Sequence[Any], images: int, rows: int) -> list[Any]:
    """Arguments for a run on another batch size: methods also run parts and repetitions of a batch."""
    for one in given:
        if isinstance(one, Tensor) and one.dim() and len(one) == images and images not in {1, rows}:
            raise InputError(
                "this method runs the model with another batch size, and additional_forward_args has one row per "
                "image: explain one image at a time"
            )
    return [
        one.expand(rows, *one.shape[1:]) if isinstance(one, Tensor) and one.dim() and len(one) == images == 1 else one
        for one in given
    ]


def find_target(target: Any, batch: int) -> Any:
    """Convert captum's target to a target of ``explain``."""
    if isinstance(target, Tensor):
        target = int(target) if target.numel() == 1 else target.tolist()
    if target is None or isinstance(target, int):
        return target
    if isinstance(target, tuple):
        return _at(target)
    if isinstance(target, list) and len(target) == batch:
        return [_at(one) if isinstance(one, tuple) else int(one) for one in target]
    raise TargetError(f"target must be a class, one per image ({batch}), or a tuple of indices, not {target!r}")


def _at(place: tuple[Any, ...]) -> int | Output:
    """One element of an image's output."""
    if len(place) == 1:
        return int(place[0])
    read: Callable[[Any], Tensor] = lambda output: output[(slice(None), *place)]  # noqa: E731
    return Output(read, f"output[{', '.join(map(str, place))}]")
